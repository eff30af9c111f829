"""Whether a twin of `generate()` answered as transformers did."""

import torch
from transformers import GenerationMixin
from transformers.utils import ModelOutput


# a near-tie, in steps of the dtype at the logits' size
ROUNDING = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-8}


class Difference(Exception):
    """What differs; `rows`: [(row, column, transformers' token, the twin's)] where it is tokens."""

    def __init__(self, text: str, rows: tuple = (), names: str = ""):
        super().__init__(text)
        self.rows = rows


def compare(expected, actual, exact: bool, name: str, mask=None) -> None:
    """Raises Difference. expected, actual: what `generate()` gave, a tensor or a `ModelOutput`; exact: tokens are
    equal, not only their shape; mask: [rows, columns] of the prompt, or None: keys and values of padding are not
    compared, for this package's loop leaves zeros there (`hf_efficient.generation.output.as_transformers`)."""
    if isinstance(expected, ModelOutput) != isinstance(actual, ModelOutput):
        raise Difference(f"type {type(actual).__name__} instead of {type(expected).__name__}")
    if not isinstance(expected, ModelOutput):
        _compare_tokens(expected, actual, exact)
        return
    if not isinstance(actual, type(expected)):
        raise Difference(f"type {type(actual).__name__} instead of {type(expected).__name__}")
    missing = [key for key in expected.keys() if actual.get(key) is None and key != "past_key_values"]
    if missing:
        raise Difference(f"no {', '.join(missing)}")
    _compare_tokens(expected["sequences"], actual["sequences"], exact)
    if not exact:
        return
    for key in expected.keys():
        if key == "sequences":
            continue
        if key == "past_key_values":
            _compare_caches(expected[key], actual[key], name, mask)
        else:
            _compare_values(key, expected[key], actual[key])


def _compare_tokens(expected, actual, exact) -> None:
    if not isinstance(expected, torch.Tensor):
        if exact and repr(expected) != repr(actual):
            raise Difference(f"{actual!r:.200} instead of {expected!r:.200}")
        return
    if expected.dtype != actual.dtype or expected.dim() != actual.dim() or len(expected) != len(actual):
        raise Difference(f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}")
    if not exact or torch.equal(expected, actual):
        return
    if expected.dim() != 2:
        raise Difference("other values")
    columns, rows = min(expected.shape[1], actual.shape[1]), []
    for row, different in enumerate((expected[:, :columns] != actual[:, :columns]).tolist()):
        if any(different):
            column = different.index(True)
            rows.append((row, column, int(expected[row, column]), int(actual[row, column])))
    raise Difference(
        f"tokens {[row.tolist() for row in actual]} instead of {[row.tolist() for row in expected]}", tuple(rows)
    )


def _compare_values(key, expected, actual) -> None:
    """Tensors, and tuples of them, within what float arithmetic in another order gives."""
    if isinstance(expected, (tuple, list)):
        if not isinstance(actual, (tuple, list)) or len(expected) != len(actual):
            raise Difference(f"{key}: {len(actual)} instead of {len(expected)}")
        for index, pair in enumerate(zip(expected, actual)):
            _compare_values(f"{key}[{index}]", *pair)
    elif isinstance(expected, torch.Tensor):
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            raise Difference(
                f"{key}: {actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
            )
        if not expected.is_floating_point():
            if not torch.equal(expected, actual):
                raise Difference(f"{key}: other values")
            return
        tolerance = TOLERANCE[expected.dtype]
        finite = expected.isfinite()
        if not torch.equal(finite, actual.isfinite()) or not torch.equal(expected[~finite], actual[~finite]):
            raise Difference(f"{key}: other places are not finite")
        scale = expected[finite].abs().max().item() if finite.any() else 0.0
        error = (expected[finite].double() - actual[finite].double()).abs().max().item() if finite.any() else 0.0
        if error > tolerance * max(scale, 1e-3):
            raise Difference(f"{key}: differs by {error:.3g}, the largest is {scale:.3g}")


