"""What of this package is active in a model, what is not, and why: `hf_efficient.report(model)`."""

import collections
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_efficient.generation import model_state, served
from hf_efficient.integrations.transformers_compat import attention_of
from hf_efficient.integrations.transformers_generation import SpeculativeGenerationMixin
from hf_efficient.kernels.attention.api import ATTENTION_NAMES
from hf_efficient.layers import CompressedModule


_OPTIMIZE = "hf_efficient.optimize(model)"


@dataclass(frozen=True)
class Part:
    """One line of a report. do: what would change it, empty where nothing would or need not."""

    name: str
    is_active: bool
    what: str
    do: str = ""


@dataclass(frozen=True)
class ModelReport:
    """What is active in a model. Printed, it is a table."""

    model: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        lines = [self.model]
        for part in self.parts:
            lines.append(f"  {'on ' if part.is_active else 'off'}  {part.name}: {part.what}")
            lines += [f"       {part.do}"] if part.do else []
        return "\n".join(lines)

    __repr__ = __str__


def report(model: PreTrainedModel) -> ModelReport:
    """Reports which parts of hf_efficient are active in `model`: compressed weights, attention, the native loop.

    Runs at most one forward of two tokens, and changes nothing.

    Returns:
        a `ModelReport`: print it, or read `is_active`, `what` and `do` (how to change it) of each of its `parts`.

    Raises:
        TypeError: `model` is no transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model={type(model).__name__}: report takes a transformers model (a PreTrainedModel); unwrap PEFT or "
            "torch.compile wrappers first"
        )
    device, dtype = str(model.device), str(model.dtype).removeprefix("torch.")
    parts = (*_weights(model), _attention(model), _loop(model))
    return ModelReport(f"{type(model).__name__} on {device}, {dtype}", parts)


def _weights(model) -> Iterator[Part]:
    """One part for each format, or one that says that there is none."""
    counts, weights, bits = collections.Counter(), collections.Counter(), collections.Counter()
    for module in model.modules():
        for weight in module.compressed_weights() if isinstance(module, CompressedModule) else ():
            number = (weight.experts or 1) * weight.out_features * weight.in_features
            each = weight.format.bits_per_weight(weight.out_features, weight.in_features, model.dtype)
            name = str(weight.format)
            counts[name] += 1
            weights[name] += number
            bits[name] += number * each
    for name in counts:
        size = f"{weights[name] / 1e6:.1f} million weights of {bits[name] / weights[name]:.2f} bits"
        yield Part("weights", True, f"{counts[name]} tensors, {size}: {name}")
    if not counts:
        do = "from_pretrained(..., quantization_config=hf_efficient.WeightOnlyConfig())"
        yield Part("weights", False, "as the checkpoint has them", do)


def _attention(model) -> Part:
    name = attention_of(model.config.get_text_config(decoder=True))
    if name in ATTENTION_NAMES:
        return Part("attention", True, f"{name}, over the pages of a PagedCache")
    what = f"{name}, transformers' own; the native loop replaces 'sdpa' by flash_paged in decoding"
    return Part("attention", False, what, 'from_pretrained(..., attn_implementation="flash_paged")')


def _loop(model) -> Part:
    reason = served.why_not(model)
    if reason is None and not isinstance(model, SpeculativeGenerationMixin):
        return Part("generate()", False, "transformers' loop: nothing asked for the native one", _OPTIMIZE)
    if reason is not None:
        return Part("generate()", False, f"transformers' loop: {reason}")
    limit = model_state.current(model).exact_length
    what = "the native loop" + (f", up to {limit} tokens" if limit else "")
    return Part("generate()", True, f"{what}; transformers' for beams, output_attentions and output_hidden_states")
