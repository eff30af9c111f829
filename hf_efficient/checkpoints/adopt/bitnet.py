"""Checkpoints of transformers' `BitNetQuantConfig`, read by `from_pretrained(..., quantization_config=BitNetConfig())`.

"bitlinear": `weight` uint8 [N / 4, K], four codes a byte, and `weight_scale`, one float that weights are divided by.
"autobitlinear": `weight` alike or as floats [N, K] of three values, and `weight_scale` that they are multiplied with;
in the mode "online" floats [N, K] alone, which every forward ternarises. With `use_rms_norm`, `rms_norm.weight` [K].
Without a config of ours such a checkpoint stays transformers' own.
"""

from hf_efficient.checkpoints.adopt.foreign import Foreign
from hf_efficient.checkpoints.adopt.schemes import not_compressed
from hf_efficient.checkpoints.headers import FLOATS
from hf_efficient.configs import BitNetConfig, module_matches
from hf_efficient.formats.ternary import canonical_of_bitnet
from hf_efficient.integrations.transformers_compat import quantized_linears


class BitNet(Foreign):
    """Reads ternary weights of transformers' `BitLinear` and `AutoBitLinear` as layers of a `BitNetConfig`."""

    parts = ("weight", "weight_scale")
    unchanged = ("rms_norm.weight",)
    config = "BitNetConfig"

    def __init__(self, saved: dict, given: BitNetConfig | None = None):
        """given: the caller's config, of which what the checkpoint leaves open is taken."""
        super().__init__(saved)
        self.ours = BitNetConfig.of_checkpoint(saved, given)
        self.source, self.ours.source = self.ours.source, None
        self.is_float = self.source["linear_class"] == "autobitlinear"
        self.is_online = self.is_float and self.source["quantization_mode"] == "online"

    def prepare(self, model):
        """The config says which modules are ternary: floats that are ternarised online look like others."""
        self.ternary = quantized_linears(model, self.saved.get("modules_to_not_convert"))
        self._check_head(model)
        self._check_patterns()

    def _check_head(self, model) -> None:
        head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
        is_ternary = head in self.ternary
        if self.ours.quantize_lm_head and not is_ternary:
            raise ValueError(
                "quantize_lm_head=True is not supported: the checkpoint keeps its output embedding as it is"
            )
        if is_ternary and f"{head}.weight" in model.all_tied_weights_keys:
            raise ValueError(
                f"the checkpoint holds {head} in ternary form, but its config ties it to the input embedding"
            )
        self.ours.quantize_lm_head = is_ternary

    def _check_patterns(self) -> None:
        """Raises ValueError where the caller's config asks for what the checkpoint has settled."""
        given = self.saved.get("modules_to_not_convert") or ()
        for pattern in self.ours.modules_to_not_convert or ():
            hit = sorted(name for name in self.ternary if module_matches(pattern, name))
            if hit and pattern not in given:
                raise ValueError(
                    f"modules_to_not_convert: {pattern!r} names {hit[0]}, which the checkpoint holds in ternary form"
                )
        for pattern in self.ours.overrides:
            if not any(module_matches(pattern, name) for name in self.ternary):
                raise ValueError(f"overrides: {pattern!r} matches no module that the checkpoint holds in ternary form")
        for name in sorted(self.ternary):
            own = self.ours.for_module(name)
            if own is None or own.per_channel:
                asked = "left as it is" if own is None else "ternary with one scale a row"
                raise ValueError(
                    f"overrides: {name} is to be {asked}, but the checkpoint holds it in ternary form with one scale"
                )

    def holds(self, stored):
        return stored.name in self.ternary

    def scheme(self, stored, out_features, in_features, dtype):
        place = stored.places.get("weight")
        if self.is_online or (self.is_float and place is not None and place.dtype != "U8"):
            stored.expect("weight", FLOATS, (out_features, in_features))
        else:
            rows = out_features // 4 if out_features % 4 == 0 else -1  # -1: no tensor has so many
            stored.expect("weight", ["U8"], (rows, in_features))
        if not self.is_online:
            stored.expect_one("weight_scale", FLOATS)
        elif "weight_scale" in stored:
            raise ValueError(f"{stored.places['weight_scale'].key} is there, but the weights are ternarised online")
        if self.source["use_rms_norm"]:
            stored.expect("rms_norm.weight", FLOATS, (in_features,))
        elif "rms_norm.weight" in stored:
            raise ValueError(f"{stored.places['rms_norm.weight'].key} is there, but use_rms_norm is false")
        return self.ours.for_module(stored.name).scheme()

    def config_of(self, model, schemes):
        unused = [
            pattern
            for pattern in self.ours.modules_to_not_convert or ()
            if not any(module_matches(pattern, name) for name in self.ternary)
        ]
        self.ours.modules_to_not_convert = unused + not_compressed(model, self.ternary, unused) or None
        return self.ours

    def convert(self, tensors, out_features, in_features, format, dtype):
        # as transformers, which rounds floats to the dtype of the model before it computes with them
        tensors = {part: t.to(dtype) if t.is_floating_point() else t for part, t in tensors.items()}
        scale = tensors.get("weight_scale")
        if not all(tensor.isfinite().all() for tensor in tensors.values()) or (scale is not None and not scale.all()):
            raise ValueError("NaN or infinity in the weight, or a weight_scale of 0")
        return canonical_of_bitnet(
            tensors["weight"], scale, out_features=out_features, linear_class=self.source["linear_class"], format=format
        )
