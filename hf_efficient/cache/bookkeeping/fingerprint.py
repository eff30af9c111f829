"""Fingerprints of the config and the weights on which a model's keys and values depend, for saved caches."""

import hashlib

import torch


_CONFIG_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "kv_lora_rank", "rope_parameters", "rope_theta", "max_position_embeddings"),
    *("sliding_window", "attention_chunk_size", "partial_rotary_factor", "num_kv_shared_layers"),
)
_SAMPLES = 4  # values of every parameter that enter the fingerprint


def config_fingerprint(config) -> dict:
    """The fields of a transformers config that shape a cache or its positions: name -> JSON value."""
    decoder = config.get_text_config(decoder=True)
    return {name: _plain(value) for name in _CONFIG_FIELDS if (value := getattr(decoder, name, None)) is not None}


def _plain(value):
    """`value` as it comes back from JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def weights_fingerprint(model: torch.nn.Module) -> str:
    """A digest of the floating-point parameters and of which adapters are active or merged, and how strongly.

    Of every parameter the name, shape, dtype and 4 values count; of those that accelerate keeps on the meta device no
    values.
    """
    digest, samples = hashlib.sha256(), []
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_floating_point() and parameter.numel():  # packed weights, integers, lie as the device wants
            name = name.replace("_orig_mod.", "")  # a prefix of torch.compile
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
            if not parameter.is_meta:
                indices = torch.linspace(0, parameter.numel() - 1, _SAMPLES, dtype=torch.float64, device="cpu").long()
                samples.append(parameter.detach().reshape(-1)[indices.to(parameter.device)].to("cpu", torch.float64))
    if samples:
        digest.update(torch.cat(samples).numpy().tobytes())
    adapters = {
        f"{list(module.active_adapters)} {list(module.merged_adapters)} {module.disable_adapters} "
        f"{dict(scaling) if isinstance(scaling := getattr(module, 'scaling', None), dict) else None}"
        for module in model.modules()
        if hasattr(module, "merged_adapters") and hasattr(module, "disable_adapters")
    }
    digest.update("|".join(sorted(adapters)).encode())
    return digest.hexdigest()
