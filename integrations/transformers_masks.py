"""The masks of `attn_implementation="flash_paged"`: 2-D, for the patterns that a flash kernel computes by itself."""

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_efficient.cache.page_handle import NO_MASK


_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_PLAIN_MASKS = {  # the mask patterns that a flash kernel expresses, by where transformers defines them
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    _PACKED,
}
_INSIDE: list[int] = []  # the threads in `one_sequence_a_row`, one as often as it entered
_LOCK = threading.Lock()
_WRAPPED_MASKS = {"and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"}


def flash_paged_mask(*args, mask_function=None, **kwargs):
    """transformers' 2-D mask for flash attention, for the patterns that such a mask can express.

    Of packed sequences their cu_seqlens, int32 [sequences + 1]: by itself flash attention takes sequences apart in
    batches of one alone, and where each begins at position 0.

    Where causal attention meets padding that is not at the left alone, a 4-D mask, bool [B, 1, S, n], as transformers
    makes it for "sdpa" (see `columns_of`): flash attention computes nothing for padded queries, and counts windows
    without the padding. Under torch.compile packed sequences have that mask too, and so has every forward without a
    cache or a mask of padding: the graph cannot depend on the positions.

    Raises ValueError for other patterns (chunked attention, blocks of image tokens that see each other, custom masks),
    which transformers would drop silently.
    """
    from transformers.masking_utils import flash_attention_mask, sdpa_mask

    if mask_function is not None:
        if torch.compiler.is_compiling():
            _check_traced_pattern(mask_function, **kwargs)
            needs_all = _may_be_packed(mask_function, **kwargs)
        else:
            _check_pattern(mask_function)
            names, columns = _parts(mask_function), kwargs.get("attention_mask")
            needs_all = columns is not None and not _is_left_padded(columns) and "causal_mask_function" in names
            if _PACKED in names:
                return _sequence_starts(mask_function)
        if needs_all:
            kwargs["allow_is_causal_skip"] = False
            seen = sdpa_mask(*args, mask_function=mask_function, **kwargs)
            seen._hfe_columns = kwargs.get("attention_mask")
            return seen
    return flash_attention_mask(*args, **kwargs)


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Inside, transformers takes each row of a batch without a mask for one sequence, in this thread. While a CUDA
    graph is captured it cannot look at the positions, and would make a mask for rows that hold several: with it,
    `scaled_dot_product_attention` does not run its flash kernel."""
    from transformers import masking_utils

    with _LOCK:
        if not _INSIDE:
            own = masking_utils.find_packed_sequence_indices
            masking_utils.find_packed_sequence_indices = functools.partial(_unless_inside, own)
        _INSIDE.append(threading.get_ident())
    try:
        yield
    finally:
        with _LOCK:  # others may still be inside
            _INSIDE.remove(threading.get_ident())
            if not _INSIDE:
                masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices.args[0]


def _unless_inside(own, positions: torch.Tensor) -> torch.Tensor | None:
    return None if threading.get_ident() in _INSIDE else own(positions)


def columns_of(mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The 2-D mask of what `flash_paged_mask` made, and the 4-D one or the cu_seqlens where it made those."""
    if mask is None or hasattr(mask, NO_MASK):
        return None, None, None
    if mask.dim() == 1:
        return None, None, mask
    return (mask._hfe_columns, mask, None) if hasattr(mask, "_hfe_columns") else (mask, None, None)


def row_starts(position_ids: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """cu_seqlens, int32, of the sequences packed into the one row of a batch of `width` tokens, None where it is one.

    For models whose masks know no positions. transformers would cut at positions 0 alone, and lose what is before the
    first. Waits for the device.
    """
    if position_ids is None or width == 1 or position_ids.shape != (1, width):
        return None
    begins = torch.ones(width + 1, dtype=torch.bool, device=position_ids.device)
    begins[1:-1] = position_ids[0].diff() <= 0
    starts = begins.nonzero().flatten().int()
    return starts if len(starts) > 2 else None


def _is_left_padded(columns: torch.Tensor) -> bool:
    """Whether all padding is at the left. True for a row of padding alone, as in a chunk of a prompt."""
    return bool((columns[:, 1:] >= columns[:, :-1]).all())


def _sequence_starts(function) -> torch.Tensor:
    """cu_seqlens, int32, of all rows of a mask function of packed sequences, one behind the other."""
    packed = _parts(function)[_PACKED]["packed_sequence_mask"]
    begins = torch.ones(packed.numel() + 1, dtype=torch.bool, device=packed.device)
    begins[:-1].view_as(packed)[:, 1:] = packed.diff() != 0
    return begins.nonzero().flatten().int()


def _may_be_packed(function, q_length=1, attention_mask=None, allow_is_causal_skip=True, **kwargs) -> bool:
    """Under torch.compile, where transformers makes a mask of packed sequences whatever the positions are."""
    return function.__name__ == "and_mask" and attention_mask is None and not allow_is_causal_skip and q_length > 1


def _parts(function) -> dict[str, dict]:
    """The names of a mask function and of those it consists of, and the variables of those that are known."""
    name = getattr(function, "__qualname__", repr(function))
    known = name in _WRAPPED_MASKS or name in _PLAIN_MASKS
    found = {name: inspect.getclosurevars(function).nonlocals if known else {}}
    if name in _WRAPPED_MASKS:
        for part in found[name].values():
            for inner in part if isinstance(part, tuple) else (part,):
                if callable(inner) and not isinstance(inner, torch.Tensor):
                    found |= _parts(inner)
    return found


def _check_pattern(function) -> None:
    for name in _parts(function):
        if name not in _PLAIN_MASKS and name not in _WRAPPED_MASKS:
            raise ValueError(
                f"the model asks for a mask pattern ({name}) that flash_paged cannot express: it does causal, "
                'bidirectional, sliding-window and packed masks. Use attn_implementation="sdpa".'
            )


def _check_traced_pattern(function, config=None, use_vmap=False, **kwargs) -> None:
    """`_check_pattern` under torch.compile, which cannot look into closures: by the outermost name, the config, and
    `use_vmap`, which transformers sets for functions that a model adds."""
    known = ("causal_mask_function", "bidirectional_mask_function", "and_mask")
    if function.__name__ not in known or use_vmap or getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"flash_paged cannot express the mask pattern {function.__name__}: run it without torch.compile"
        )
