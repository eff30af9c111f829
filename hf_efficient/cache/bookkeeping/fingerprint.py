"""What tells one model from another, as far as its keys and values are concerned."""

import hashlib

import torch


_CONFIG_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "kv_lora_rank", "rope_parameters", "rope_theta", "max_position_embeddings"),
    *("sliding_window", "attention_chunk_size", "partial_rotary_factor", "num_kv_shared_layers"),
)
_SAMPLES = 4  # values of every parameter


def config_fingerprint(config) -> dict:
    """The fields of a transformers config that shape a cache or the positions in it: name -> JSON value."""
    decoder = config.get_text_config(decoder=True)
    return {name: _plain(value) for name in _CONFIG_FIELDS if (value := getattr(decoder, name, None)) is not None}


def _plain(value):
    """`value` as JSON gives it back."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def weights_fingerprint(model: torch.nn.Module) -> str:
    """A digest of names, shapes, dtypes and 4 values of every floating-point parameter, and of which adapters are
    active or merged. Parameters that accelerate keeps elsewhere (on the meta device) count by name, shape and dtype
    only."""
    digest, samples = hashlib.sha256(), []
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_floating_point() and parameter.numel():  # integers may lie in a layout of the device
            name = name.replace("_orig_mod.", "")  # torch.compile's
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
            if not parameter.is_meta:
                places = torch.linspace(0, parameter.numel() - 1, _SAMPLES, dtype=torch.float64, device="cpu").long()
                samples.append(parameter.detach().reshape(-1)[places.to(parameter.device)].to("cpu", torch.float64))
    if samples:
        digest.update(torch.cat(samples).numpy().tobytes())
    adapters = {
        f"{list(module.active_adapters)} {list(module.merged_adapters)} {module.disable_adapters}"
        for module in model.modules()
        if hasattr(module, "merged_adapters") and hasattr(module, "disable_adapters")
    }
    digest.update("|".join(sorted(adapters)).encode())
    return digest.hexdigest()
