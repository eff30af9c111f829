"""What `estimate` takes, and what it refuses with which words."""

import json

import pytest
import torch
from recurrent_models import recurrent_model

import hf_efficient
from hf_efficient.evaluation.devices import Device


INT4 = hf_efficient.WeightOnlyConfig(bits=4, group_size=32)
LLAMA = dict(model_type="llama", vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=8)
LLAMA |= dict(intermediate_size=352, num_key_value_heads=2)
NO_MODULE = hf_efficient.WeightOnlyConfig(modules_to_not_convert=["nowhere"])


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ({**LLAMA, "model_type": "no_such"}, {}, "model_type='no_such' is not known to transformers"),
        ({**LLAMA, "model_type": "x", "auto_map": {"AutoConfig": "a.B"}}, {}, "its own code is not run"),
        ({"hidden_size": 8}, {}, "no model_type"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, {}, "no hidden_size: a LlamaConfig would take a def"),
        ({**LLAMA, "hidden_size": -128}, {}, "hidden_size=-128 must be a positive integer"),
        ({**LLAMA, "vocab_size": "many"}, {}, "vocab_size='many' must be a positive integer"),
        ({**LLAMA, "num_hidden_layers": 10**9}, {}, "num_hidden_layers=1000000000 is more than"),
        ({**LLAMA, "num_attention_heads": 7}, {}, "LlamaConfig"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "quantized with 'gptq'"),
        ("no/such/folder", {}, "no/such/folder: no file, no folder"),
        ("no/such.json", {}, "there is no such file"),
        (17, {}, "model=17"),
        (LLAMA, {"batch_size": 0}, "batch_size=0: must be a positive integer"),
        (LLAMA, {"batch_size": 2**31}, "batch_size=2147483648: must be a positive integer below 2**31"),
        (LLAMA, {"prompt_tokens": 1.5}, "prompt_tokens=1.5"),
        (LLAMA, {"new_tokens": True}, "new_tokens=True"),
        (LLAMA, {"kv_format": "int5"}, "kv_format='int5'"),
        (LLAMA, {"dtype": "int8"}, "dtype='int8'"),
        (LLAMA, {"device": "abacus"}, "device='abacus' is not known: it must be 'measured' or one of h100"),
        (LLAMA, {"price_per_hour": -1, "device": "h100"}, "price_per_hour=-1"),
        (LLAMA, {"price_per_hour": 1}, "price_per_hour=1: needs a device"),
        (LLAMA, {"memory": "lots", "device": "h100"}, "memory='lots'"),
        (LLAMA, {"quantization": "int4"}, "quantization=str"),
        (LLAMA, {"quantization": NO_MODULE}, "'nowhere' matches no"),
    ],
)
def test_bad_input_is_named(model, arguments, message):
    with pytest.raises(ValueError) as raised:
        hf_efficient.estimate(model, **arguments)
    assert message in str(raised.value)


def test_only_the_config_is_needed_in_whatever_form(llama, tmp_path):
    config = llama.config
    config.save_pretrained(tmp_path)
    before = config.to_dict()
    forms = (config, config.to_dict(), tmp_path, str(tmp_path), tmp_path / "config.json")
    first, *others = (hf_efficient.estimate(form, INT4) for form in forms)
    assert all(other == first for other in others)
    assert config.to_dict() == before, "the caller's config stays as it is"


@pytest.mark.parametrize("bits", [6, 8])
def test_without_a_device_sizes_are_of_this_machine(bits, llama):
    """They were those on disk, and 6 bits are 8 in memory."""
    config = hf_efficient.WeightOnlyConfig(bits=bits, group_size=32, method="rtn")
    kind = "accelerator" if torch.cuda.is_available() else "cpu"
    here = Device("here", kind, 10**9, 1e10, {"float32": 1e11}, "made up")
    found = hf_efficient.estimate(llama.config, config)
    assert found.weight_bytes == hf_efficient.estimate(llama.config, config, device=here).weight_bytes
    assert found.prefill_bound is None and (bits == 8 or found.weight_bytes > 1.05 * found.checkpoint_bytes)


def test_a_compressed_checkpoint_takes_no_second_config(llama):
    llama.config.quantization_config = INT4.to_dict()
    with pytest.raises(ValueError, match="compressed already"):
        hf_efficient.estimate(llama.config, hf_efficient.W8A8Config())


def test_numbers_that_json_lacks(tmp_path):
    config = recurrent_model("falcon_h1").config
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text(), "transformers' name of infinity"
    assert hf_efficient.estimate(tmp_path) == hf_efficient.estimate(config)
    broken = json.loads((tmp_path / "config.json").read_text()) | {"time_step_limit": [0.0, {"__float__": "many"}]}
    with pytest.raises(ValueError, match="the config: transformers does not take it as a FalconH1Config"):
        hf_efficient.estimate(broken)
