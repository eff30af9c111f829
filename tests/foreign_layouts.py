"""Random weights in the layouts of other libraries, written from their definitions: {part: tensor} of one module, and
the weight [N, K] that the library makes of them."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, C] -> int32 [R, C * bits / 32]: the bits of a row one after the other, the lowest first."""
    places = (codes.numpy()[..., None].astype(np.int64) >> np.arange(bits)) & 1
    rows = places.reshape(len(codes), -1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return torch.from_numpy(np.packbits(rows.astype(np.uint8), axis=1, bitorder="little").view(np.int32).copy())


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (rows, columns))


def random_scale(rows: int, columns: int, dtype=torch.float16, bits=4) -> torch.Tensor:
    return ((torch.rand(rows, columns) * 0.02 + 0.005) * 2 ** (4 - bits)).to(dtype)


def gptq(rows, columns, dtype, bits=4, size=32, symmetric=False, version="gptq", order="natural"):
    size = columns if size == -1 else size
    groups = -(-columns // size)
    codes, scale = random_codes(rows, columns, bits), random_scale(rows, groups, bits=bits)
    zero = torch.full((rows, groups), 2 ** (bits - 1)) if symmetric else torch.randint(1, 2**bits, (rows, groups))
    g_idx = torch.arange(columns) // size
    if order == "activation":
        g_idx = g_idx[torch.randperm(columns)]
    if order == "shared":  # by all weights with so many columns
        g_idx = g_idx[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    if order == "groups":
        g_idx = g_idx.view(groups, size).flip(0).flatten()
    stored = zero - 1 if version == "gptq" else zero
    parts = {
        "qweight": stream(codes, bits).t().contiguous(),
        "qzeros": stream(stored.t().contiguous(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": g_idx.int(),
    }
    weight = (codes - zero[:, g_idx]).half() * scale[:, g_idx]
    config = {"quant_method": "gptq", "bits": bits, "group_size": size if groups > 1 else -1, "sym": symmetric}
    return parts, weight, {**config, "desc_act": order in ("activation", "shared"), "checkpoint_format": version}


def awq(rows, columns, dtype, size=32):
    groups = columns // size
    codes, scale, zero = random_codes(rows, columns, 4), random_scale(rows, groups), random_codes(rows, groups, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    pack = lambda values: stream(values.t().unflatten(1, (-1, 8))[..., order].flatten(1).contiguous(), 4)  # noqa: E731
    parts = {"qweight": pack(codes), "qzeros": pack(zero), "scales": scale.t().contiguous()}
    weight = (codes - zero.repeat_interleave(size, 1)).half() * scale.repeat_interleave(size, 1)
    return parts, weight, {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}


def bitsandbytes_8bit(rows, columns, dtype, threshold=6.0):
    codes, peak = torch.randint(-127, 128, (rows, columns)).to(torch.int8), torch.rand(rows) * 0.2 + 0.1
    parts = {"weight": codes, "SCB": peak, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": threshold}
    return parts, codes * peak[:, None] * 7.874015718698502e-3, config


def hqq(rows, columns, dtype, bits=4, size=32):
    groups = rows * columns // size
    codes, scale = random_codes(groups, size, bits), random_scale(groups, 1, dtype, bits)
    zero = (torch.rand(groups, 1) * 2**bits).to(dtype)
    fields = {8: 1, 4: 2, 3: 10, 2: 4}[bits]
    padded = torch.cat([codes, codes.new_zeros(-len(codes) % fields, size)]).view(fields, -1, size)
    words = sum(part << bits * (fields - 1 - index) for index, part in enumerate(padded))
    encoded = {"nbits": bits, "group_size": size, "axis": 1}
    parts = {
        "W_q": words.to(torch.int32 if bits == 3 else torch.uint8),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor([rows, columns]),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in encoded.items()},
        **{name: torch.tensor(0, dtype=torch.uint8) for name in ("view_as_float", "quant_scale", "quant_zero")},
    }
    config = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {"weight_quant_params": encoded}}
    return parts, ((codes.to(dtype) - zero) * scale).view(rows, columns), config


def packed(rows, columns, dtype, bits=4, size=32, symmetric=True, order="natural", strategy="group"):
    """compressed-tensors' "pack-quantized"."""
    size = columns if strategy == "channel" else size
    groups, middle = columns // size, 2 ** (bits - 1)
    codes, scale = random_codes(rows, columns, bits), random_scale(rows, groups, dtype, bits)
    zero = torch.full((rows, groups), middle) if symmetric else random_codes(rows, groups, bits)
    parts = {"weight_packed": stream(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    if not symmetric:
        parts["weight_zero_point"] = stream(zero.t().contiguous(), bits).t().contiguous()
    group = torch.arange(columns) // size
    if order == "activation":
        group = parts["weight_g_idx"] = group[torch.randperm(columns)].int()
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    weights |= {
        "group_size": size if strategy == "group" else None,
        "actorder": "group" if order == "activation" else None,
    }
    weight = (codes - zero[:, group.long()]).to(dtype) * scale[:, group.long()]
    return parts, weight, compressed_tensors_config("pack-quantized", weights)


def fp4(rows, columns, dtype, kind="nvfp4"):
    """compressed-tensors' "nvfp4-pack-quantized" and "mxfp4-pack-quantized"."""
    size = 16 if kind == "nvfp4" else 32
    codes = random_codes(rows, columns, 4)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = magnitudes[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    parts = {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": size}
    if kind == "nvfp4":
        scale = (torch.rand(rows, columns // size) * 400 + 1).to(torch.float8_e4m3fn)
        parts |= {"weight_scale": scale, "weight_global_scale": torch.tensor([16384.0])}
        scale, weights["strategy"] = scale.float() / 16384, "tensor_group"
    else:
        parts["weight_scale"] = torch.randint(118, 123, (rows, columns // size), dtype=torch.uint8)
        scale, weights["strategy"] = 2.0 ** (parts["weight_scale"].float() - 127), "group"
    weight = numbers * scale.repeat_interleave(size, 1)
    return parts, weight, compressed_tensors_config(f"{kind}-pack-quantized", weights)


def plain(
    rows,
    columns,
    dtype,
    kind="int",
    strategy="channel",
    dynamic=True,
    inputs=True,
    symmetric=True,
    float8=torch.float8_e4m3fn,
):
    """compressed-tensors' "int-quantized" and "float-quantized"."""
    shape = {"channel": (rows, 1), "tensor": (1,), "block": (-(-rows // 128), -(-columns // 128))}[strategy]
    scale = random_scale(*shape, dtype=dtype, bits=8) if len(shape) == 2 else random_scale(1, 1, dtype, 8)[0]
    expanded = (
        scale if strategy != "block" else scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    )
    if kind == "int":
        codes = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    else:
        codes = (torch.randn(rows, columns) * 50).to(float8)
    parts = {"weight": codes, "weight_scale": scale}
    if inputs and not dynamic:
        parts["input_scale"] = torch.full((1,), 0.05, dtype=dtype)
    if not symmetric:
        parts["weight_zero_point"] = torch.randint(-128, 128, shape).to(torch.int8)
    weights = {"num_bits": 8, "type": kind, "symmetric": symmetric, "strategy": strategy}
    weights |= {"block_structure": [128, 128] if strategy == "block" else None}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": dynamic}
    activations["strategy"] = ("group" if strategy == "block" else "token") if dynamic else "tensor"
    activations["group_size"] = 128 if activations["strategy"] == "group" else None
    numbers = codes.to(dtype) - parts["weight_zero_point"].to(dtype) if not symmetric else codes.to(dtype)
    layout = "naive-quantized" if not inputs else f"{kind}-quantized"
    return parts, numbers * expanded, compressed_tensors_config(layout, weights, activations if inputs else None)


def mask_2_of_4(rows, columns):
    return torch.rand(rows, columns // 4, 4).argsort(-1).lt(2).flatten(1)


def bitmask(rows, columns, dtype, pattern="2:4"):
    """compressed-tensors' "sparse-24-bitmask", or "sparse-bitmask"."""
    mask = mask_2_of_4(rows, columns) if pattern else torch.rand(rows * columns).argsort().view(rows, columns) % 8 < 3
    weight = torch.randn(rows, columns).to(dtype).masked_fill(~mask, 0)
    parts = {
        "compressed": weight[mask].view(rows, -1) if pattern else weight[mask],
        "bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little")),
        "shape": torch.tensor([rows, columns]).view(-1, 1) if pattern else torch.tensor([rows, columns]),
    }
    if not pattern:
        parts["row_offsets"] = mask.sum(1).cumsum(0) - mask.sum(1)
    layout = "sparse-24-bitmask" if pattern else "sparse-bitmask"
    sparsity = {"format": layout, "sparsity_structure": pattern or "unstructured", "targets": ["Linear"], "ignore": []}
    config = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed"}
    return parts, weight, {**config, "sparsity_config": sparsity}


def marlin24(rows, columns, dtype, bits=4, size=128):
    """compressed-tensors' "marlin-24". Its order is that of mma.m16n8k16's second operand: of 16 kept columns by 64
    rows a thread holds, for each of 4 x 2 strips of rows, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9."""
    groups = 1 if size == -1 else columns // size
    codes = random_codes(rows, columns, bits)
    scale = random_scale(rows, groups, bits=bits)
    mask = mask_2_of_4(rows, columns)
    kept, middle = codes[mask].view(rows // 64, 64, -1, 16).numpy(), 2 ** (bits - 1)
    ordered, fields = np.zeros((columns // 32, rows // 64, 1024), dtype=np.uint32), 32 // bits
    for thread in range(32):
        for strip in range(4):
            for half in range(2):
                for which, column in enumerate((0, 1, 8, 9)):
                    row = thread // 8 * 16 + thread // 4 % 2 * 8 + half * 4 + strip
                    place = thread * 32 + strip * 8 + half * 4 + which
                    ordered[:, :, place] = kept[:, row, :, thread % 4 * 2 + column].T
    interleaved = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}[bits]  # where a code goes in its word
    ordered = ordered.reshape(columns // 32, -1, fields)
    words = sum(ordered[:, :, index] << np.uint32(bits * place) for index, place in enumerate(interleaved))
    if size != -1 and size < columns // 2:
        order = torch.arange(64).view(8, 2, 4).transpose(1, 2).flatten()
        stored = scale.t().reshape(-1, 64)[:, order].view(groups, rows)
    else:
        stored = scale.t()
    meta, places = np.zeros(rows * columns // 16, dtype=np.uint16), mask.nonzero()[:, 1].view(rows, -1, 8).numpy() % 4
    for row in range(rows):
        for column in range(columns // 16):
            r, c = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4, column
            r, c = r - r % 2 + c % 2, c - c % 2 + r % 2
            bits_of = sum(int(place) << 2 * index for index, place in enumerate(places[row, column]))
            meta[c // 2 * rows * 2 + r * 2 + c % 2] = bits_of
    parts = {
        "weight_packed": torch.from_numpy(words.view(np.int32)),
        "scale_packed": stored.contiguous(),
        "meta": torch.from_numpy(meta.view(np.int16)).view(columns // 32, 2 * rows),
    }
    weight = ((codes - middle).half() * scale.repeat_interleave(columns // groups, 1)).masked_fill(~mask, 0).to(dtype)
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **strategy}
    return parts, weight, compressed_tensors_config("marlin-24", weights)


def compressed_tensors_config(layout, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def bitsandbytes_4bit(rows, columns, dtype, table="nf4", block=64, double=False, storage=torch.uint8):
    from hf_efficient.formats.codebook import TABLES

    codes, blocks = random_codes(rows, columns, 4), -(-rows * columns // block)
    entries = torch.tensor(TABLES[table])
    state = {"quant_type": table, "blocksize": block, "dtype": str(dtype)[6:], "shape": [rows, columns]}
    flat = codes.flatten().to(torch.uint8)
    parts = {"weight": (flat[::2] << 4 | flat[1::2]).view(storage)[:, None], "weight.quant_map": entries}
    absmax = torch.rand(blocks) * 0.2 + 0.1
    if double:
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.17}
        parts["weight.absmax"] = torch.randint(0, 256, (blocks,)).to(torch.uint8)
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256) ** 3
        parts["weight.nested_absmax"] = torch.rand(-(-blocks // 16)) * 0.1
        steps = parts["weight.nested_absmax"].repeat_interleave(16)[:blocks]
        absmax = parts["weight.nested_quant_map"][parts["weight.absmax"].long()] * steps + 0.17
    else:
        parts["weight.absmax"] = absmax
    parts[f"weight.quant_state.bitsandbytes__{table}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    weight = entries[codes.flatten()] * absmax.repeat_interleave(block)[: codes.numel()]
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": table}
    return parts, weight.view(rows, columns), {**config, "bnb_4bit_use_double_quant": double}


def torchao_int8(rows, columns, dtype, size=-1, bits=8):
    size = columns if size == -1 else size
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns)).to(torch.int8)
    scale = random_scale(rows, columns // size, dtype, bits)
    parts, data = {"_weight_qdata": codes, "_weight_scale": scale}, {"block_size": [1, size]}
    zero = torch.zeros(rows, columns // size)
    kind = "Int8Tensor"
    if bits < 8:
        kind, data["target_dtype"] = "IntxUnpackedToInt8Tensor", {"_type": "torch.dtype", "_data": f"int{bits}"}
        zero = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), zero.shape).to(torch.int8)
        parts["_weight_zero_point"] = zero
    metadata = {"_type": kind, "_data": data, "_tensor_data_names": list(parts)}
    weight = (codes.to(dtype) - zero.to(dtype).repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)
    return parts, weight, {"quant_method": "torchao", "quant_type": {"default": {}}, "metadata": metadata}


def torchao_int4(rows, columns, dtype, size=32):
    codes, scale = random_codes(rows, columns, 4) - 8, random_scale(rows, columns // size, dtype)
    zero = (torch.randn(rows, columns // size) * 0.01).to(dtype)
    nibbles = (codes & 15).to(torch.uint8)
    parts = {
        "_weight_qdata": (nibbles[:, 1::2] << 4 | nibbles[:, ::2]).view(torch.int8),
        "_weight_scale": scale.t().contiguous(),
        "_weight_zero_point": zero.t().contiguous(),
    }
    metadata = {"_type": "Int4Tensor", "_data": {"block_size": [1, size], "shape": [rows, columns]}}
    minimum = (zero.float() - scale.float() * 8).repeat_interleave(size, 1)
    weight = (codes.float() + 8) * scale.float().repeat_interleave(size, 1) + minimum
    return parts, weight, {"quant_method": "torchao", "quant_type": {"default": {}}, "metadata": metadata}


def write(folder, model, layout, dtype, only=lambda name: name != "lm_head", **options):
    """Saves `model` with its linear layers (and experts) in `layout`, random, into `folder`. Returns {module: the
    weight it stands for}."""
    torch.manual_seed(0)
    model.to(dtype).save_pretrained(folder)
    tensors, weights, metadata = load_file(folder / "model.safetensors"), {}, {"format": "pt"}
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and only(name)}
    for key in list(tensors):
        name = key.removesuffix(".weight")
        if name in linears or (".experts." in name and key.endswith(".weight")):
            parts, weights[name], config = layout(*tensors.pop(key).shape, dtype, **options)
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            if "metadata" in config:
                metadata[key] = json.dumps(config.pop("metadata"))
    save_file(tensors, folder / "model.safetensors", metadata)
    rewrite_config(folder, quantization_config=config)
    return weights


def rewrite_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
