"""GGUF files, kept quantized: `adopt("gguf")` and `from_pretrained(..., gguf_file=...)`. transformers dequantizes
them, all but three architectures, where it needs a kernel of the Hub."""

import logging

import numpy as np
import torch
from torch import nn

from hf_efficient.checkpoints.adopt.gguf_blocks import KINDS, unpack
from hf_efficient.checkpoints.adopt.schemes import config_of
from hf_efficient.checkpoints.saved_tensors import as_saved
from hf_efficient.integrations import transformers_gguf as reading
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer
from hf_efficient.kernels.linear.codes import pack_codes


logger = logging.getLogger(__name__)


class GgufQuantizer(EfficientQuantizer):
    """Linear layers of the types in `KINDS` keep their codes; everything else is read as transformers reads it."""

    def __init__(self, quantization_config, pre_quantized=True, **kwargs):
        super().__init__(quantization_config, pre_quantized=True, **kwargs)

    def validate_environment(self, *args, **kwargs):
        pass

    def read_header(self, gguf_file: str) -> None:
        """What from_pretrained calls when it has found the file. Raises ValueError for an architecture that
        transformers reads in another way."""
        from gguf import GGUFReader

        self._reader = GGUFReader(gguf_file)
        self._architecture = reading.read_field(self._reader, "general.architecture")[0]
        if reading.is_gguf_arch_supported(self._architecture):
            raise ValueError(
                f"{gguf_file}: adopt('gguf') does not read the architecture {self._architecture!r}; load it with "
                "quantization_config=GgufConfig(dequantize=True)"
            )
        self._config = reading.load_gguf_checkpoint(gguf_file)["config"]

    def update_dtype(self, dtype):
        return torch.get_default_dtype() if dtype is None else dtype

    def before_loading(self, model, files, device_map=None):
        self._processor = reading.TENSOR_PROCESSORS.get(self._architecture, reading.TensorProcessor)(
            config=self._config
        )
        self._names = reading.get_gguf_hf_weights_map(model, self._processor)
        linears = {f"{name}.weight": module for name, module in model.named_modules() if type(module) is nn.Linear}
        self._rows, schemes, dense = {}, {}, set()  # name in the file -> order of its rows or None
        for tensor in self._reader.tensors:
            name, kind = self._names.get(tensor.name), tensor.tensor_type.name
            owner, _, part = tensor.name.rpartition(".")
            own = self._names.get(f"{owner}.weight")
            if name is None and own and part in ("bias", "scale") and tensor.data.any():
                raise ValueError(f"{tensor.name} is not read: {own} of {type(model).__name__} has no {part}")
            module = linears.get(name)
            if module is None:
                continue
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if shape != (module.out_features, module.in_features):
                raise ValueError(
                    f"{tensor.name} is {kind} {shape}, expected {(module.out_features, module.in_features)} for {name}"
                )
            if kind in KINDS and (order := self._row_order(tensor)) is not None:
                self._rows[tensor.name] = order
                schemes[name.removesuffix(".weight")] = KINDS[kind].scheme(module.weight.dtype)
            elif kind not in ("F32", "F16", "BF16"):
                dense.add(kind)
        if dense:
            logger.warning(
                f"GGUF: weights of {sorted(dense)} have no format of ours, or another order, and are dequantized"
            )
        if not schemes:
            raise ValueError(
                f"adopt('gguf'): no linear layer of {type(model).__name__} is of a type that is kept, {list(KINDS)}; "
                "load the file with quantization_config=GgufConfig(dequantize=True)"
            )
        self.quantization_config = config_of(model, "WeightOnlyConfig", schemes)
        model.quantization_method = self.quantization_config.quant_method
        super().before_loading(model, None, device_map)
        if different := {name.rpartition(".")[0] for name in self.swapped.weights} ^ set(schemes):
            raise ValueError(f"{min(different)} is quantized in the file, but {type(model).__name__} keeps it as it is")

    def after_loading(self, model):
        read = {id(p) for part in (model.base_model, model.get_output_embeddings()) if part for p in part.parameters()}
        missing = [  # heads of other tasks are new
            name
            for name, p in model.named_parameters()
            if id(p) in read and not getattr(p, "_is_hf_initialized", False)
        ]
        if missing:
            raise ValueError(
                f"the file holds nothing for {len(missing)} parameters of {type(model).__name__}, for example "
                f"{missing[:3]}: it is incomplete"
            )
        super().after_loading(model)

    def _row_order(self, tensor) -> torch.Tensor | None:
        """Where each row of the model's weight stands in the file; None where it is no matter of rows."""
        count = int(tensor.shape[1])
        rows = np.arange(count)[:, None]
        try:
            order = self._processor.process(weights=rows, name=tensor.name).weights
        except (ValueError, KeyError, TypeError):
            return None
        if order.shape != rows.shape or not np.array_equal(np.sort(order, axis=0), rows):
            return None
        return torch.from_numpy(order[:, 0].copy())

    @torch.no_grad()
    def get_state_dict(self, checkpoint_file: str, model) -> dict[str, torch.Tensor]:
        """The file's tensors by the model's names: canonical ones of what stays quantized, others dequantized."""
        from gguf import dequantize

        found = {"tensors": {}, "config": self._config}
        with torch.device("cpu"):
            for tensor in self._reader.tensors:
                if tensor.name in self._rows:
                    found["tensors"] |= self._canonical(tensor, model)
                    continue
                values = dequantize(tensor.data, tensor.tensor_type)
                result = self._processor.process(
                    weights=values, name=tensor.name, tensor_key_mapping=self._names, parsed_parameters=found
                )
                if result.name in self._names:
                    found["tensors"][self._names[result.name]] = torch.from_numpy(np.copy(result.weights))
        return found["tensors"]

    def _canonical(self, tensor, model) -> dict[str, torch.Tensor]:
        name, kind = self._names[tensor.name], tensor.tensor_type.name
        weight, _ = self.swapped.weights[name]
        block = {"K": 256}.get(kind[-1], 32)
        data = torch.from_numpy(np.array(tensor.data))  # a copy: torch warns of arrays that are read only
        codes, scale, minimum = unpack(kind, data.view(weight.out_features, weight.in_features // block, -1))
        for values in (scale, minimum):
            if values is not None and not values.isfinite().all():
                raise ValueError(f"{tensor.name} ({kind}) holds NaN or infinity in its scales")
        parts = {"qweight": pack_codes(codes, weight.format.bits), "scale": scale, "minimum": minimum}
        parts = {part: t[self._rows[tensor.name]] for part, t in parts.items() if t is not None}
        return as_saved(name, weight, parts, model.get_parameter(name).dtype)
