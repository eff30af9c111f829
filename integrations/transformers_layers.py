"""Layers of transformers' models whose weight is read by other code than their own forward."""

from torch import nn


# class of a module -> its linear layers that are read so, where the forward does not run on the meta device
READ_OUTSIDE_FORWARD = {
    "ConditionalDetrMHAttentionMap": ("k_proj",),
    "DetrMHAttentionMap": ("k_proj",),
    "FalconMambaMixer": ("dt_proj",),
    "Gemma3nTextAltUp": ("prediction_coefs", "correction_coefs"),  # in training
    "JambaMambaMixer": ("dt_proj",),
    "LayoutLMv2Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LayoutLMv3Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LSHSelfAttention": ("query_key", "value"),
    "MambaMixer": ("dt_proj",),
    "PPDocLayoutV2ReadingOrderEncoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "RwkvFeedForward": ("value",),
    "RwkvSelfAttention": ("output",),
}
# those that fused kernels (of the package mamba_ssm, or of the Hub) read in training
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


def read_outside_forward(model) -> set[str]:
    """Names of the linear layers of `model` whose weight other code reads than their forward."""
    return {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        for child in READ_OUTSIDE_FORWARD.get(type(module).__name__, ())
    }


def keep_unfused(model) -> None:
    """Keeps the mixers of `model` whose layers in `READ_BY_FUSED_TRAINING` are no plain linear layers (but compressed,
    learned under codes or masks, or adapted) from the fused kernels, which would read their `weight` alone.

    `training` of such a mixer stays False: its forward reads it for this choice and for nothing else. This holds for
    copies, and until its layers are plain again."""
    for module in model.modules():
        if type(module).__name__ in READ_BY_FUSED_TRAINING:
            type(module).train = _train  # of the class: copies and pickles have it, too
            module.training = module.training and _can_fuse(module)


def _train(mixer: nn.Module, mode: bool = True) -> nn.Module:
    nn.Module.train(mixer, mode)
    mixer.training = mode and _can_fuse(mixer)
    return mixer


def _can_fuse(mixer: nn.Module) -> bool:
    return all(type(getattr(mixer, name)) is nn.Linear for name in READ_BY_FUSED_TRAINING[type(mixer).__name__])
