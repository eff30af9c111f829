"""GGUF files, which llama.cpp and Ollama read: the Llama family, Mistral, Qwen 2 and Qwen 3."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers.utils import logging

from hf_efficient.checkpoints.export.gguf_tokenizer import add_tokenizer
from hf_efficient.checkpoints.export.grid import as_float16, check_layers, per_group, rounding_of, stored_zero
from hf_efficient.checkpoints.export.source import Layer, Source
from hf_efficient.files import atomic_write
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.w8a8 import Int8Format


BLOCK = 32  # weights that share a scale in every type used here
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # by model_type
_TYPES = gguf.GGMLQuantizationType
_FILE_TYPES = {"F32": "ALL_F32"}


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file: `make()` gives its bytes as an array, of `shape` when the type is no array's own."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    nbytes: int
    make: Callable[[], np.ndarray]


def write(source: Source, output: Path, describe: Callable[[], None]) -> float:
    """Writes the file `output`; returns the rounding (see `ExportReport`). describe: called before it is there."""
    config = source.config
    arch = _architecture(source)
    if source.layers:
        check_layers(source, "gguf", _why_not)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), config.num_hidden_layers)
    rounding = []
    tensors = [
        _of_layer(layer, _name(names, f"{layer.name}.weight"), config, arch, rounding) for layer in source.layers
    ]
    tensors += [_of_dense(source, name, _name(names, name), arch) for name in source.dense_names]
    if (factors := _rope_factors(config)) is not None:
        tensors.append(_plain("rope_freqs.weight", factors, lambda: factors))
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as file:
        writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, arch)])
        try:
            _add_metadata(writer, source, tensors)
            add_tokenizer(writer, source.tokenizer, config.vocab_size)
            for tensor in tensors:
                writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in logging.tqdm(tensors, desc="exporting", leave=False):
                writer.write_tensor_data(tensor.make())
        finally:
            writer.close()
        describe()
    return max(rounding, default=0.0)


def _architecture(source: Source) -> str:
    """The name in `gguf.MODEL_ARCH`, after checking that llama.cpp computes what this model does."""
    config, kind = source.config, source.config.model_type
    if kind not in ARCHITECTURES or not source.architecture.endswith("ForCausalLM"):
        raise ValueError(
            f"a {source.architecture} (model_type={kind!r}) cannot be written as gguf: it must be a causal language "
            f"model of {tuple(ARCHITECTURES)}. Other engines read it as compressed-tensors"
        )
    rope = _rope(config)
    for field, value, allowed in (
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope["rope_type"], ("default", "linear", "llama3")),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
    ):
        if value not in allowed:
            raise ValueError(f"{field}={value!r} of the model cannot be written as gguf: it must be one of {allowed}")
    return ARCHITECTURES[kind]


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(config) -> dict:
    return {"rope_type": "default", **(config.rope_parameters or {})}


def _why_not(layer: Layer) -> str | None:
    format, width = layer.weight.format, layer.weight.in_features
    if isinstance(format, Int8Format):
        if format.zero_point:
            return "int8 weights with zero points; Q8_0 has none"
        if format.outlier_columns or format.outlier_threshold is not None:
            return "outlier columns in 16 bits (method='llm_int8')"
        if format.static:
            return "static activation scales, which llama.cpp does not use"
    elif not isinstance(format, AffineFormat):
        return f"{type(format).__name__}, for which gguf has no type"
    elif stored_zero(format) == "float":
        return "float zero points, for which gguf has no type"
    elif format.bits not in (4, 8):
        return f"weights of {format.bits} bits; gguf has regular grids of 4 and 8 bits"
    elif format.bits == 8 and not format.symmetric:
        return "8 bits with zero points; Q8_0 has none (symmetric=True fits)"
    elif format.group_size not in (None, -1) and format.group_size < width and format.group_size % BLOCK:
        return f"groups of {format.group_size} weights; gguf has one scale for {BLOCK}"
    if width % BLOCK:
        return f"rows of {width} weights, which blocks of {BLOCK} do not divide"
    return None


def _name(names: "gguf.TensorNameMap", name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"the tensor {name} has no place in a gguf file of this architecture")
    return found


def _row_order(name: str, config, arch: str) -> torch.Tensor | None:
    """Where the rows of a query or key projection come from: llama.cpp rotates neighbouring dimensions of the Llama
    family, transformers those half a head apart."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if arch != "LLAMA" or count is None:
        return None
    return torch.arange(count * _head_dim(config)).view(count, 2, -1).transpose(1, 2).flatten()


