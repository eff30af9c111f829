"""Checkpoints of torchao in safetensors, whose metadata says for each weight which of its classes holds it.

`Int4Tensor`: `_weight_qdata` int8 [N, K / 2], codes from -8 to 7, the even ones in the low halves, `_weight_scale` and
`_weight_zero_point` float [G, N], w = code * scale + zero_point. `Int8Tensor` and `IntxUnpackedToInt8Tensor`: int8
[N, K], w = (code - zero_point) * scale."""

import json

import torch

from hf_efficient.checkpoints.adopt.foreign import Foreign, as_grid, one_of, scale_dtype
from hf_efficient.checkpoints.adopt.stored import SCALE_DTYPES
from hf_efficient.kernels.linear.codes import pack_codes


INT4, CLASSES = "Int4Tensor", ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
NARROW = {"int2": 2, "int3": 3, "int4": 4}


class TorchAO(Foreign):
    """Reads weights of torchao that are grouped along rows, without quantized activations."""

    parts = tuple(f"_weight_{part}" for part in ("qdata", "scale", "zero_point", "act_pre_scale", "scale_and_zero"))

    def scheme(self, stored, out_features, in_features, dtype):
        place = stored.places["_weight_qdata"]
        key = place.key.removesuffix("_weight_qdata") + "weight"
        try:
            kind = json.loads(stored.metadata[key])
            data = kind.get("_data", {})
            rows, size = data["block_size"]
            names = {f"_weight_{str(name).removeprefix('_weight_')}" for name in kind.get("_tensor_data_names", ())}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{place.file} has no torchao metadata of {key}: {error!r}") from None
        one_of(f"_type of {key}", kind.get("_type"), CLASSES)
        if names and (different := names ^ set(stored.places)):
            raise ValueError(
                f"{stored.name}.{min(different)} is {'not ' if min(different) in names else ''}there, but the "
                f"metadata of {key} names {sorted(names)}"
            )
        for part in ("_weight_act_pre_scale", "_weight_scale_and_zero"):
            if part in stored:
                raise ValueError(f"{stored.places[part].key} is not read by hf_efficient, expected none")
        for field in ("act_quant_kwargs", "activation_quantization"):
            if data.get(field) is not None:
                one_of(f"{field} of {key}", data[field], (None,))
        if rows != 1 or type(size) is not int or size <= 0 or in_features % size:
            raise ValueError(
                f"block_size of {key} is {data['block_size']}, expected 1 and a divisor of the {in_features} inputs"
            )
        groups = in_features // size
        group = -1 if groups == 1 else size
        if kind["_type"] == INT4:
            stored.expect("_weight_qdata", ["I8", "U8"], (out_features, in_features // 2))
            for part in ("scale", "zero_point"):
                stored.expect(f"_weight_{part}", SCALE_DTYPES, (groups, out_features))
            own = None if dtype is torch.float32 else "float32"
            return {"bits": 4, "group_size": group, "method": "rtn", "zero_point": "minimum", "scale_dtype": own}
        stored.expect("_weight_qdata", ["I8"], (out_features, in_features))
        stored.expect("_weight_scale", SCALE_DTYPES, (out_features, groups))
        symmetric = "_weight_zero_point" not in stored
        if not symmetric:
            stored.expect("_weight_zero_point", ["I8"], (out_features, groups))
        target = data.get("target_dtype")
        if target is not None:
            target = one_of(
                f"target_dtype of {key}", target.get("_data") if isinstance(target, dict) else target, (*NARROW, "int8")
            )
        bits = NARROW.get(target, 8)
        own = scale_dtype(stored, "_weight_scale", dtype)
        grid = {"group_size": group, "symmetric": symmetric}
        return {"bits": bits, **grid, "method": "rtn", "scale_dtype": own}

    def convert(self, tensors, out_features, in_features, format, dtype):
        codes, scale, zero = (tensors.get(f"_weight_{part}") for part in ("qdata", "scale", "zero_point"))
        if format.zero_point == "minimum":
            bytes_ = codes.view(torch.uint8) ^ 0x88  # codes + 8, each in its half
            scale, zero = scale.t().float().contiguous(), zero.t().float()
            return {"qweight": bytes_, "scale": scale, "minimum": (zero - scale * 8).contiguous()}
        middle = 2 ** (format.bits - 1)
        grid = as_grid(codes.int() + middle, format.bits, "qdata")
        parts = {"qweight": pack_codes(grid, format.bits), "scale": scale}
        return parts if zero is None else {**parts, "zero_point": as_grid(zero.int() + middle, format.bits)}
