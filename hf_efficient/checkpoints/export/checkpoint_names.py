"""What tensors are called in a checkpoint, where transformers renames them on load or fuses experts."""

import functools

import torch
from transformers import PreTrainedModel

from hf_efficient.integrations.transformers_compat import as_saved, model_from_config
from hf_efficient.layers import CompressedWeight


class CheckpointNames:
    """The names that the checkpoints of a model's architecture have, which other engines expect."""

    def __init__(self, model: PreTrainedModel):
        self.tied = {*model.all_tied_weights_keys}
        with torch.device("meta"):  # what was loaded compressed has forgotten how its experts were split
            self._blank = model_from_config(type(model), model.config)
        self._last = None, {}

    def revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by the model's names -> by a checkpoint's; fused ones come apart."""
        return as_saved(self._blank, tensors)

    def of_module(self, name: str) -> str:
        """The name of the module called `name`."""
        probe = self.revert({f"{name}.weight": torch.empty(0, device="meta")})
        return next(iter(probe)).removesuffix(".weight")

    def experts(self, name: str, weight: CompressedWeight, read) -> dict | None:
        """Of the fused `weight` called `name`: {name of the module of one expert: (rows, its `read`)}; None where
        checkpoints hold it fused, too."""
        shape = weight.experts, weight.out_features, weight.in_features
        probe = self.revert({name: torch.empty(shape, device="meta")})
        if len(probe) < weight.experts or not all(own.endswith(".weight") for own in probe):
            return None
        split = functools.partial(self._split, name, weight, read)
        return {
            own.removesuffix(".weight"): (len(tensor), lambda part, own=own: split(part)[own])
            for own, tensor in probe.items()
        }

    def _split(self, name: str, weight: CompressedWeight, read, part: str) -> dict[str, torch.Tensor]:
        """{name of an expert's weight: its canonical tensor `part`}; those of the latest fused weight are kept."""
        if self._last[0] != name:
            self._last = name, {}
        if part not in self._last[1]:
            fused = read(part)
            per_row = fused.shape[1] == weight.out_features
            rows = fused if per_row else fused.expand(-1, weight.out_features, *fused.shape[2:])
            own = self.revert({name: rows})
            self._last[1][part] = own if per_row else {key: tensor[:1] for key, tensor in own.items()}
        return self._last[1][part]
