"""Layers of transformers' models that are not read as their class says."""

# class of a module -> its linear layers that are read so, where the forward does not run on the meta device
READ_OUTSIDE_FORWARD = {
    "FalconMambaMixer": ("dt_proj",),
    "JambaMambaMixer": ("dt_proj",),
    "MambaMixer": ("dt_proj",),
    "RwkvFeedForward": ("value",),
    "RwkvSelfAttention": ("output",),
}


def read_outside_forward(model) -> set[str]:
    """Names of the modules of `model` that `READ_OUTSIDE_FORWARD` lists."""
    return {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        for child in READ_OUTSIDE_FORWARD.get(type(module).__name__, ())
    }
