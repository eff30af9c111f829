"""Which models take `attn_implementation="flash_paged"`, and what a model that is loaded with it gets besides."""

import functools
import inspect
import sys

from transformers import PreTrainedModel

from hf_efficient.integrations import transformers_compat
from hf_efficient.kernels.attention.api import ATTENTION_NAMES


@functools.cache
def _keeps_windows_in_masks(module: str) -> bool:
    """Whether a modeling file (such as PhiMoE's) makes masks for a sliding window and gives its attention no window."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False
    return "create_sliding_window_causal_mask" in source and "sliding_window=" not in source


def register() -> None:
    """Lets models take our names. Idempotent."""
    if not hasattr(PreTrainedModel._check_and_adjust_attn_implementation, "_hf_efficient"):
        wrapped = _allow_our_names(PreTrainedModel._check_and_adjust_attn_implementation)
        PreTrainedModel._check_and_adjust_attn_implementation = wrapped


def _allow_our_names(original):
    @functools.wraps(original)
    def _check_and_adjust_attn_implementation(self, attn_implementation, is_init_check=False, *args, **kwargs):
        compatible = getattr(self, "_compatible_flash_implementations", None)
        name = transformers_compat.without_prefix(attn_implementation)
        if name not in ATTENTION_NAMES:
            return original(self, attn_implementation, is_init_check, *args, **kwargs)
        if name != attn_implementation:
            transformers_compat.check_paged_attention(self.config)
        # transformers checks these for its own names only
        if not self._supports_flash_attn or not type(self)._can_set_attn_implementation():
            raise ValueError(
                f"attn_implementation={attn_implementation!r}: {type(self).__name__} does not support flash attention "
                '(its attention cannot be replaced, or needs masks or biases that such kernels lack). Use "sdpa" or '
                '"eager".'
            )
        if getattr(self.config, "sliding_window", None) and _keeps_windows_in_masks(type(self).__module__):
            raise ValueError(
                f"attn_implementation={attn_implementation!r}: {type(self).__name__} puts its sliding window into "
                'masks alone, which flash attention does not take. Use "sdpa" or "eager".'
            )
        if compatible is not None and name not in compatible:
            if not any("attn" in name or name.startswith("flash_attention") for name in compatible):
                raise ValueError(
                    f"attn_implementation={attn_implementation!r}: {type(self).__name__} needs a kernel of its own "
                    f'({compatible}). Use one of these, "sdpa" or "eager".'
                )
            type(self)._compatible_flash_implementations = [*compatible, *ATTENTION_NAMES]
        found = original(self, attn_implementation, is_init_check, *args, **kwargs)
        if is_init_check and self.can_generate():
            from hf_efficient.integrations.transformers_generation import enable_automatic

            enable_automatic(self)
        return found

    _check_and_adjust_attn_implementation._hf_efficient = True
    return _check_and_adjust_attn_implementation
