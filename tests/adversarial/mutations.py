"""One change at random to a checkpoint: {kind: function of (random numbers, `Checkpoint`, names of the quantized
layers)}, which changes it in place and returns words that name what it changed: an error must hold one of them."""

import json

import numpy as np
from raw_checkpoint import FLOATS, NUMPY, Tensor, size_of


PARTS = (
    *("weight", "qweight", "qzeros", "scales", "g_idx", "scale", "zero_point", "weight_scale", "weight_zero_point"),
    *("weight_packed", "weight_g_idx", "input_scale", "zero", "weight.absmax", "SCB", "bitmap", "places", "anything"),
)
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 5, 8, 16, 64, 2**70, 0.5, "", "x", "tensor", "float", [], [3], {}, {"x": 1},
    "(a+)+$",
)  # fmt: skip


def layer_tensor(rng, checkpoint, layers) -> str:
    """A tensor of a quantized layer."""
    names = [name for name in sorted(checkpoint.tensors) if any(name.startswith(f"{layer}.") for layer in layers)]
    return names[rng.integers(len(names))]


def words(*names: str) -> list[str]:
    """A tensor's name, and those of its layer: errors may name any part of it that is wrong now."""
    return [word for name in names for word in (name, ".".join(name.split(".")[:5]) if name.count(".") > 4 else name)]


def missing(rng, checkpoint, layers):
    names = sorted(checkpoint.tensors)
    name = names[rng.integers(len(names))] if rng.random() < 0.3 else layer_tensor(rng, checkpoint, layers)
    del checkpoint.tensors[name]
    return words(name)


def extra(rng, checkpoint, layers):
    source = checkpoint.tensors[layer_tensor(rng, checkpoint, layers)]
    name = f"{layers[rng.integers(len(layers))]}.{PARTS[rng.integers(len(PARTS))]}"
    checkpoint.tensors[name] = source
    return words(name)


def converted(rng, checkpoint, layers):
    """The same numbers in another dtype."""
    name = layer_tensor(rng, checkpoint, layers)
    tensor = checkpoint.tensors[name]
    others = [dtype for dtype in NUMPY if dtype not in (tensor.dtype, "BOOL")]
    with np.errstate(all="ignore"):
        checkpoint.tensors[name] = Tensor.of(tensor.values(), others[rng.integers(len(others))])
    return words(name)


def relabelled(rng, checkpoint, layers):
    """The same bits under the name of another dtype of that size."""
    name = layer_tensor(rng, checkpoint, layers)
    tensor = checkpoint.tensors[name]
    others = [d for d in NUMPY if size_of(d) == size_of(tensor.dtype) and d != tensor.dtype]
    tensor.dtype = others[rng.integers(len(others))]
    return words(name)


def shaped(rng, checkpoint, layers):
    name = layer_tensor(rng, checkpoint, layers)
    tensor = checkpoint.tensors[name]
    values = np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)
    changes = [lambda v: v[:-1], lambda v: v[..., :-1] if v.ndim else v[None], lambda v: v.T, lambda v: v.flatten()]
    changes += [lambda v: v[None], lambda v: np.concatenate([v.flatten()] * 2), lambda v: v.reshape(-1, 1)]
    values = changes[rng.integers(len(changes))](values if values.ndim else values[None])
    tensor.shape, tensor.data = values.shape, np.ascontiguousarray(values).tobytes()
    return words(name)


def scaled(rng, checkpoint, layers):
    """One or all of the floats of a tensor become NaN, infinite, negative, 0 or huge."""
    floats = [n for n, t in sorted(checkpoint.tensors.items()) if t.dtype in FLOATS and t.shape != (3,)]
    floats = [n for n in floats if any(n.startswith(f"{layer}.") for layer in layers)]
    if not floats:
        return codes(rng, checkpoint, layers)
    name = floats[rng.integers(len(floats))]
    tensor = checkpoint.tensors[name]
    values = tensor.values().copy()
    new = [np.nan, np.inf, -np.inf, 0.0, "negative", 1e30][rng.integers(6)]
    chosen = rng.random(values.shape) < (1 if rng.random() < 0.3 else 0.05)
    chosen.flat[rng.integers(chosen.size)] = True
    values[chosen] = -values[chosen] if new == "negative" else new
    with np.errstate(all="ignore"):
        checkpoint.tensors[name] = Tensor.of(values, tensor.dtype)
    return words(name)


