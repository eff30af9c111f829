"""Checkpoints of the compressed-tensors package (llm-compressor): `config_groups` says how which modules are quantized.

"pack-quantized": `weight_packed` int32 [N, K * bits / 32], codes plus 2^(bits - 1) as a little-endian stream of bits
a row, `weight_scale` [N, G], `weight_zero_point` alike, packed along N, `weight_shape`, `weight_g_idx` (the group of
each input). "int-quantized", "float-quantized" and "naive-quantized": `weight` int8 or float8 [N, K],
`weight_scale`, `weight_zero_point`, and `input_scale`, `input_zero_point` of static activations."""

import torch

from hf_efficient.checkpoints.adopt import compressed_tensors_fp4 as fp4
from hf_efficient.checkpoints.adopt.compressed_tensors_config import quantized_groups
from hf_efficient.checkpoints.adopt.compressed_tensors_fp4 import FP4
from hf_efficient.checkpoints.adopt.compressed_tensors_sparse import SparseCompressedTensors, sparse_layout
from hf_efficient.checkpoints.adopt.foreign import (
    Foreign,
    as_grid,
    one_of,
    scale_dtype,
    stream_bytes,
    text,
    unpack_words,
)
from hf_efficient.checkpoints.adopt.gptq import group_order
from hf_efficient.checkpoints.adopt.stored import SCALE_DTYPES
from hf_efficient.checkpoints.adopt.target_patterns import TargetPatterns
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.kernels.linear.codes import BITS, pack_codes, packed_width, unpack_codes


BLOCKS = [128, 128], "128x128"
PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")


def reader(saved: dict) -> Foreign:
    """What reads a checkpoint with this `quantization_config`. Raises ValueError for a kind that is not read."""
    return SparseCompressedTensors(saved) if sparse_layout(saved) else CompressedTensors(saved)


def _strategy(group_size: int | None) -> str:
    """What the library takes for meant where none is given."""
    return "tensor" if group_size is None else "channel" if group_size == -1 else "group"


