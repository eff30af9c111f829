"""What the `config.json` of published EAGLE heads says, in either layout."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from hf_efficient.generation.drafters.published_config import check_integers, layer_config


MODEL_TYPES = ("llama", "qwen3")  # of the layer, in the layout of `speculators`
ROPES = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length of the text
NEEDED = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
SHAPE = (
    *NEEDED,
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
USES = {  # of `eagle_config`: the values that say what EAGLE-3 is
    "use_aux_hidden_state": True,
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}


@dataclass(frozen=True)
class EagleConfig:
    """Facts that tensors do not say.

    layer: sizes, norm epsilon and rotary embedding of the layer.
    target_size: the hidden size of the target.
    draft_vocab_size: None where it is not said.
    reads_layers: the decoder layers (from 0) of the target whose outputs are fused; None for the three of EAGLE-3.
    norm_before_residual: the residual stream starts from the normalized features.
    norm_output: the layer goes on from its normalized outputs.
    norm_before_fc, fc_norm: the target's states are normalized before they are fused, together or layer by layer.
    """

    layer: PreTrainedConfig
    target_size: int
    draft_vocab_size: int | None
    reads_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_output: bool
    norm_before_fc: bool
    fc_norm: bool

    def layers_of(self, model) -> tuple[int, ...]:
        """The layers to read of the target `model`. Raises ValueError where it has no such layers."""
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        layers = self.reads_layers or (1, count // 2 - 1, count - 4)  # what goes into the 2nd, middle, 3rd last layer
        if min(layers) < 0 or max(layers) >= count:
            raise ValueError(
                f"the EAGLE head reads the outputs of the layers {list(layers)} (from 0) of its target, and "
                f"{type(model).__name__} has {count}: its config.json must give others as "
                "eagle_aux_hidden_state_layer_ids"
            )
        return layers


def read(config: dict, name: str) -> EagleConfig:
    """Raises ValueError, naming the key and what is allowed, for what is not read."""
    is_speculators = "speculators_model_type" in config
    inner = config.get("transformer_layer_config") if is_speculators else config
    if not isinstance(inner, dict):
        raise ValueError(f"{name}: transformer_layer_config={inner!r} must be an object")
    layer = _layer(inner, name, is_speculators)
    if (count := layer.num_hidden_layers if is_speculators else inner.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"{name}: num_hidden_layers={count}; heads of 1 layer are read")
    if layer.hidden_act != "silu":
        raise ValueError(f"{name}: hidden_act={layer.hidden_act!r}; 'silu' is allowed")
    kind = (layer.rope_parameters or {}).get("rope_type", "default")
    if kind not in ROPES:
        raise ValueError(f"{name}: rope_type={kind!r}; one of {list(ROPES)} is allowed")
    if sliding := set(getattr(layer, "layer_types", None) or ()) - {"full_attention"}:
        raise ValueError(f"{name}: layer_types has {sorted(sliding)}; 'full_attention' is allowed")
    flags = {key: config.get(key, False) for key in FLAGS}
    for key, value in flags.items():
        if type(value) is not bool:
            raise ValueError(f"{name}: {key}={value!r}; true or false is allowed")
    if flags["norm_output"] and not is_speculators:
        raise ValueError(
            f"{name}: norm_output=true means different things to SpecForge and to speculators, and only the layout of "
            "speculators says which; false is allowed"
        )
    sizes = {key: config.get(key) for key in ("target_hidden_size", "draft_vocab_size")}
    check_integers(name, {key: value for key, value in sizes.items() if value is not None})
    target_size = sizes["target_hidden_size"] or layer.hidden_size
    return EagleConfig(layer, target_size, sizes["draft_vocab_size"], _reads_layers(config, name), **flags)


def _layer(inner: dict, name: str, is_speculators: bool) -> PreTrainedConfig:
    if not is_speculators:
        check_integers(name, {key: inner.get(key) for key in NEEDED})
        return layer_config("llama", {key: inner[key] for key in SHAPE if key in inner}, name)
    kind = inner.get("model_type", "qwen3")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{name}: model_type={kind!r} of transformer_layer_config; one of {list(MODEL_TYPES)} is read")
    return layer_config(kind, inner, name)


def _reads_layers(config: dict, name: str) -> tuple[int, ...] | None:
    key, inner = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise ValueError(f"{name}: eagle_config={inner!r} must be an object")
    for use, allowed in USES.items():
        if inner.get(use, allowed) is not allowed:
            raise ValueError(f"{name}: {use}={inner[use]!r} of eagle_config; {allowed} is allowed")
    # at the top vLLM and speculators say into which layers the states go, in `eagle_config` SpecForge says out of which
    at_top, inside = config.get(key), inner.get(key)
    if at_top and inside:
        raise ValueError(f"{name}: {key}={at_top} and {inside} in eagle_config: one of them is allowed")
    layers = at_top or inside
    if not layers:
        return None
    if not isinstance(layers, list) or any(type(layer) is not int or layer < bool(at_top) for layer in layers):
        raise ValueError(f"{name}: {key}={layers!r} must be a list of integers of at least {int(bool(at_top))}")
    return tuple(layer - bool(at_top) for layer in layers)
