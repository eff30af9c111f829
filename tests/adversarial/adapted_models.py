"""Compressed models with adapters from PEFT, for the tests of both."""

import copy
import functools
import tempfile
from pathlib import Path

import foreign_layouts
import pytest
import torch
from helpers import tiny_model
from saved_models import folder
from table import METHODS
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import hf_efficient


peft = pytest.importorskip("peft")

hf_efficient.register()
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
ALL = "all-linear"
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],  # attn.c_proj is square
    "mixtral": ["q_proj", "o_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
}
# name -> config class of PEFT and arguments
ADAPTERS = {
    "lora": ("LoraConfig", dict(r=4)),
    "lora bias": ("LoraConfig", dict(r=4, bias="all")),
    "dora": ("LoraConfig", dict(r=4, use_dora=True)),
    "rslora": ("LoraConfig", dict(r=4, use_rslora=True, init_lora_weights="gaussian")),
    "mica": ("LoraConfig", dict(r=4, init_lora_weights="mica")),
    "adalora": ("AdaLoraConfig", dict(init_r=4, total_step=10)),
    "loha": ("LoHaConfig", dict(r=4)),
    "lokr": ("LoKrConfig", dict(r=4)),
    "ia3": ("IA3Config", dict(feedforward_modules=[])),
    "vera": ("VeraConfig", dict(r=4)),
    "oft": ("OFTConfig", dict(oft_block_size=16)),
    "boft": ("BOFTConfig", dict(boft_block_size=4)),
    "hra": ("HRAConfig", dict(r=4)),
    "miss": ("MissConfig", dict(r=4)),
    "delora": ("DeloraConfig", dict(r=4)),
    "frod": ("FrodConfig", dict()),
    "shira": ("ShiraConfig", dict(r=4)),
    "randlora": ("RandLoraConfig", dict(r=4)),
}
FORMATS = {
    "int4": dict(METHODS["rtn_2"], bits=4),
    "int8 channel": dict(METHODS["rtn_2"], bits=8, group_size=-1),
    "nf4 double": METHODS["nf4_double"],
    "w8a8": METHODS["w8a8"],
    "fp8": METHODS["fp8"],
    "ternary": METHODS["bitnet"],
    "2:4": METHODS["magnitude_2:4"],
    "2:4 int4": dict(METHODS["magnitude_2:4"], weights={"bits": 4, "group_size": 32}),
}
ADOPTED = {"gptq": "gptq", "awq": "awq", "bitsandbytes": "bitsandbytes_4bit"}
IGNORED = ("ignore::UserWarning", "ignore::FutureWarning")  # PEFT's, about its own configs
_SCRATCH = tempfile.TemporaryDirectory()
_LOADED = {}


@functools.cache
def _foreign_folder(name, layout) -> Path:
    """Where a tiny model in the foreign `layout` lies."""
    path = Path(_SCRATCH.name) / f"{name}-{layout}"
    foreign_layouts.write(path, tiny_model(name), getattr(foreign_layouts, layout), torch.float16)
    return path


def _load(name, format, more):
    if format in ADOPTED:
        return AutoModelForCausalLM.from_pretrained(_foreign_folder(name, ADOPTED[format]), dtype=torch.float32).eval()
    arguments = {**FORMATS[format], **more}
    config = AUTO_QUANTIZATION_CONFIG_MAPPING[arguments.pop("quant_method")](**arguments)
    return AutoModelForCausalLM.from_pretrained(folder(name), quantization_config=config, dtype=torch.float32).eval()


def load(name, format="int4", **more):
    """A compressed tiny model in float32, the test's own. more: arguments of its config."""
    key = name, format, str(more)
    if key not in _LOADED:
        _LOADED[key] = _load(name, format, more)
    return copy.deepcopy(_LOADED[key])


def config_of(adapter, targets, **more):
    kind, arguments = ADAPTERS[adapter]
    return getattr(peft, kind)(target_modules=targets, task_type="CAUSAL_LM", **{**arguments, **more})


def adapted(model, config):
    """`model` with an adapter, and numbers in it that depend on nothing but its names."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(2)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits
