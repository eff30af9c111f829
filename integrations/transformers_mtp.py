"""Multi-token-prediction (MTP) modules of a model's own checkpoint, as transformers builds and loads them."""

import os
from contextlib import contextmanager

import torch

from hf_efficient.integrations.transformers_loading import of_model
from hf_efficient.integrations.transformers_releases import cache_name


_UNSAID = dict(num_mtp_layers=1, mtp_layer_types=["full_attention"])
# What configs of these models do not say of the module that their checkpoints hold: one layer with full attention, as
# experts where the model has experts. transformers has a name for each of its tensors, as they are those of Mellum's.
_OF_KIND = {
    "qwen3_next": {**_UNSAID, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen3_5_text": _UNSAID,
    "qwen3_5_moe_text": _UNSAID,
}


def load(model):
    """The MTP module of `model`'s checkpoint: transformers' `MtpModel`, in the model's dtype and on the device of its
    last layer. It shares the model's embeddings, output head and rotary embedding.

    Raises ValueError for a model without one, for modules that are not read, and where the files of the checkpoint
    cannot be reached any longer.
    """
    with _described(model.config.get_text_config(decoder=True)) as config:
        return _load(model, config)


@contextmanager
def _described(config):
    """The config of a decoder, which says inside what `_OF_KIND` holds."""
    unsaid, said = _OF_KIND.get(config.model_type, {}), ("num_mtp_layers", "mtp_num_hidden_layers")
    if unsaid and any(getattr(config, name, None) not in (None, 1) for name in said):
        unsaid = {}  # more than one, which is refused by what the config says
    before = {name: getattr(config, name) for name in unsaid if hasattr(config, name)}
    try:
        for name, value in unsaid.items():
            setattr(config, name, value)
        yield config
    finally:
        for name in unsaid:
            setattr(config, name, before[name]) if name in before else delattr(config, name)


def _load(model, config):
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_layers import MtpModel

    name, count = type(model).__name__, getattr(config, "num_mtp_layers", None)
    if count != 1:
        raise ValueError(
            f"assistant_model='mtp': {name} has num_mtp_layers={count}; models are taken whose config says 1, such as "
            "DeepSeek-V3 and GLM-4.5 (and transformers must know of it)"
        )
    if not model.config.name_or_path:
        raise ValueError(
            f"assistant_model='mtp': {name} was not loaded from a checkpoint, where its MTP module would be"
        )
    if getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False):
        raise ValueError(
            f"assistant_model='mtp': the checkpoint of {name} is quantized; MTP modules are read from those in floats"
        )
    kind = _layer_type(model.config.get_mtp_config())
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"assistant_model='mtp': the MTP module of {name} is a layer of {kind!r}; full_attention and "
            "sliding_attention are taken"
        )
    if (getattr(config, "layer_types", None) or [None])[-1] == "linear_attention":
        raise ValueError(
            f"assistant_model='mtp': the last layer of {name} is 'linear_attention', and transformers takes the kind "
            "of the module's norms from there; a last layer with attention is taken"
        )
    last = config.num_hidden_layers  # transformers' own pattern names the numbers of published sizes
    place = model.config.name_or_path
    kept, conversions = model._keys_to_ignore_on_load_unexpected, vars(model).get("_weight_conversions")
    model._weight_conversions = get_model_conversion_mapping(model)  # a quantizer has changed those of the loading
    model._keys_to_ignore_on_load_unexpected = [rf"(^|\.)layers\.{last}\.", r"^mtp\.", r"^model\.mtp\."]
    try:
        model.config.name_or_path = _folder(model)  # `MtpModel` would download without the arguments that the model had
        device = next(model.get_decoder().layers[-1].parameters()).device
        module = MtpModel.from_pretrained(model, device_map={"": device})
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"assistant_model='mtp': the checkpoint {place} of {name} holds no MTP module that can be read: {error}"
        ) from error
    finally:
        model._keys_to_ignore_on_load_unexpected, model._weight_conversions = kept, conversions
        model.config.name_or_path = place
    module.config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"  # both take any mask
    module.layers.requires_grad_(False)  # not the rest, which is the model's own
    module.layers.eval()
    return module


def _folder(model) -> str:
    """The folder of the model's checkpoint, once its files are there: reached with the arguments it was loaded with."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    files, _ = _get_resolved_checkpoint_files(
        pretrained_model_name_or_path=model.config.name_or_path,
        variant=None,
        gguf_file=None,
        use_safetensors=True,
        user_agent=None,
        is_remote_code=False,
        download_kwargs=of_model(model),
    )
    return os.path.dirname(files[0])


def follow(module, model) -> None:
    """Takes the embeddings and the output head that `model` has now, and goes where its last layer is."""
    module.tie_with_main_model(model)
    module.layers.to(next(model.get_decoder().layers[-1].parameters()).device)


def window(module) -> int | None:
    """How many tokens the module's attention sees, the token itself among them; None for all."""
    return module.config.sliding_window if _layer_type(module.config) == "sliding_attention" else None


def _layer_type(config) -> str:
    return (getattr(config, "layer_types", None) or ["full_attention"])[0]


def step(module, tokens, positions, features, mask, cache) -> torch.Tensor:
    """The next features [rows, width, hidden_size].

    Args:
        tokens, positions: int64 [rows, width].
        features: [rows, width, hidden_size], that predicted the tokens.
        mask: float [rows, 1, width, columns], added to the attention's scores.
        cache: has `update(keys, values, layer)`, as transformers' caches.
    """
    embeddings = module.embed_tokens(tokens)
    of_layer = {"layer_type": _layer_type(module.config)} if getattr(module, "has_per_layer_rope", False) else {}
    turns = None if module.rotary_emb is None else module.rotary_emb(embeddings, position_ids=positions, **of_layer)
    return module.layers[0](
        embeddings,
        features,
        position_embeddings=turns,
        attention_mask=mask,
        position_ids=positions,
        **{cache_name(): cache},
    )


def logits(module, features: torch.Tensor) -> torch.Tensor:
    """[..., vocabulary], as the model itself makes them of `features` [..., hidden_size]."""
    return module._project_to_logits(features)