def codes(rng, checkpoint, layers):
    """Some bytes of a tensor become random ones."""
    name = layer_tensor(rng, checkpoint, layers)
    tensor = checkpoint.tensors[name]
    data = np.frombuffer(tensor.data, np.uint8).copy()
    chosen = rng.random(data.shape) < 0.1
    chosen[rng.integers(len(chosen))] = True
    data[chosen] = rng.integers(0, 256, chosen.sum())
    tensor.data = data.tobytes()
    return words(name)


def configured(rng, checkpoint, layers):
    """A field of the quantization_config goes or gets another value."""
    places = list(_fields(checkpoint.config["quantization_config"]))
    inside, field = places[rng.integers(len(places))]
    if rng.random() < 0.2:
        del inside[field]
    else:
        inside[field] = VALUES[rng.integers(len(VALUES))]
    return [str(field), "quantization_config", *layers]


def _fields(config):
    for field, value in list(config.items()):
        if field != "quant_method":  # which library it is of: another name is transformers' affair
            yield config, field
        if isinstance(value, dict):
            yield from _fields(value)


def described(rng, checkpoint, layers):
    """As `configured`, in the JSON of the file's metadata, where there is some."""
    names = [name for name in sorted(checkpoint.metadata) if name != "format"]
    if not names:
        return configured(rng, checkpoint, layers)
    name = names[rng.integers(len(names))]
    content = json.loads(checkpoint.metadata[name])
    places = list(_fields(content))
    inside, field = places[rng.integers(len(places))]
    inside[field] = VALUES[rng.integers(len(VALUES))]
    checkpoint.metadata[name] = json.dumps(content)
    return words(name)


def swapped(rng, checkpoint, layers):
    """Two tensors of one shape change places."""
    name = layer_tensor(rng, checkpoint, layers)
    tensor = checkpoint.tensors[name]
    alike = [n for n, t in sorted(checkpoint.tensors.items()) if (t.dtype, t.shape) == (tensor.dtype, tensor.shape)]
    other = alike[rng.integers(len(alike))]
    checkpoint.tensors[name], checkpoint.tensors[other] = checkpoint.tensors[other], tensor
    return words(name, other)


IN_CHECKPOINT = {
    **{"missing": missing, "extra": extra, "converted": converted, "relabelled": relabelled, "shaped": shaped},
    **{"scaled": scaled, "codes": codes, "configured": configured, "described": described, "swapped": swapped},
}


def cut_off(rng, files):
    """A file ends early, or has bytes behind its end."""
    name = [n for n in sorted(files) if n.endswith(".safetensors")][0]
    data = files[name]
    files[name] = data[: rng.integers(len(data))] if rng.random() < 0.8 else data + bytes(int(rng.integers(1, 99)))
    return [name]


def renamed_shards(rng, files):
    """Shards have each other's names: every tensor is there."""
    first, second = [n for n in sorted(files) if n.endswith(".safetensors")]
    files[first], files[second] = files[second], files[first]
    return [first, second]


def twice_a_shard(rng, files):
    first, second = [n for n in sorted(files) if n.endswith(".safetensors")]
    files[second] = files[first]
    return [first, second]


def lost_shard(rng, files):
    name = [n for n in sorted(files) if n.endswith(".safetensors")][rng.integers(2)]
    del files[name]
    return [name]


IN_FILES = {
    "cut off": cut_off,
    "renamed shards": renamed_shards,
    "twice a shard": twice_a_shard,
    "lost shard": lost_shard,
}