class CompressedTensors(Foreign):
    """Reads quantized weights that are not sparse, with or without quantized activations."""

    parts = (
        *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("weight_global_scale", "input_scale", "input_zero_point"),
    )

    def __init__(self, saved):
        super().__init__(saved)
        if saved.get("kv_cache_scheme"):  # scales of a quantized cache, under the layers that fill it
            self.unread = ("output_scale", "output_zero_point")
        if (saved.get("sparsity_config") or {}).get("format", "dense") != "dense":
            one_of("sparsity_config.format", saved["sparsity_config"]["format"], ("dense",))
        self.groups, self._patterns = quantized_groups(saved), TargetPatterns("config_groups.targets")
        if not self.groups:
            raise ValueError("quantization_config: config_groups names no quantized weights")
        for group in self.groups:
            one_of("format", self._layout(group), (PACKED, *PLAIN, *FP4))
            for side in ("input_activations", "output_activations"):
                if group.get(side) and (side == "output_activations" or self._layout(group) in (PACKED, *FP4)):
                    raise ValueError(
                        f"quantization_config: {side} of {self._layout(group)} are not read by hf_efficient, expected "
                        "null"
                    )
        kinds = {self._kind(group) for group in self.groups}
        if len(kinds) > 1:
            raise ValueError(
                "quantization_config: some config_groups have input_activations and some have none, expected all alike"
            )
        self.config = kinds.pop()

    def _layout(self, group) -> str:
        return text(group.get("format") or self.saved.get("format"))

    @staticmethod
    def _kind(group) -> str:
        return "W8A8Config" if group.get("input_activations") else "WeightOnlyConfig"

    def _group(self, stored) -> dict:
        """The group whose targets name a linear module, as the checkpoint or as the model calls it: itself, by a
        pattern or by class, in that order."""
        names = {stored.name} | {place.key.removesuffix(f".{part}") for part, place in stored.places.items()}
        for matches in (
            lambda target: target in names,
            lambda target: target[:3] == "re:" and any(self._patterns.matches(target[3:], name) for name in names),
            lambda target: target == "Linear",
        ):
            for group in self.groups:
                if any(matches(target) for target in group.get("targets") or ()):
                    return group
        if len(self.groups) == 1:
            return self.groups[0]
        raise ValueError(
            f"quantization_config: no target of config_groups names {stored.name}, which is stored quantized"
        )

    def holds(self, stored):
        return "weight_packed" in stored or ("weight" in stored and "weight_scale" in stored)

    def scheme(self, stored, out_features, in_features, dtype):
        group = self._group(stored)
        weights = group["weights"]
        strategy = text(weights.get("strategy") or _strategy(weights.get("group_size")))
        if self._layout(group) in FP4:
            return fp4.scheme(stored, weights, self._layout(group), out_features, in_features)
        if self.config == "W8A8Config":
            return self._w8a8(stored, group, strategy, out_features, in_features)
        one_of("weights.type", text(weights.get("type", "int")), ("int",))
        one_of("weights.strategy", strategy, ("group", "channel", "tensor"))
        size = weights.get("group_size") if strategy == "group" else in_features
        if type(size) is not int or size <= 0:
            raise ValueError(f"quantization_config: weights.group_size={size!r}, expected a positive integer")
        groups, packed = -(-in_features // size), "weight_packed" in stored
        bits = one_of("weights.num_bits", weights.get("num_bits", 8), BITS)
        if strategy == "tensor":
            stored.expect_one("weight_scale", SCALE_DTYPES)
        else:
            stored.expect("weight_scale", SCALE_DTYPES, (out_features, groups))
        symmetric = weights.get("symmetric", True)
        if packed:
            stored.expect("weight_packed", ["I32"], (out_features, -(-in_features * bits // 32)))
            if "weight_shape" in stored:
                stored.expect("weight_shape", ["I64", "I32"], (2,))
                if stored.read("weight_shape").tolist() != [out_features, in_features]:
                    raise ValueError(
                        f"{stored.places['weight_shape'].key} is {stored.read('weight_shape').tolist()}, expected "
                        f"{[out_features, in_features]}"
                    )
            if not symmetric:
                stored.expect("weight_zero_point", ["I32"], (-(-out_features * bits // 32), groups))
        else:
            bits = 8
            stored.expect("weight", ["I8"], (out_features, in_features))
            if not symmetric:
                stored.expect("weight_zero_point", ["I8"], stored.places["weight_scale"].shape)
        if symmetric:
            self._no_zero_point(stored, "weight_zero_point")
        scheme = {
            "bits": bits,
            "method": "rtn",
            "group_size": {"tensor": None, "channel": -1}.get(strategy, size),
            "symmetric": symmetric,
        }
        if "weight_g_idx" in stored:
            stored.expect("weight_g_idx", ["I32", "I64"], (in_features,))
            order = group_order(stored.read("weight_g_idx"), size, stored.places["weight_g_idx"].key)
            scheme["input_order"] = order is not None
        elif text(weights.get("actorder")) in ("group", "dynamic", "True"):
            raise ValueError(
                f"the checkpoint has no {stored.name}.weight_g_idx, expected one since actorder is 'group'"
            )
        return {**scheme, "scale_dtype": scale_dtype(stored, "weight_scale", dtype)}

    def _w8a8(self, stored, group, strategy, out_features, in_features) -> dict:
        weights, inputs = group["weights"], group["input_activations"]
        kind = one_of("weights.type", text(weights.get("type", "int")), ("int", "float"))
        one_of("input_activations.type", text(inputs.get("type", kind)), (kind,))
        for side in (weights, inputs):
            one_of("num_bits", side.get("num_bits", 8), (8,))
        shapes = {"tensor": None, "channel": (out_features, 1)}
        if kind == "float":
            shapes["block"] = -(-out_features // 128), -(-in_features // 128)
            if strategy == "block":
                block = weights.get("block_structure")
                one_of("weights.block_structure", list(block) if isinstance(block, tuple) else block, BLOCKS)
        shape = shapes[one_of("weights.strategy", strategy, tuple(shapes))]
        dtypes = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"} if kind == "float" else {"I8": "int8"}
        stored.expect("weight", list(dtypes), (out_features, in_features))
        if shape:
            stored.expect("weight_scale", SCALE_DTYPES, shape)
        else:
            stored.expect_one("weight_scale", SCALE_DTYPES)
        dynamic = one_of("input_activations.dynamic", inputs.get("dynamic", False), (True, False))
        own = text(inputs.get("strategy") or _strategy(inputs.get("group_size")))
        expected = "tensor" if not dynamic else "group" if strategy == "block" else "token"
        one_of(f"input_activations.strategy of {strategy} weights", own, (expected,))
        if own == "group":
            one_of("input_activations.group_size", inputs.get("group_size"), (128,))
        if not dynamic:
            stored.expect_one("input_scale", SCALE_DTYPES)
        elif "input_scale" in stored:
            raise ValueError(f"{stored.places['input_scale'].key} is there, but input_activations are dynamic")
        scheme = {
            "dtype": dtypes[stored.places["weight"].dtype],
            "weights": strategy,
            "activations": "dynamic" if dynamic else "static",
        }
        if kind == "int":
            asymmetric = not weights.get("symmetric", True), not inputs.get("symmetric", True)
            methods = {(False, False): "absmax", (False, True): "smoothquant", (True, True): "zeropoint"}
            one_of("symmetric of weights", not asymmetric[0], (True,) if not asymmetric[1] else (True, False))
            scheme["method"] = methods[asymmetric]
            if asymmetric[0]:
                stored.expect("weight_zero_point", ["I8"], stored.places["weight_scale"].shape)
            if asymmetric[1] and not dynamic:
                stored.expect_one("input_zero_point", ["I8"])
        for side, part in ((weights, "weight_zero_point"), (inputs, "input_zero_point")):
            if side.get("symmetric", True) or kind == "float":
                self._no_zero_point(stored, part)
        return scheme

    @staticmethod
    def _no_zero_point(stored, part: str) -> None:
        if part in stored and stored.read(part).any():
            raise ValueError(f"{stored.places[part].key} is not 0, but the quantization_config says symmetric: true")

    def convert(self, tensors, out_features, in_features, format, dtype):
        if isinstance(format, CodebookFormat):
            return fp4.convert(tensors, format.codebook)
        if self.config == "W8A8Config":
            shape = format.shapes(out_features, in_features)["scale"]
            parts = {"qweight": tensors["weight"], "scale": tensors["weight_scale"].float().view(shape)}
            static = {"activation_scale": "input_scale", "activation_zero_point": "input_zero_point"}
            parts |= {
                ours: tensors[theirs].view(1) for ours, theirs in static.items() if ours in format.activation_tensors
            }
            if "activation_scale" in parts:
                parts["activation_scale"] = parts["activation_scale"].float()
            if getattr(format, "zero_point", False):
                parts["zero_point"] = tensors["weight_zero_point"].view(shape)
            return parts
        inner = getattr(format, "inner", format)
        bits, shape = inner.bits, inner.shapes(out_features, in_features)["scale"]
        parts, order = {"scale": tensors["weight_scale"].view(shape)}, None
        if "weight_packed" in tensors:
            qweight = stream_bytes(tensors["weight_packed"])[:, : packed_width(in_features, bits)].contiguous()
            if not inner.symmetric:
                zero = unpack_words(tensors["weight_zero_point"].t(), bits, out_features).t()
        else:
            qweight = (tensors["weight"].int() + 128).to(torch.uint8)
            if not inner.symmetric:
                zero = as_grid(tensors["weight_zero_point"].int() + 128, 8)
        if not inner.symmetric:
            parts["zero_point"] = zero.reshape(shape).contiguous()
        if inner is not format:
            order = group_order(tensors["weight_g_idx"], inner.group_size, "weight_g_idx")
            qweight = pack_codes(unpack_codes(qweight, bits, in_features)[:, order].contiguous(), bits)
            parts["input_order"] = order.int()
        return {"qweight": qweight, **parts}
