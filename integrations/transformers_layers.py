"""Layers of transformers' models that are not read as their class says."""

from importlib.util import find_spec


# class of a module -> its linear layers that are read so, where the forward does not run on the meta device
READ_OUTSIDE_FORWARD = {
    "FalconMambaMixer": ("dt_proj",),
    "JambaMambaMixer": ("dt_proj",),
    "MambaMixer": ("dt_proj",),
    "RwkvFeedForward": ("value",),
    "RwkvSelfAttention": ("output",),
}
# those that the fused kernels of the package mamba_ssm read in training, where it is installed
READ_BY_FUSED_TRAINING = {
    "FalconMambaMixer": ("x_proj", "out_proj"),
    "MambaMixer": ("x_proj", "out_proj"),
    "BambaMixer": ("out_proj",),
    "FalconH1Mixer": ("out_proj",),
    "GraniteMoeHybridMambaLayer": ("out_proj",),
    "Mamba2Mixer": ("out_proj",),
    "NemotronHMamba2Mixer": ("out_proj",),
    "Zamba2MambaMixer": ("out_proj",),
}


def read_outside_forward(model, in_training: bool = False) -> set[str]:
    """Names of the linear layers of `model` whose weight other code reads than their forward. in_training: also those
    that are read so in training only."""
    tables = [READ_OUTSIDE_FORWARD]
    if in_training and find_spec("mamba_ssm"):
        tables.append(READ_BY_FUSED_TRAINING)
    return {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        for table in tables
        for child in table.get(type(module).__name__, ())
    }
