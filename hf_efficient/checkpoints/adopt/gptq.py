"""GPTQ checkpoints of AutoGPTQ, GPTQModel and optimum: `qweight` int32 [K * bits / 32, N], codes of a column one after
the other in little-endian words; `qzeros` int32 [G, N * bits / 32] alike, in the layout "gptq" less one; `scales`
[G, N]; `g_idx` int32 [K], the group of each input.

GPTQModel subtracts the ones from whole words. Before version 7 its words for 3 bits had the bits of the ones in reverse
order.
"""

import torch

from hf_efficient.checkpoints.adopt.foreign import (
    Foreign,
    as_grid,
    one_of,
    scale_dtype,
    stream_bytes,
    text,
    typed,
    unpack_words,
)
from hf_efficient.checkpoints.adopt.stored import SCALE_DTYPES
from hf_efficient.checkpoints.adopt.target_patterns import TargetPatterns
from hf_efficient.kernels.linear.codes import BITS, pack_codes, unpack_codes


REVERSED_ONES = (0x24924924, 0x92492492 - 2**32, 0x49249249)  # of three words of 3 bits


class GPTQ(Foreign):
    """Reads weights of GPTQ, also those quantized in the order of activations."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, saved):
        super().__init__(saved)
        layouts = {field: text(saved[field]) for field in ("checkpoint_format", "format") if saved.get(field)}
        self.dynamic = typed("dynamic", saved.get("dynamic"), (dict, type(None)), "an object or null") or {}
        self._patterns = TargetPatterns("dynamic")
        for where, fields in (("", saved), *((f"dynamic[{pattern!r}].", own) for pattern, own in self.dynamic.items())):
            typed(where[:-1], fields, (dict,), "an object")
            for field in ("bits", "group_size"):
                typed(f"{where}{field}", fields.get(field), (int, type(None)), "an integer or null")
            typed(f"{where}desc_act", fields.get("desc_act", False), (bool,), "true or false")
        for field, layout in layouts.items():
            one_of(field, layout, ("gptq", "gptq_v2"))
        if len({*layouts.values()}) > 1:
            raise ValueError(f"quantization_config: {layouts} name two layouts of zero points, expected the same")
        self.less_one = "gptq_v2" not in layouts.values()
        one_of("is_marlin_format", saved.get("is_marlin_format") or False, (False,))
        one_of("rotation", saved.get("rotation") or None, (None,))  # of inputs, in each forward

    def _has_reversed_ones(self) -> bool:
        """Whether zero points of 3 bits are less `REVERSED_ONES`. Raises ValueError where the writer's version, which
        decides, is no number."""
        meta = typed("meta", self.saved.get("meta"), (dict, type(None)), "an object or null") or {}
        field, kinds = "meta.quantizer", (str, list, tuple, type(None))
        writers = typed(field, meta.get("quantizer"), kinds, "a string or a list of strings") or ()
        for writer in [writers] if isinstance(writers, str) else writers:
            library, _, version = text(writer).partition(":")
            if self.less_one and library == "gptqmodel":
                first = version.partition(".")[0]
                if not first.isdecimal():
                    raise ValueError(
                        f"quantization_config: {field}={writers!r} has no number of a version of gptqmodel"
                    )
                return int(first) < 7
        return False

    def _settings(self, key: str) -> dict:
        """The config of the module whose `qweight` is called `key`: of the patterns of `dynamic` the first one that
        matches counts. One with "-:" leaves a module as it is."""
        name = key.removesuffix(".qweight")
        for pattern, own in self.dynamic.items():
            if self._patterns.matches(pattern.removeprefix("-:").removeprefix("+:"), name):
                if pattern.startswith("-:"):
                    raise ValueError(f"{key} is there, but dynamic of the quantization_config leaves it: {pattern!r}")
                return {**self.saved, **own}
        return self.saved

    def scheme(self, stored, out_features, in_features, dtype):
        words = stored.expect("qweight", ["I32"], (None, out_features)).shape[0]
        bits, rest = divmod(words * 32, in_features)
        if bits == 3:
            self._has_reversed_ones()  # or an error
        place = stored.places["qweight"]
        own = self._settings(place.key)
        if rest or bits not in BITS or bits != own.get("bits", bits):
            asked = own.get("bits")
            raise ValueError(
                f"{place.key} is I32 {place.shape}, expected [{in_features} * bits / 32, {out_features}] with "
                f"bits={asked}, one of {BITS}"
            )
        groups = stored.expect("scales", SCALE_DTYPES, (None, out_features)).shape[0]
        size = own.get("group_size", -1)
        size = in_features if size in (None, -1) else size
        if size <= 0 or groups != -(-in_features // size):
            raise ValueError(
                f"{stored.places['scales'].key} is {stored.places['scales'].shape}, expected "
                f"{-(-in_features // max(size, 1))} groups of {size} of the {in_features} inputs"
            )
        stored.expect("qzeros", ["I32"], (groups, -(-out_features * bits // 32)))
        scheme = {"bits": bits, "group_size": -1 if groups == 1 else size, "method": "gptq"}
        if "g_idx" in stored:
            stored.expect("g_idx", ["I32", "I64"], (in_features,))
            order = group_order(stored.read("g_idx"), size, stored.places["g_idx"].key)
            scheme["input_order"] = order is not None
        elif own.get("desc_act"):
            raise ValueError(f"the checkpoint has no {stored.name}.g_idx, expected one since desc_act is true")
        return {**scheme, "scale_dtype": scale_dtype(stored, "scales", dtype)}

    def convert(self, tensors, out_features, in_features, format, dtype):
        inner = getattr(format, "inner", format)
        bits, qzeros = inner.bits, tensors["qzeros"]
        is_reversed = bits == 3 and self._has_reversed_ones()
        if self.less_one and bits != 3:  # in whole words, as the library subtracts: carries and borrows cancel
            qzeros = qzeros + sum(1 << shift for shift in range(0, 32, bits))
        elif is_reversed:
            qzeros = qzeros + qzeros.new_tensor(REVERSED_ONES).repeat(-(-qzeros.shape[1] // 3))[: qzeros.shape[1]]
        zero = unpack_words(qzeros, bits, out_features)
        if self.less_one and bits == 3 and not is_reversed:
            zero = zero + 1 & 7
        qweight = stream_bytes(tensors["qweight"].t())
        parts = {"scale": tensors["scales"].t().contiguous(), "zero_point": as_grid(zero, bits).t().contiguous()}
        if inner is format:
            return {"qweight": qweight, **parts}
        size = in_features if inner.group_size == -1 else inner.group_size
        order = group_order(tensors["g_idx"], size, "g_idx")
        codes = unpack_codes(qweight, bits, in_features)[:, order]
        return {"qweight": pack_codes(codes.contiguous(), bits), **parts, "input_order": order.int()}


def group_order(g_idx: torch.Tensor, size: int, name: str) -> torch.Tensor | None:
    """The order of the inputs, int64 [K], in which those of a group of `size` are neighbours; None where they are.
    Raises ValueError unless `g_idx` [K] gives every group `size` inputs, the last one those that remain."""
    natural = torch.arange(len(g_idx), device=g_idx.device)
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), natural // size):
        raise ValueError(
            f"{name} does not put {size} inputs into each group (the last one what remains of {len(g_idx)})"
        )
    return None if torch.equal(order, natural) else order
