"""Checkpoints of bitsandbytes. 4 bits (QLoRA, https://arxiv.org/abs/2305.14314): `weight` uint8 [N * K / 2, 1], two
codes a byte, the first in the high half, of the weight row after row; `weight.absmax`, a scale for each `blocksize`
codes, in 8 bits where it is quantized itself (`weight.nested_absmax`, `weight.nested_quant_map`); `weight.quant_map`,
the table; the rest as JSON in `weight.quant_state.bitsandbytes__nf4` (or fp4). 8 bits (LLM.int8(),
https://arxiv.org/abs/2208.07339): `weight` int8 [N, K] and `SCB` float32 [N], 127 times the scale."""

import json
import math

import torch

from hf_efficient.checkpoints.adopt.foreign import Foreign, typed
from hf_efficient.formats.codebook import TABLES


STATE = "weight.quant_state.bitsandbytes__"
STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # `bnb_4bit_quant_storage`: bytes by any name
INVERSE_127 = 7.874015718698502e-3  # what bitsandbytes multiplies with


class BitsAndBytes4bit(Foreign):
    """Reads `Linear4bit` in NF4 or FP4, with scales in float32 or quantized themselves."""

    parts = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"{STATE}{table}" for table in ("nf4", "fp4")),
    )
    codes = ("weight",)

    def holds(self, stored):
        return any(f"{STATE}{table}" in stored for table in ("nf4", "fp4"))

    def scheme(self, stored, out_features, in_features, dtype):
        table = "nf4" if f"{STATE}nf4" in stored else "fp4"
        stored.expect(f"{STATE}{table}", ["U8"], (None,))
        key = stored.places[f"{STATE}{table}"].key
        try:
            state = json.loads(bytes(stored.read(f"{STATE}{table}").tolist()))
            shape, block = state["shape"], state["blocksize"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{key} is not the JSON of a bitsandbytes quantization state: {error!r}") from None
        if shape != [out_features, in_features] or type(block) is not int or block < 8:
            raise ValueError(
                f"{key} has shape={shape}, blocksize={block!r}, expected {[out_features, in_features]} and a positive "
                "integer"
            )
        group = math.gcd(block, in_features)
        if group % 8:
            raise ValueError(
                f"{key}: blocks of {block} in rows of {in_features} share no multiple of 8, which is expected"
            )
        size = out_features * in_features
        width = STORAGE.get(stored.places["weight"].dtype, 1) if "weight" in stored else 1
        stored.expect("weight", STORAGE, (size // 2 // width, 1))
        blocks = -(-size // block)
        stored.expect("weight.quant_map", ["F32"], (16,))
        if tuple(stored.read("weight.quant_map").tolist()) != tuple(
            torch.tensor(TABLES[table], dtype=torch.float32).tolist()
        ):
            raise ValueError(f"{stored.places['weight.quant_map'].key} is not the table of {table}, which is expected")
        if "weight.nested_absmax" in stored:
            nested, offset = state.get("nested_blocksize"), state.get("nested_offset")
            if type(nested) is not int or nested <= 0 or not isinstance(offset, (int, float)):
                raise ValueError(
                    f"{key} has nested_blocksize={nested!r}, nested_offset={offset!r}, expected a positive integer "
                    "and a number"
                )
            stored.expect("weight.absmax", ["U8"], (blocks,))
            stored.expect("weight.nested_absmax", ["F32"], (-(-blocks // nested),))
            stored.expect("weight.nested_quant_map", ["F32"], (256,))
        else:
            stored.expect("weight.absmax", ["F32"], (blocks,))
        own = None if dtype is torch.float32 else "float32"
        return {"codebook": table, "bits": 4, "method": "rtn", "group_size": group, "scale_dtype": own}

    def convert(self, tensors, out_features, in_features, format, dtype):
        state = json.loads(bytes(next(t for part, t in tensors.items() if part.startswith(STATE)).tolist()))
        absmax = tensors["weight.absmax"]
        if "weight.nested_absmax" in tensors:
            steps = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(absmax)]
            absmax = tensors["weight.nested_quant_map"][absmax.int()] * steps + state["nested_offset"]
        starts = torch.arange(0, out_features * in_features, format.group_size, device=absmax.device)
        scale = absmax[starts // state["blocksize"]].view(out_features, -1)
        return {"qweight": swap_halves(tensors["weight"].view(torch.uint8).view(out_features, -1)), "scale": scale}


def swap_halves(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes -> the same with the codes in the other order: from bitsandbytes' to ours, and back."""
    return codes >> 4 | codes << 4


class BitsAndBytes8bit(Foreign):
    """Reads `Linear8bitLt` as layers of a `W8A8Config`."""

    parts = ("SCB", "weight", "weight_format")
    config = "W8A8Config"

    def scheme(self, stored, out_features, in_features, dtype):
        stored.expect("weight", ["I8"], (out_features, in_features))
        stored.expect("SCB", ["F32"], (out_features,))
        if "weight_format" in stored and (layout := stored.read("weight_format").flatten().tolist()) != [0]:
            raise ValueError(f"{stored.places['weight_format'].key} is {layout}, expected [0], rows after rows")
        threshold = self.saved.get("llm_int8_threshold", 6.0)
        typed("llm_int8_threshold", threshold, (int, float), "a number, 0 or more")
        return {"method": "llm_int8", "threshold": threshold} if threshold else {"method": "absmax"}

    def convert(self, tensors, out_features, in_features, format, dtype):
        return {"qweight": tensors["weight"], "scale": (tensors["SCB"] * INVERSE_127).view(-1, 1)}
