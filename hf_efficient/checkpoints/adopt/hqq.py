"""Checkpoints of the hqq package (https://mobiusml.github.io/hqq_blog): `W_q`, codes of [N * K / group, group] packed
so that the first part of the rows stands in the highest bits; `scale` and `zero` (floats, w = (code - zero) * scale)
and everything else about the layer as small tensors."""

import math

import torch

from hf_efficient.checkpoints.adopt.foreign import Foreign, one_of, scale_dtype
from hf_efficient.checkpoints.adopt.stored import SCALE_DTYPES
from hf_efficient.kernels.linear.codes import pack_codes


IN_A_WORD = {8: 1, 4: 2, 3: 10, 2: 4}
META = ("nbits", "group_size", "shape", "axis", "view_as_float", "quant_scale", "quant_zero")


class HQQ(Foreign):
    """Reads weights of HQQ that are grouped along rows (axis 1), with zero points in float."""

    parts = ("W_q", "scale", "zero", *META)
    unread = (
        *("packing", "unpack_view_dtype", "compute_dtype", "encoded_state_dict", "stores_quant_config"),
        *("channel_wise", "optimize", "round_zero", "offload_meta"),
    )

    def scheme(self, stored, out_features, in_features, dtype):
        for part in set(META) & set(stored.places):
            if math.prod(stored.places[part].shape) not in (1, 2):
                raise ValueError(f"{stored.places[part].key} is {stored.places[part].shape}, expected a number or two")
        meta = {part: stored.read(part).flatten().tolist() for part in META if part in stored}
        for part in set(meta) - {"shape"}:
            if len(meta[part]) != 1:
                raise ValueError(f"{stored.name}.{part} is {meta[part]}, expected one number")
        for part, allowed in (("axis", [[1]]), ("nbits", [[bits] for bits in IN_A_WORD]), ("view_as_float", [[0]])):
            if meta.get(part, [0]) not in allowed:
                raise ValueError(
                    f"{stored.name}.{part} is {meta.get(part)}, expected one of {[value for (value,) in allowed]}"
                )
        for part in ("quant_scale", "quant_zero"):
            one_of(f"{stored.name}.{part}", meta.get(part, [0]), ([0],))
        if meta.get("shape") != [out_features, in_features]:
            raise ValueError(f"{stored.name}.shape is {meta.get('shape')}, expected {[out_features, in_features]}")
        bits, (group,) = meta["nbits"][0], meta.get("group_size") or [in_features]
        if type(group) is not int or group <= 0 or in_features % group:
            raise ValueError(f"{stored.name}.group_size is {group}, expected a divisor of the {in_features} inputs")
        groups = out_features * in_features // group
        stored.expect("W_q", ["I32" if bits == 3 else "U8"], (-(-groups // IN_A_WORD[bits]), group))
        for part in ("scale", "zero"):
            stored.expect(part, [stored.places["scale"].dtype] if part == "zero" else SCALE_DTYPES, (groups, 1))
        own = scale_dtype(stored, "scale", dtype)
        size = -1 if group == in_features else group
        return {"bits": bits, "group_size": size, "method": "hqq", "zero_point": "float", "scale_dtype": own}

    def convert(self, tensors, out_features, in_features, format, dtype):
        words, bits = tensors["W_q"], format.bits
        count = IN_A_WORD[bits]
        codes = torch.cat([words >> bits * (count - 1 - i) & 2**bits - 1 for i in range(count)])
        codes = codes[: out_features * in_features // words.shape[1]].to(torch.uint8).view(out_features, in_features)
        parts = {"scale": tensors["scale"], "zero_point": tensors["zero"]}
        return {"qweight": pack_codes(codes, bits), **{name: t.view(out_features, -1) for name, t in parts.items()}}