def _of_layer(layer: Layer, name: str, config, arch: str, rounding: list[float]) -> _Tensor:
    weight, format = layer.weight, layer.weight.format
    kind = (
        _TYPES.Q8_0
        if isinstance(format, Int8Format) or format.bits == 8
        else _TYPES.Q4_0
        if format.symmetric
        else _TYPES.Q4_1
    )
    order = _row_order(f"{layer.name}.weight", config, arch)
    nbytes = weight.out_features * weight.in_features // BLOCK * gguf.GGML_QUANT_SIZES[kind][1]

    def make():
        data, changed = _blocks(layer, kind)
        rounding.append(changed)
        return (data if order is None else data[order]).numpy()

    return _Tensor(name, kind, (weight.out_features, weight.in_features), nbytes, make)


def _blocks(layer: Layer, kind) -> tuple[torch.Tensor, float]:
    """The layer as blocks of 32 weights, uint8 [N, bytes of a row], and its rounding."""
    weight, format = layer.weight, layer.weight.format
    rows, columns = weight.out_features, weight.in_features // BLOCK
    if isinstance(format, Int8Format):
        scale, codes = layer.read("scale").expand(rows, columns), layer.read("qweight")
    else:
        scale, codes = per_group(layer, "scale", BLOCK), format.unpack(layer.read("qweight"), weight.in_features)
    head, offset, zero, levels = [scale], None, 8, 15
    if kind == _TYPES.Q8_0:
        body = codes if codes.dtype == torch.int8 else codes.bitwise_xor(128).view(torch.int8)
        body, zero, levels = body.view(rows, columns, BLOCK).view(torch.uint8), 128, 255
    else:
        low, high = codes.view(rows, columns, 2, BLOCK // 2).unbind(2)
        body = low | high << 4
    if kind == _TYPES.Q4_1:
        if stored_zero(format) == "minimum":
            offset = per_group(layer, "minimum", BLOCK)
        else:
            offset = -per_group(layer, "zero_point", BLOCK).float() * scale.float()
        head.append(offset)
        zero = 0
    heads = torch.stack([as_float16(layer, values) for values in head], -1).view(torch.uint8)
    return torch.cat([heads, body], -1).flatten(1), rounding_of(scale, levels, zero, offset)


def _of_dense(source: Source, name: str, target: str, arch: str) -> _Tensor:
    order = _row_order(name, source.config, arch)

    def read():
        tensor = source.read_dense(name)
        tensor = tensor if order is None else tensor[order]
        return tensor.float() if tensor.dim() == 1 else tensor  # llama.cpp adds and multiplies vectors in float32

    return _plain(target, read(), read)


def _plain(name: str, tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> _Tensor:
    kinds = {torch.float32: _TYPES.F32, torch.float16: _TYPES.F16, torch.bfloat16: _TYPES.BF16}
    if tensor.dtype not in kinds:
        raise ValueError(f"{name} is {tensor.dtype}: gguf takes {[str(dtype) for dtype in kinds]}")

    def make():
        return read().detach().cpu().contiguous().view(torch.uint8).numpy()

    return _Tensor(name, kinds[tensor.dtype], tuple(tensor.shape), tensor.nbytes, make)


def _rope_factors(config) -> torch.Tensor | None:
    """What llama.cpp divides the rotary frequencies of each pair of dimensions by, float32 [head_dim / 2]."""
    if _rope(config)["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = _rope(config)["rope_theta"] ** -(torch.arange(0, _head_dim(config), 2).float() / _head_dim(config))
    return plain / scaled


def _add_metadata(writer: "gguf.GGUFWriter", source: Source, tensors: list[_Tensor]) -> None:
    """Writes the keys that llama.cpp needs of the architecture, and the file type that most bytes of matrices have."""
    config, rope = source.config, _rope(source.config)
    matrices = Counter()
    for tensor in tensors:
        matrices[tensor.kind.name] += tensor.nbytes if len(tensor.shape) > 1 else 0
    quantized = [kind for kind, _ in matrices.most_common() if kind.startswith("Q")]
    most = (quantized or [matrices.most_common(1)[0][0]])[0]
    writer.add_type("model")
    writer.add_name(Path(config.name_or_path or source.architecture).name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(most, f"MOSTLY_{most}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(_context(config))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _context(config) -> int:
    """llama.cpp lets these architectures attend to the whole text: with a sliding window, it does as the model up to
    there."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    return min(config.max_position_embeddings, window or config.max_position_embeddings)
