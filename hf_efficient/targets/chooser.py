"""Which modules of a model are compressed, and how.

The config says it of a dense checkpoint, the tensors in the files say it of a compressed one.
"""

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.configs import CompressionConfig, module_matches
from hf_efficient.experts import expert_weight_names, is_fused_experts, is_sorted_experts
from hf_efficient.integrations import transformers_compat
from hf_efficient.layers import is_linear
from hf_efficient.targets import externally_read, input_embedding, patterns
from hf_efficient.targets.routers import linears_of_routers
from hf_efficient.targets.weights_in_files import lost_when_saved, weights_in_files


class TargetChooser:
    """Chooses for one load, by its `config`, to whose `modules_to_not_convert` the modules are added that a checkpoint
    of another class lacks.

    pre_quantized: the checkpoint is compressed already. kept: patterns of modules that stay as they are. files: of the
    checkpoint, or None where there is none. own_files: it is dense or compressed by us; one of another library has
    chosen what is compressed.
    """

    def __init__(self, model, config: CompressionConfig, pre_quantized: bool, kept: set[str], files, own_files: bool):
        self.model, self.config, self.pre_quantized = model, config, pre_quantized
        self.files, self.own_files = files, own_files
        self.kept_parameters = transformers_compat.kept_parameters(model) if own_files else set()
        self.embedding = input_embedding.find(model, config)
        own = {self.embedding.name} if self.embedding else set()
        self.kept = kept - own
        modules = dict(model.named_modules())
        self.candidates = {name: m for name, m in modules.items() if name in own or _is_compressible(m)}
        self.base = model.base_model_prefix

    def targets(self) -> list[tuple[str, nn.Module, CompressionConfig]]:
        """(name, module, its config) of everything to compress.

        Raises:
            ValueError: a pattern of a new config matches nothing; experts in a form that cannot be compressed; a
                checkpoint whose files and config contradict each other, or that holds what no forward can use.
        """
        if not self.pre_quantized:
            patterns.check_names(self.config, self.model)
        held = self._held() if self.own_files and self.pre_quantized else None
        if held is not None:
            own = {name: self._held_config(name, file_name) for name, file_name in held.items()}
            return [(name, module, own[name]) for name, module in self.candidates.items() if name in own]
        linears = [name for name, module in self.candidates.items() if isinstance(module, (nn.Linear, nn.Embedding))]
        dense = externally_read.read_elsewhere(self.model, linears)
        lost = set() if self.pre_quantized else lost_when_saved(self.model, linears)
        dense |= set() if self.pre_quantized else linears_of_routers(self.model)
        if self.embedding:
            input_embedding.check_read(self.model, self.embedding.name, dense, lost)
        dense |= lost
        targets = []
        for name, module in self.model.named_modules():
            own = None if name in dense or self._is_kept(name, module) else self._config_of(name)
            if own is None:
                if self.embedding and name == self.embedding.name:
                    raise ValueError(
                        f"embeddings=True, but modules_to_not_convert or overrides leave the input embedding {name} as "
                        "it is: give one of them"
                    )
                continue
            if name in self.candidates:
                targets.append((name, module, own))
            elif any(p.ndim == 3 for p in module.parameters(recurse=False)) and "Experts" in type(module).__name__:
                raise ValueError(
                    f"{name} ({type(module).__name__}) holds expert weights in a form that "
                    f"{type(self.config).__name__} cannot quantize; to leave them as they are, pass "
                    f"modules_to_not_convert=[{name.split('.')[-1]!r}]"
                )
        if targets and not self.pre_quantized:
            patterns.check_overrides(self.config, self.model, {name for name, _, _ in targets})
            self._check_floats([f"{name}.{weight}" for name, module, _ in targets for weight in _weights_of(module)])
        return targets

    def _check_floats(self, weights: list[str]) -> None:
        """Raises ValueError where the files hold one of the `weights`, which are to be compressed, as integers."""
        held = weights_in_files(self.files, self.model, weights)
        if held is not None and held.integers:
            raise ValueError(
                f"the checkpoint holds {len(held.integers)} weights as integers, for example "
                f"{sorted(held.integers)[:3]}: it is quantized in a form that its config.json does not name, and "
                "cannot be quantized again; load it with the library that wrote it"
            )

    def _is_kept(self, name: str, module: nn.Module) -> bool:
        """Whether the module stays as it is whatever the config says of others."""
        if any(name == kept or module_matches(kept, name) for kept in self.kept):
            return True
        return any(f"{name}.{weight}" in self.kept_parameters for weight in _weights_of(module))

    def _config_of(self, name: str) -> CompressionConfig | None:
        """The config of a module by its name; None: it stays as it is."""
        # a base model loaded from the checkpoint of a model with a head: names there begin with the prefix
        is_inside = self.pre_quantized and self.base and not hasattr(self.model, self.base)
        own_name, name = name, f"{self.base}.{name}" if is_inside else name
        if any(module_matches(pattern, name) for pattern in self.config.modules_to_not_convert or ()):
            return None
        return self._scheme_of(own_name, (name,))

    def _scheme_of(self, name: str, names: tuple[str, ...]) -> CompressionConfig | None:
        """What the config says of the module `name`, whose other names are `names`."""
        if self.embedding and name == self.embedding.name:
            return self.config.for_embedding(*names)
        return next((own for own in map(self.config.for_module, names) if own is not self.config), self.config)

    def _held(self) -> dict[str, str] | None:
        """Module that the files hold in compressed form -> what they call it; None where they do not decide."""
        weights = {
            f"{name}.{weight}": name for name, module in self.candidates.items() for weight in _weights_of(module)
        }
        held = weights_in_files(self.files, self.model, list(weights))
        if held is None:
            return None
        tied = self.embedding.tied if self.embedding else ()  # saved apart where they were offloaded
        found = {weights[w]: module for w, module in held.compressed.items() if weights[w] not in tied}
        self._settle(found, {weights[weight] for weight in held.dense})
        return found

    def _settle(self, found: dict[str, str], dense: set[str]) -> None:
        """Adds to `found` the modules that the checkpoint lacks, so that they are reported as missing.

        The checkpoint of another class may lack modules that the config compresses, such as a head: the config is told
        to leave these as they are.
        """
        promised = [
            name
            for name, module in self.candidates.items()
            if name not in found and not self._is_kept(name, module) and self._config_of(name) is not None
        ]
        absent = [name for name in promised if name not in dense]
        known = externally_read.read_outside_forward(self.model)
        is_own_class = type(self.model).__name__ in (getattr(self.model.config, "architectures", None) or ())
        if is_own_class or not (found or dense):
            found.update({name: name for name in absent if name not in known})
        elif new := [name for name in promised if name not in known]:
            self.config.modules_to_not_convert = [*(self.config.modules_to_not_convert or ()), *new]
        if dense and not found:
            raise ValueError(
                f"the config.json of the checkpoint has a quantization_config ({type(self.config).__name__}), but its "
                f"files hold no compressed weight of {type(self.model).__name__}, only plain ones, for example "
                f"{sorted(dense)[0]}: delete quantization_config there, and load them as they are or with "
                "from_pretrained(quantization_config=...)"
            )
        if not self.config.dequantize and (unusable := sorted(known & found.keys())):
            raise ValueError(
                f"the checkpoint holds {unusable[0]} in compressed form, but {type(self.model).__name__} reads its "
                "weight itself: load it with dequantize=True, save it, and quantize that"
            )

    def _held_config(self, name: str, file_name: str) -> CompressionConfig:
        """The config of a module that the files hold in compressed form. Its patterns may name modules of the class
        that was saved."""
        names = (name, f"{self.base}.{name}", file_name) if self.base else (name, file_name)
        own = self._scheme_of(name, names)
        if own is None:
            raise ValueError(
                f"the checkpoint holds {name} in compressed form, but its quantization_config leaves it as it is: "
                f"overrides={self.config.overrides}"
            )
        return own


def _weights_of(module: nn.Module) -> list[str]:
    return expert_weight_names(module) or ["weight"]


def _is_compressible(module: nn.Module) -> bool:
    experts = is_fused_experts(module) or is_sorted_experts(module)
    return is_linear(module) or type(module) is Conv1D or experts