def _compare_caches(expected, actual, name, mask) -> None:
    if actual is None:
        raise Difference("past_key_values: None")
    if expected.get_seq_length() != actual.get_seq_length():
        raise Difference(f"past_key_values: {actual.get_seq_length()} tokens instead of {expected.get_seq_length()}")
    if not name.startswith("native loop") or not hasattr(expected, "layers"):
        return
    if type(expected) is not type(actual):
        raise Difference(f"past_key_values: {type(actual).__name__} instead of {type(expected).__name__}")
    for index, (one, other) in enumerate(zip(expected.layers, actual.layers)):
        for part in ("keys", "values"):
            if isinstance(getattr(one, part, None), torch.Tensor):
                label = f"past_key_values.layers[{index}].{part}"
                _compare_values(label, *(_without_padding(getattr(layer, part), mask) for layer in (one, other)))


def _without_padding(states: torch.Tensor, mask) -> torch.Tensor:
    """states: [rows, heads, columns, head dim], which become zeros where the prompt has padding."""
    if mask is None or states.dim() != 4 or len(states) != len(mask) or states.shape[2] < mask.shape[1]:
        return states
    kept = torch.nn.functional.pad(mask.bool(), (0, states.shape[2] - mask.shape[1]), value=True)
    return states * kept[:, None, :, None]


def compare_models(expected, actual) -> None:
    """Raises Difference when a twin leaves its copy of the model in another state than transformers left the model."""
    for (name, one), (_, other) in zip(expected.named_modules(), actual.named_modules()):
        if one.training != other.training:
            raise Difference(f"the model is changed: {name}.training={other.training}")
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            if len(getattr(one, hooks)) != len(getattr(other, hooks)):
                raise Difference(f"the model is changed: {len(getattr(other, hooks))} {hooks} at {name!r}")
        if new := set(vars(other)) ^ set(vars(one)):
            raise Difference(f"the model is changed: {name} has and has not {sorted(new)}")
        for key, buffer in one._buffers.items():
            after = other._buffers.get(key)
            if (buffer is None) != (after is None):
                raise Difference(f"the model is changed: buffer {name}.{key}")
            if buffer is not None and (buffer.shape != after.shape or not torch.equal(buffer, after)):
                raise Difference(f"the model is changed: buffer {name}.{key} has other values")


def is_tie(call, difference: Difference) -> str:
    """How near the tokens that differ are in transformers' own scores, computed once more, where that is within float
    rounding at each row; "" where it is not, and for what is no difference of greedy tokens."""
    from upstream_twins import attentions, copied, restore, set_random_state

    if not difference.rows or call.decoding not in ("greedy", "assisted"):
        return ""
    model, state = call.model, attentions(call.model)
    arguments = {
        key: copied(value, {id(module): module for module in model.modules()}) for key, value in call.arguments.items()
    }
    arguments.update(return_dict_in_generate=True, output_scores=True, output_logits=True)
    arguments.pop("assistant_model", None)
    set_random_state(call.random)
    try:
        output = GenerationMixin.generate(model, **arguments)
    finally:
        restore(model, state)
    start, gaps = output.sequences.shape[1] - len(output.scores), []
    for row, column, one, other in difference.rows:
        if column < start:
            return ""
        scores, logits = output.scores[column - start][row].float(), output.logits[column - start][row].float()
        if int(output.sequences[row, column]) != one:
            return ""
        step = torch.finfo(model.dtype).eps * logits[logits.isfinite()].abs().max().item()
        gap = (scores[one] - scores[other]).abs().item()
        if not gap <= ROUNDING.get(model.dtype, 4) * step:
            difference.args = (
                f"{difference} (row {row}, column {column}: scores {gap:.3g} apart, a step is {step:.3g})",
            )
            return ""
        gaps.append(gap / step if step else 0.0)
    return f"scores at most {max(gaps):.1f} rounding steps of {model.dtype} apart"
