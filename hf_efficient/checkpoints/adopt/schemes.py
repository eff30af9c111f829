"""Our config of a checkpoint of another library: which scheme each of its weights has."""

from collections import Counter

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient import configs
from hf_efficient.checkpoints.adopt.experts import FusedWeight
from hf_efficient.checkpoints.adopt.stored import StoredWeight
from hf_efficient.experts import is_fused_experts
from hf_efficient.integrations.transformers_compat import kept_by_default


def describe(model, foreign, stored: dict[str, StoredWeight], fused: list[FusedWeight]):
    """Our config for the modules `stored` of the checkpoint, which `foreign` reads: the commonest scheme, and
    overrides for the others.

    Raises:
        ValueError: tensors are not what the checkpoint's config says, or experts of a layer differ.
    """
    modules = dict(model.named_modules())
    schemes = {}
    for name, weight in stored.items():
        if module := modules.get(name):
            shape = (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
            schemes[name] = foreign.scheme(weight, *shape, module.weight.dtype)
    for weight in fused:
        dtype = getattr(modules[weight.module], weight.parameter).dtype
        for name in weight.linears():
            own = foreign.scheme(stored.get(name, StoredWeight(name)), weight.rows, weight.shape[2], dtype)
            format = getattr(configs, foreign.config)(**own).format()
            if own != schemes.setdefault(weight.module, own) or not all(
                shape[0] == weight.rows or part == "input_order"
                for part, shape in format.shapes(weight.rows, weight.shape[2]).items()
            ):
                raise ValueError(
                    f"{name} is {format}, expected the scheme of {weight.linears()[0]}, with scales of its own for "
                    "each row: the experts of a layer are computed together"
                )
    return foreign.config_of(model, schemes)


def config_of(model, config_name: str, schemes: dict[str, dict]):
    """The config of ours called `config_name` that gives each module of `schemes` its scheme and leaves all others."""
    kind = getattr(configs, config_name)
    own = {name: kind(**scheme).scheme() for name, scheme in schemes.items()}
    counts = Counter(map(repr, own.values()))
    common = max(own.values(), key=lambda scheme: counts[repr(scheme)])
    overrides = {
        name: {field: value for field, value in scheme.items() if value != common[field]}
        for name, scheme in own.items()
        if scheme != common
    }
    head = model.get_output_embeddings()
    heads = {name for name, module in model.named_modules() if head is not None and module is head}
    excluded = not_compressed(model, set(schemes), kept_by_default(model))
    return kind(
        **common,
        overrides=overrides,
        modules_to_not_convert=excluded or None,
        quantize_lm_head=bool(heads & set(schemes)),
    )


def not_compressed(model, compressed: set[str], patterns) -> list[str]:
    """Names of the linear layers and experts of `model` that are not in `compressed` and match none of `patterns`."""
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, (nn.Linear, Conv1D)) or is_fused_experts(module))
        and name not in compressed
        and not any(configs.module_matches(pattern, name) for pattern in patterns)
    ]
