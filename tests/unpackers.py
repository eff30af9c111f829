"""Readers of other engines' layouts, written from their descriptions and sharing nothing with the exporters: a file
or folder -> {name of a weight: float32 [out_features, in_features]} of its compressed layers."""

import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of safetensors."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def stream(words: torch.Tensor, bits: int, count: int) -> np.ndarray:
    """int32 [R, W], a row a little-endian stream of bits -> `count` codes a row, int64 [R, count]."""
    ones = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    return ones.reshape(len(ones), count, bits).astype(np.int64) @ (1 << np.arange(bits))


def compressed_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Packed weights and weights of 8 bits, one scheme for all layers."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    bits, symmetric = group["weights"]["num_bits"], group["weights"]["symmetric"]
    tensors, weights = tensors_of(folder), {}
    if config["format"] in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        return _fp4(tensors, group["weights"]["group_size"])
    for name, scale in tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        layer, scale = name.removesuffix("_scale"), scale.float().numpy()
        if config["format"] == "pack-quantized":
            rows, columns = tensors[f"{layer}_shape"].tolist()
            codes, zero = stream(tensors[f"{layer}_packed"], bits, columns), np.full(scale.shape, 2 ** (bits - 1))
            if not symmetric:
                zero = stream(tensors[f"{layer}_zero_point"].t(), bits, rows).T
            repeat = columns // scale.shape[1]
            codes, scale = codes - zero.repeat(repeat, 1), scale.repeat(repeat, 1)
        else:
            codes = tensors[layer].float().numpy()
            assert symmetric and scale.shape in ((1,), (len(codes), 1))
        weights[layer] = codes.astype(np.float32) * scale
    return _as_torch(weights)


def _fp4(tensors: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    weights = {}
    for name, packed in tensors.items():
        if name.endswith(".weight_packed"):
            layer = name.removesuffix("_packed")
            codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(len(packed), -1)
            scale = tensors[f"{layer}_scale"]
            if scale.dtype == torch.uint8:
                scale = np.exp2(scale.numpy().astype(np.float32) - 127)
            else:
                scale = scale.float().numpy() / tensors[f"{layer}_global_scale"].numpy()
            signed = np.where(codes > 7, -numbers[codes & 7], numbers[codes & 7])
            weights[layer] = signed * scale.repeat(group, 1)
    return _as_torch(weights)


def gptq(folder: Path) -> dict[str, torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits, less = config["bits"], {"gptq": 1, "gptq_v2": 0}[config["checkpoint_format"]]
    tensors, weights = tensors_of(folder), {}
    for name, packed in tensors.items():
        if name.endswith(".qweight"):
            layer = name.removesuffix("qweight")
            scale, index = tensors[f"{layer}scales"].float().numpy(), tensors[f"{layer}g_idx"].numpy()
            assert tensors[f"{layer}scales"].dtype == torch.float16 and tensors[f"{layer}g_idx"].dtype == torch.int32
            zero = stream(tensors[f"{layer}qzeros"], bits, scale.shape[1]) + less
            codes = stream(packed.t(), bits, len(index)).T
            weights[f"{layer}weight"] = ((codes - zero[index]).astype(np.float32) * scale[index]).T
    return _as_torch(weights)


def awq(folder: Path) -> dict[str, torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["version"], config["zero_point"]) == (4, "gemm", True)
    tensors, weights = tensors_of(folder), {}
    for name in tensors:
        if name.endswith(".qweight"):
            layer = name.removesuffix("qweight")
            codes, zero = (_nibbles(tensors[f"{layer}{part}"].numpy()) for part in ("qweight", "qzeros"))
            scale = tensors[f"{layer}scales"].float().numpy()
            repeat = len(codes) // len(scale)
            assert config["group_size"] in (repeat, -1)
            weights[f"{layer}weight"] = (
                (codes - zero.repeat(repeat, 0)).astype(np.float32) * scale.repeat(repeat, 0)
            ).T
    return _as_torch(weights)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """int32 [R, N / 8] whose nibble i stands for column (0, 2, 4, 6, 1, 3, 5, 7)[i] -> int64 [R, N]."""
    columns = np.empty((len(words), words.shape[1] * 8), dtype=np.int64)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        columns[:, column::8] = words.view(np.uint32) >> 4 * place & 15
    return columns


def gguf(file: Path, heads: dict[str, int] | None = None) -> dict[str, torch.Tensor]:
    """All tensors by their names in the file, by the package's own dequantization. `heads`: of {"attn_q": n,
    "attn_k": n}, the rows are put back in transformers' order."""
    from gguf import GGUFReader, dequantize

    weights = {}
    for tensor in GGUFReader(file).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        part = re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", tensor.name)
        if part in (heads or {}):
            values = np.concatenate([np.concatenate([h[0::2], h[1::2]]) for h in np.split(values, heads[part])])
        weights[tensor.name] = values.copy()
    return _as_torch(weights)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_names(names) -> list[str]:
    """The names in a GGUF file of "model.layers.0.self_attn.q_proj.weight" and the like."""
    parts = [name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1) for name in names]
    return [f"blk.{block}.{GGUF_NAMES[part]}.weight" for block, part in parts]


def _as_torch(weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)) for name, values in weights.items()}
