"""How many windows are computed at once."""

from hf_efficient.configs.checks import check


_HIDDEN, _INNER = 16, 4  # tensors of a layer that the backward pass needs: of the hidden size, of the MLP's


def micro_batch(model, batch_size: int, length: int, memory_gb: float | None, checkpointing: bool) -> int:
    """The largest divisor of `batch_size` whose activations take at most `memory_gb`: logits of both models with their
    gradient, and what the layers keep for the backward pass (one of them, where they are computed again). Without a
    limit all of it.

    Raises:
        ValueError: not even one window fits.
    """
    if memory_gb is None:
        return batch_size
    config = model.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    a_layer = _HIDDEN * hidden + _INNER * inner
    kept = layers * hidden + a_layer if checkpointing else layers * a_layer
    a_window = length * (kept + 3 * config.vocab_size) * model.get_input_embeddings().weight.element_size()
    sizes = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    fitting = [size for size in sizes if size * a_window <= memory_gb * 1e9]
    needs = f"a number of at least {a_window / 1e9:.3g}, which a window of {length} tokens takes"
    check(bool(fitting), "memory_gb", memory_gb, needs)
    return fitting[-1]
