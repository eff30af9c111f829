"""`WeightOnlyConfig`: what it refuses, its overrides and its round trip through JSON."""

import json

import pytest
import transformers.modeling_utils  # noqa: F401  (registers)
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_efficient import WeightOnlyConfig
from hf_efficient.configs import module_matches


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(bits=5), ["bits=5", "(2, 3, 4, 6, 8)"]),
        (dict(bits=True), ["bits=True"]),
        (dict(bits="4"), ["bits='4'"]),
        (dict(group_size=0), ["group_size=0", "multiple of 8"]),
        (dict(group_size=20), ["group_size=20"]),
        (dict(group_size=-2), ["group_size=-2"]),
        (dict(group_size=64.0), ["group_size=64.0"]),
        (dict(symmetric="yes"), ["symmetric='yes'"]),
        (dict(method="magic"), ["method='magic'", "rtn"]),
        (dict(method=None), ["method=None"]),
        (dict(codebook="nf5"), ["codebook='nf5'", "nf4"]),
        (dict(codebook="nf4", bits=3), ["bits=3", "4 for codebook='nf4'"]),
        (dict(codebook="kmeans", bits=8), ["bits=8", "kmeans"]),
        (dict(bits=2.5), ["bits=2.5", "(2, 3, 4, 6, 8)"]),
        (dict(bits=4.0), ["bits=4.0"]),
        (dict(codebook="trellis", bits=8), ["bits=8", "(1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)", "trellis"]),
        (dict(codebook="trellis", bits=True), ["bits=True"]),
        (dict(codebook="trellis", group_size=64), ["group_size=64", "-1 for codebook='trellis'"]),
        (dict(codebook="trellis", double_quantization=True), ["double_quantization=True", "trellis"]),
        (dict(codebook="trellis", scale_dtype="float32"), ["scale_dtype='float32'", "trellis"]),
        (dict(codebook="trellis", bits=3.33), ["bits=3.33", "with mixed_precision a number"]),
        (dict(codebook="trellis", bits=5.1, mixed_precision=True), ["bits=5.1", "trellis"]),
        (dict(codebook="nf4", mixed_precision=True), ["mixed_precision=True", "nf4"]),
        (dict(codebook="trellis", method="awq"), ["method='awq'", "trellis"]),
        (dict(method="billm"), ["bits=4", "(2,) for method='billm'"]),
        (dict(method="pb_llm", bits=True), ["bits=True", "(1,) for method='pb_llm'"]),
        (dict(method="pb_llm", bits=1, group_size=64), ["group_size=64", "-1 for method='pb_llm'"]),
        (dict(method="db_llm", bits=2, symmetric=False), ["symmetric=False", "True for method='db_llm'"]),
        (dict(method="slim_llm"), ["bits=4", "(2, 3) for method='slim_llm'"]),
        (dict(method="slim_llm", bits=3, group_size=-1), ["group_size=-1", "from 8 on for method='slim_llm'"]),
        (dict(method="pb_llm", bits=1, refine=True), ["refine=True", "False for method='pb_llm'"]),
        (dict(bits=1), ["bits=1", "(2, 3, 4, 6, 8)"]),
        (dict(double_quantization=True), ["double_quantization=True", "codebook"]),
        (dict(codebook="nf4", method="awq"), ["method='awq'", "nf4"]),
        (dict(method="kmeans"), ["method='kmeans'", "codebook=None: ['awq', ", "'yaqa']"]),
        (dict(method="hqq", symmetric=True), ["symmetric=True", "False for method='hqq'"]),
        (dict(rotate=1), ["rotate=1"]),
        (dict(calibration="text"), ["calibration='text'", "CalibrationConfig"]),
        (dict(version=2), ["version=2", "version 1"]),
        (dict(version=None), ["version=None"]),
        (dict(grup_size=64), ["'grup_size'", "group_size"]),
        (dict(modules_to_not_convert="lm_head"), ["modules_to_not_convert='lm_head'", "list"]),
        (dict(modules_to_not_convert=[""]), ["modules_to_not_convert"]),
        (dict(overrides=3), ["overrides=3"]),
        (dict(overrides={"a": 8}), ["overrides['a']=8"]),
        (dict(overrides={"a": {"bits": 7}}), ["overrides['a']", "bits=7"]),
        (dict(overrides={"a": {"dtype": 7}}), ["overrides['a']", "'dtype'", "group_size"]),
        (dict(quantize_lm_head=1), ["quantize_lm_head=1"]),
        (dict(dequantize="x"), ["dequantize='x'"]),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError) as error:
        WeightOnlyConfig(**arguments)
    for part in named:
        assert part in str(error.value)


