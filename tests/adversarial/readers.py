"""What a checkpoint of each layout says, read in numpy from the definitions alone: (quantization_config, {part:
Tensor} of one linear layer, its shape, what the file's metadata says of it) -> the weight, float64 [N, K]. Whatever
is not as the definition says raises an error of some kind."""

import json

import numpy as np
from raw_checkpoint import FLOATS


INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "BOOL")


def take(parts, name, dtypes, *shapes):
    tensor = parts.pop(name)
    assert tensor.dtype in dtypes, f"{name} {tensor.dtype}"
    assert not shapes or tensor.shape in shapes, f"{name} {tensor.shape}"
    return tensor.values()


def stream(rows: np.ndarray, bits: int, count: int, width: int = 32) -> np.ndarray:
    """Words [R, W] whose bits, the lowest first, are codes one after the other -> [R, count]."""
    ones = (rows[:, :, None].astype(np.int64) >> np.arange(width)) & 1
    ones = ones.reshape(len(rows), -1)[:, : count * bits].reshape(len(rows), count, bits)
    return ones @ (1 << np.arange(bits))


def groups(values: np.ndarray, columns: int) -> np.ndarray:
    return values[:, np.arange(columns) // -(-columns // values.shape[1])]


def gptq(config, parts, shape, _):
    rows, columns = shape
    bits = config.get("bits", parts["qweight"].shape[0] * 32 // columns)
    less = {"gptq": 1, "gptq_v2": 0}[config.get("checkpoint_format", "gptq")]
    size = columns if config["group_size"] in (-1, None) else config["group_size"]
    count = -(-columns // size)
    packed = take(parts, "qweight", ["I32"], (columns * bits // 32, rows))
    zeros = take(parts, "qzeros", ["I32"], (count, -(-rows * bits // 32)))
    scale = take(parts, "scales", FLOATS, (count, rows))
    if bits != 3:  # whole words, as the library turns one version into the other
        zeros = zeros + less * sum(1 << shift for shift in range(0, 32, bits))
    zeros = stream(zeros, bits, rows)
    zeros = zeros + less & 7 if bits == 3 else zeros
    if "g_idx" in parts:
        index = take(parts, "g_idx", ["I32", "I64"], (columns,))
        assert (np.bincount(index, minlength=count)[:-1] == size).all() and len(np.bincount(index)) == count
    else:
        assert not config.get("desc_act")
        index = np.arange(columns) // size
    return ((stream(packed.T, bits, columns).T - zeros[index]) * scale[index]).T


def awq(config, parts, shape, _):
    rows, columns = shape
    assert config.get("bits", 4) == 4 and config.get("zero_point", True) is True
    packed = take(parts, "qweight", ["I32"], (columns, rows // 8))
    zeros, scale = take(parts, "qzeros", ["I32"]), take(parts, "scales", FLOATS)
    order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
    codes, zeros = (
        stream(words, 4, rows).reshape(len(words), -1, 8)[..., order].reshape(len(words), rows)
        for words in (packed, zeros)
    )
    size = config.get("group_size") if config.get("group_size") not in (-1, None) else columns
    index = np.arange(columns) // size
    assert zeros.shape == scale.shape == (index[-1] + 1, rows)
    return ((codes - zeros[index]) * scale[index]).T


def hqq(config, parts, shape, _):
    rows, columns = shape
    bits, size, axis = (take(parts, part, INTEGERS).item() for part in ("nbits", "group_size", "axis"))
    assert take(parts, "shape", INTEGERS).flatten().tolist() == [rows, columns] and axis == 1 and columns % size == 0
    for flag in ("view_as_float", "quant_scale", "quant_zero"):
        assert flag not in parts or not take(parts, flag, INTEGERS).any()
    fields, count = {8: 1, 4: 2, 3: 10, 2: 4}[bits], rows * columns // size
    words = take(parts, "W_q", ["I32"] if bits == 3 else ["U8"], (-(-count // fields), size))
    codes = np.concatenate([words >> bits * (fields - 1 - i) & 2**bits - 1 for i in range(fields)])[:count]
    scale, zero = (take(parts, part, FLOATS, (count, 1)) for part in ("scale", "zero"))
    return ((codes - zero) * scale).reshape(shape)


def compressed_tensors(config, parts, shape, _):
    rows, columns = shape
    (group,) = config["config_groups"].values()
    weights, inputs = group["weights"], group.get("input_activations")
    layout = group.get("format") or config["format"]
    symmetric, strategy = weights.get("symmetric", True), weights.get("strategy") or "tensor"
    assert symmetric in (True, False)
    if layout == "pack-quantized":
        bits = weights["num_bits"]
        codes = stream(take(parts, "weight_packed", ["I32"], (rows, -(-columns * bits // 32))), bits, columns)
        assert "weight_shape" not in parts or take(parts, "weight_shape", ["I64", "I32"]).tolist() == [rows, columns]
        middle = 2 ** (bits - 1)
    else:
        codes = take(parts, "weight", [{"float": "F8_E4M3", "int": "I8"}[weights.get("type", "int")]], shape)
        middle = 0
    size = weights["group_size"] if strategy == "group" else columns
    kinds = {"tensor": [(1,), (1, 1), ()], "channel": [(rows, 1)], "group": [(rows, -(-columns // size))]}
    kinds["block"] = [(-(-rows // 128), -(-columns // 128))]
    scale = take(parts, "weight_scale", FLOATS, *kinds[strategy])
    zero = np.full(scale.shape, middle)
    if not symmetric and layout == "pack-quantized":
        zero = stream(take(parts, "weight_zero_point", ["I32"]).T, bits, rows).T
    elif not symmetric:
        zero = take(parts, "weight_zero_point", ["I8"])
    assert zero.shape == scale.shape
    if "weight_g_idx" in parts:
        index = take(parts, "weight_g_idx", ["I32", "I64"], (columns,))
        assert (np.bincount(index) == size).all()
    else:
        assert weights.get("actorder") not in ("group", "dynamic")
        index = np.arange(columns) // size
    if inputs and not inputs.get("dynamic"):
        assert (take(parts, "input_scale", FLOATS) > 0).all()
    if strategy == "block":
        zero, scale = (v.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns] for v in (zero, scale))
        return (codes - zero) * scale
    zero, scale = (v.reshape(-1, v.shape[-1] if v.ndim == 2 else 1) for v in (zero, scale))
    return (codes - zero[:, index]) * scale[:, index] if strategy == "group" else (codes - zero) * scale


def bitmask(config, parts, shape, _):
    rows, columns = shape
    packed = take(parts, "bitmask", ["U8"], (rows, -(-columns // 8)))
    assert take(parts, "shape", ["I64"]).flatten().tolist() == [rows, columns]
    mask = stream(packed, 1, columns, 8).astype(bool)
    values = take(parts, "compressed", FLOATS).flatten()
    if config["sparsity_config"]["format"] == "sparse-24-bitmask":
        assert (mask.reshape(rows, -1, 4).sum(-1) == 2).all()
    if "row_offsets" in parts:
        assert (take(parts, "row_offsets", INTEGERS).flatten() == mask.sum(1).cumsum() - mask.sum(1)).all()
    weight = np.zeros(shape)
    assert mask.sum() == len(values)
    weight[mask] = values
    return weight


def bitsandbytes_4bit(config, parts, shape, _):
    (name,) = [part for part in parts if "quant_state" in part]
    state = json.loads(bytes(take(parts, name, ["U8"]).astype(np.uint8).tolist()))
    assert state["shape"] == list(shape)
    packed = parts.pop("weight")
    assert packed.shape == (shape[0] * shape[1] // 2 // (len(packed.data) // packed.shape[0]), 1)
    packed = np.frombuffer(packed.data, np.uint8)
    codes = np.stack([packed >> 4, packed & 15], 1).flatten()
    table = take(parts, "weight.quant_map", ["F32"], (16,))
    assert np.array_equal(table.astype(np.float32), TABLES[name.rpartition("__")[2]].astype(np.float32))
    absmax = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        steps = take(parts, "weight.nested_absmax", ["F32"])
        nested = take(parts, "weight.nested_quant_map", ["F32"], (256,))
        absmax = take(parts, "weight.absmax", ["U8"])
        absmax = nested[absmax] * steps[np.arange(len(absmax)) // state["nested_blocksize"]] + state["nested_offset"]
    else:
        absmax = take(parts, "weight.absmax", ["F32"])
    assert len(absmax) == -(-len(codes) // state["blocksize"])
    return (table[codes] * absmax[np.arange(len(codes)) // state["blocksize"]]).reshape(shape)


def bitsandbytes_8bit(config, parts, shape, _):
    assert "weight_format" not in parts or not take(parts, "weight_format", INTEGERS).any()
    return take(parts, "weight", ["I8"], shape) * take(parts, "SCB", ["F32"], shape[:1])[:, None] / 127


def torchao(config, parts, shape, metadata):
    rows, columns = shape
    kind = json.loads(metadata)
    own = {part for part in parts if part.startswith("_weight_")}
    assert set(kind.get("_tensor_data_names", own)) == own
    one, size = kind["_data"]["block_size"]
    count = columns // size
    assert one == 1 and columns % size == 0
    if kind["_type"] == "Int4Tensor":
        packed = take(parts, "_weight_qdata", ["I8", "U8"], (rows, columns // 2)) & 255
        codes = np.stack([packed & 15, packed >> 4], 2).reshape(shape)
        codes = np.where(codes > 7, codes - 16, codes)
        scale, zero = (take(parts, f"_weight_{part}", FLOATS, (count, rows)).T for part in ("scale", "zero_point"))
        return codes * groups(scale, columns) + groups(zero, columns)
    target = kind["_data"].get("target_dtype")
    bits = int(target["_data"].removeprefix("int")) if target else 8
    codes = take(parts, "_weight_qdata", ["I8"], shape)
    scale, zero = take(parts, "_weight_scale", FLOATS, (rows, count)), np.zeros((rows, count))
    if "_weight_zero_point" in parts:
        zero = take(parts, "_weight_zero_point", ["I8"], (rows, count))
    assert all((v >= -(2 ** (bits - 1))).all() and (v < 2 ** (bits - 1)).all() for v in (codes, zero))
    return (codes - groups(zero, columns)) * groups(scale, columns)


# hf_efficient's own formats


def weight_only(config, parts, shape, _):
    rows, columns = shape
    bits, size = config["bits"], config["group_size"]
    count = 1 if size in (None, -1) else -(-columns // size)
    table_rows = 1 if size is None else rows
    width = 3 * -(-columns // 8) if bits == 3 else -(-columns * bits // 8)
    codes = stream(take(parts, "qweight", ["U8"], (rows, width)), bits, columns, 8)
    index = np.arange(columns) // (columns if size in (None, -1) else size)
    if config["double_quantization"]:
        steps = take(parts, "scale_scale", ["F32"])
        scale = take(parts, "scale_codes", ["U8"], (table_rows, count)) - 128.0
        scale = scale * steps[np.arange(scale.size) // 256].reshape(scale.shape) + take(
            parts, "scale_mean", ["F32"], (1,)
        )
    else:
        scale = take(parts, "scale", FLOATS, (table_rows, count))
    if config["codebook"] == "kmeans":
        tables = take(parts, "codebook", FLOATS, (rows if size == -1 else 1, 2**bits))
        tables = np.broadcast_to(tables, (rows, 2**bits))
        return np.take_along_axis(tables, codes, 1) * np.broadcast_to(scale[:, index], shape)
    if config["codebook"]:
        return TABLES[config["codebook"]][codes] * scale[:, index]
    zero = np.full((1, 1), 2 ** (bits - 1)) if config["symmetric"] else None
    if zero is None and config["zero_point"] == "integer":
        zero = take(parts, "zero_point", ["U8"], scale.shape)
        assert zero.max() < 2**bits
    elif zero is None:
        assert config["zero_point"] == "float"
        zero = take(parts, "zero_point", FLOATS, scale.shape)
    return (codes - (zero if config["symmetric"] else zero[:, index])) * scale[:, index]


def w8a8(config, parts, shape, _):
    codes = take(parts, "qweight", [{"int8": "I8", "fp8": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}[config["dtype"]]], shape)
    shapes = {"channel": (shape[0], 1), "tensor": (1, 1), "block": (-(-shape[0] // 128), -(-shape[1] // 128))}
    scale, zero = take(parts, "scale", ["F32"], shapes[config["weights"]]), 0
    if config["method"] == "zeropoint":
        zero = take(parts, "zero_point", ["I8"], scale.shape)
    return (codes - zero) * scale


def bitnet(config, parts, shape, _):
    packed = take(parts, "qweight", ["U8"], (shape[0], -(-shape[1] // (5 if config["dense"] else 4))))
    if config["dense"]:
        assert packed.max() < 243
        codes = np.stack([packed // 3**place % 3 for place in range(5)], 2).reshape(shape[0], -1)[:, : shape[1]]
    else:
        codes = stream(packed, 2, shape[1], 8)
    assert codes.max() < 3
    return (codes - 1) * take(parts, "scale", ["F32"], (shape[0] if config["per_channel"] else 1, 1))


def sparse(config, parts, shape, _):
    rows, columns = shape
    if config["pattern"] == "2:4":
        places = take(parts, "places", ["U8"], (rows, -(-columns // 12)))
        assert places.max() < 216
        digits = np.stack([places // 6**place % 6 for place in range(3)], 2).reshape(rows, -1)[:, : columns // 4]
        pairs = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], bool)
        mask, width = pairs[digits].reshape(shape), (rows, columns // 2)
    else:
        assert config["pattern"] is None and config.get("group") in ("row", None)
        mask = stream(take(parts, "bitmap", ["U8"], (rows, -(-columns // 8))), 1, columns, 8).astype(bool)
        kept = max(1, round((1 - config["sparsity"]) * columns))
        assert (mask.sum(1) == kept).all()
        width = (rows * kept,)
    weight = np.zeros(shape)
    if config["weights"] is None:
        weight[mask] = take(parts, "qweight", FLOATS, width).flatten()
        return weight
    own, size = config["weights"], config["weights"]["group_size"]
    packed = take(parts, "qweight", ["U8"], (rows, -(-columns // 2 * own["bits"] // 8)))
    weight[mask] = stream(packed, own["bits"], columns // 2, 8).flatten()
    scale, zero = take(parts, "scale", FLOATS), take(parts, "zero_point", ["U8"])
    index = np.arange(columns) // size
    assert scale.shape == zero.shape == (rows, columns // size) and zero.max() < 2 ** own["bits"]
    return np.where(mask, (weight - zero[:, index]) * scale[:, index], 0)


_FP4 = [0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
TABLES = {
    "fp4": np.array([*_FP4, *(-value for value in _FP4)]),
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(
                0.24611230194568634,
                0.33791524171829224,
                0.44070982933044434,
                0.5626170039176941,
                0.7229568362236023,
                1.0,
            ),
        ]
    ),
}
