"""Where a model keeps the layers of its decoder."""

from torch import nn


def decoder_layers(model) -> tuple[str, nn.ModuleList]:
    """The list of the layers of `model`'s decoder, with its name in `model`. Raises ValueError for a model without such a
    list."""
    count, decoder = model.config.get_text_config(decoder=True).num_hidden_layers, model.get_decoder()
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and any(m is module for m in decoder.children())
    ]
    if len(found) != 1:
        raise ValueError(
            f"model={type(model).__name__}: its decoder has {len(found)} lists of {count} layers, and 1 is needed"
        )
    return found[0]
