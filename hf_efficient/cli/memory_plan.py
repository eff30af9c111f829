"""What a model will take in memory at given lengths, compared with what is free before its weights are loaded."""

from pathlib import Path


def gigabytes(size: int | None) -> str:
    """ "1.50 GB" """
    return "unknown" if size is None else f"{size / 1e9:.2f} GB"


def planned(model: str, config, quantization=None, **lengths):
    """(bytes of the weights or None where nobody knows, the `Estimate`) of the model `model` with transformers config
    `config`. Weights that another package compressed count as large as their files.

    Args:
        lengths: further arguments of `hf_efficient.estimate`.
    """
    import hf_efficient
    from hf_efficient.cli.models import saved_quantization
    from hf_efficient.integrations import model_card

    saved = saved_quantization(config)
    if saved is None or saved.get("quant_method") in model_card.CONFIGS:
        plan = hf_efficient.estimate(model, quantization, **lengths)
        return plan.weight_bytes, plan
    del config.quantization_config
    plan = hf_efficient.estimate(config, **lengths)
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) or None, plan


def check_generation(model: str, config, quantization=None, *, fewer: str, **lengths) -> None:
    """Raises ValueError where prompts and new tokens are more than the model's positions, or the batch does not fit
    into the free memory.

    Args:
        fewer: the options that a user may lower.
        lengths: `batch_size`, `prompt_tokens`, `new_tokens`, `kv_format` and `dtype` of `hf_efficient.estimate`.
    """
    import torch

    from hf_efficient.evaluation.devices import free_memory

    batch_size, prompt, new = (lengths[name] for name in ("batch_size", "prompt_tokens", "new_tokens"))
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and prompt + new > longest:
        raise ValueError(
            f"a prompt of {prompt} tokens and {new} new ones: the model takes at most {longest}; lower {fewer}"
        )
    where = "cuda" if torch.cuda.is_available() else "cpu"
    free, tokens = free_memory(torch.device(where)), 8 * batch_size * (prompt + new)  # int64
    if tokens <= free:  # else the plan itself would take as long as a list of them
        weights, plan = planned(model, config, quantization, **lengths)
        parts = {"weights": weights, "cache": plan.kv_cache_bytes, "activations": plan.activation_bytes}
        if tokens + sum(size or 0 for size in parts.values()) <= free:
            return
    else:
        parts = {"the tokens alone": tokens}
    shown = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
    raise ValueError(
        f"{batch_size} sequences of {prompt} + {new} tokens do not fit: {shown}; {gigabytes(free)} are free on the "
        f"{where}. Lower {fewer}"
    )