def test_what_a_trellis_chooses():
    config = WeightOnlyConfig(codebook="trellis", bits=3)
    assert config.rotate and config.group_size == -1 and config.method == "rtn"
    assert WeightOnlyConfig(codebook="trellis", bits=3.0).format() == config.format()
    assert not WeightOnlyConfig(codebook="trellis", rotate=False).rotate and not WeightOnlyConfig().rotate
    assert WeightOnlyConfig(codebook="trellis", bits=3.33, mixed_precision=True).method == "gptq"
    some = WeightOnlyConfig(overrides={"a": {"codebook": "trellis", "bits": 2.5}}).for_module("a")
    assert (some.codebook, some.bits, some.rotate, some.group_size) == ("trellis", 2.5, True, -1)
    again = AutoQuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config


def test_group_sizes_that_are_allowed():
    for group_size in (8, 32, 64, 96, 128, 256, 1024, -1, None):
        assert WeightOnlyConfig(group_size=group_size).group_size == group_size


def test_json_round_trip_keeps_the_order_of_overrides():
    config = WeightOnlyConfig(
        bits=8,
        group_size=None,
        overrides={"z.*": {"bits": 4}, "a": None, "m": WeightOnlyConfig(bits=4, group_size=32)},
        modules_to_not_convert=["x"],
        dequantize=True,
    )
    config.tokenizer = object()  # T11: what is not an argument must not reach the JSON of save_pretrained
    text = config.to_json_string()
    back = AutoQuantizationConfig.from_dict(json.loads(text))
    assert type(back) is WeightOnlyConfig
    assert list(back.overrides.items()) == list(config.overrides.items()) and list(back.overrides)[0] == "z.*"
    assert (back.bits, back.group_size, back.modules_to_not_convert) == (8, None, ["x"])
    assert "tokenizer" not in text and back.dequantize is False
    assert back.to_dict() == config.to_dict()
    assert back != config and back == AutoQuantizationConfig.from_dict(json.loads(text)) != WeightOnlyConfig()


def test_overrides_first_match_counts_and_inherits():
    config = WeightOnlyConfig(
        bits=4, group_size=32, overrides={"down_proj": {"bits": 8}, "layers.1": None, "layers.*": {"group_size": -1}}
    )
    scheme = config.for_module("model.layers.1.mlp.down_proj").scheme()
    assert (scheme["bits"], scheme["group_size"], scheme["symmetric"], scheme["method"]) == (8, 32, False, "rtn")
    assert config.for_module("model.layers.1.mlp.up_proj") is None
    assert config.for_module("model.layers.10.mlp.up_proj").group_size == -1
    assert config.for_module("model.vision.up_proj") is config


@pytest.mark.parametrize(
    "pattern, name, expected",
    [
        ("k_proj", "model.layers.0.self_attn.k_proj", True),
        ("k_proj", "model.layers.0.self_attn.qk_proj", False),
        ("layers.1", "model.layers.1.mlp", True),
        ("layers.1", "model.layers.11.mlp", False),
        ("vision_tower", "model.vision_tower.encoder.fc1", True),  # T6: transformers' own matching misses this one
        ("model.layers.0", "model.layers.0.mlp.fc", True),
        ("*.mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("layers.*.mlp", "model.layers.7.mlp.fc", True),
        ("l?_head", "lm_head", True),
        ("head", "lm_head", False),
        ("mlp.gate", "model.mlp.gate_proj", False),
    ],
)
def test_patterns(pattern, name, expected):
    assert module_matches(pattern, name) is expected
