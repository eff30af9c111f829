"""Up to how many tokens a loop other than transformers' own can give the same answer."""

from transformers import GenerationMixin

from hf_efficient.cache.bookkeeping.model_key import rope_types


_STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
# Their `prepare_inputs_for_generation` runs everything anew where longrope switches its factors, and does nothing else.
_SWITCH_ROPE = {
    "transformers.models.phi3.modeling_phi3": "Phi3ForCausalLM",
    "transformers.models.phimoe.modeling_phimoe": "PhimoeForCausalLM",
}


def overrides_steps(model) -> str:
    """Who gives the loop's steps another meaning than `GenerationMixin`: "transformers", for a model of its own (of images,
    say), "user" for a subclass or the model itself (as PEFT's prompts do), "" for nobody."""
    for name in _STEPS:
        if name in vars(model):
            return "user"
        cls, module = _defined(model, name)
        if cls is GenerationMixin and module == GenerationMixin.__module__:
            continue
        if not (module or "").startswith("transformers.models."):
            return "user"
        if _SWITCH_ROPE.get(module) != cls.__name__:
            return "transformers"
    return ""


def exact_length(model) -> int | None:
    """Up to how many tokens, prompt and answer, a token's keys follow from the tokens before it alone, whatever else is in the
    forward: None for any number."""
    lengths = [_rope_length(model.config.get_text_config(decoder=True))]
    cls, module = _defined(model, _STEPS[0])
    if _SWITCH_ROPE.get(module) == cls.__name__:
        lengths.append(getattr(model.config, "original_max_position_embeddings", None))
    return min((length for length in lengths if length is not None), default=None)


def _defined(model, name: str) -> tuple[type, str | None]:
    """The class that defines a step, and the module that its function is of."""
    defines = (cls for cls in type(model).__mro__ if name in vars(cls))
    cls = next(cls for cls in defines if not cls.__module__.startswith("hf_efficient."))
    return cls, getattr(vars(cls)[name], "__module__", None)


def _rope_length(config) -> int | None:
    """Beyond so many tokens the rotary frequencies follow from the longest row of a forward: drafts, rows that left the batch
    and prompts run apart would change them."""
    lengths = []
    for parameters in rope_types(config):
        kind = parameters.get("rope_type", "")
        if "dynamic" in kind:
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            lengths.append(parameters.get("original_max_position_embeddings") or original or 0)
    return min(lengths, default=None)
