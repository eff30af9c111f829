"""A compressed model is tuned as a whole on what the original one predicts, for a stated time."""

import sys

import pytest
import torch
from helpers import tiny_model
from sample_blocks import state_of
from test_calibration_blocks import make

from hf_efficient import CalibrationConfig, SparseConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.calibration import end_to_end
from hf_efficient.calibration.residence import InMemory
from hf_efficient.calibration.run import calibrate
from hf_efficient.calibration.steps import refinement, transforms
from hf_efficient.evaluation.perplexity import kl_divergence
from hf_efficient.layers import EfficientLinear


TOKENS = torch.randint(3, 128, (32, 24), generator=torch.Generator().manual_seed(0))
SCHEMES = {
    "int2": dict(bits=2, group_size=16, method="gptq"),
    "int3 symmetric": dict(bits=3, group_size=16, symmetric=True, method="rtn"),
    "int4": dict(bits=4, group_size=16, method="gptq"),
    "float zero points": dict(bits=3, group_size=16, method="hqq", zero_point="float"),
    "trellis": dict(bits=2, group_size=-1, codebook="trellis", method="gptq"),
    "rotated": dict(bits=2, group_size=16, rotate=True, method="gptq"),
}


def compressed(scheme: dict, dtype=torch.float32, layers=1, **calibration):
    """(the original model, the model with its linears compressed by `scheme`, what `calibrate` returns)."""
    original, model = (tiny_model("llama", dtype, num_hidden_layers=layers) for _ in range(2))
    config = WeightOnlyConfig(
        **scheme, refine=True, calibration=CalibrationConfig(tokens=TOKENS, batch_size=4, **calibration)
    )
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    configs = dict.fromkeys(names, config)
    decided = calibrate(model, configs, config.calibration, None, transforms(configs), refinement(configs))
    return original, model, decided


def divergence(original, model, tokens=TOKENS) -> float:
    return sum(kl_divergence(original, model, window) for window in tokens)


@pytest.fixture
def steps(monkeypatch):
    """Training ends after `MOST_EPOCHS` passes, whatever the machine's speed, and norms move further."""
    monkeypatch.setattr(end_to_end, "VECTOR_RATE", 1e-3)
    monkeypatch.setattr(end_to_end, "MOST_EPOCHS", 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_model_predicts_more_as_the_original_does(scheme, steps):
    """With the formats, shapes and dtypes of before."""
    layers = 2 if scheme == "int2" else 1
    original, blockwise, decided = compressed(SCHEMES[scheme], layers=layers)
    _, model, tuned = compressed(SCHEMES[scheme], layers=layers, minutes=5)
    assert divergence(original, model) < 0.995 * divergence(original, blockwise)
    assert tuned == decided and stored(model) == stored(blockwise)
    after = model.state_dict()
    for name, tensor in blockwise.state_dict().items():
        if name.endswith("zero_point"):  # integers stay
            assert torch.equal(after[name], tensor) is not tensor.is_floating_point(), name
    assert not torch.equal(model.model.norm.weight, original.model.norm.weight)
    vectors = [model.model.norm.weight, model.model.layers[0].input_layernorm.weight]
    assert all(vector.requires_grad and vector.grad is None for vector in vectors)


def stored(model) -> dict:
    """Name -> shape and dtype of a tensor, and the format of a layer."""
    tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    return tensors | {n: m.format for n, m in model.named_modules() if isinstance(m, EfficientLinear)}


@pytest.mark.parametrize("refined", ["model", "down_proj"])
def test_an_override_need_not_refine_in_a_config_with_minutes(refined):
    calibration, overrides = CalibrationConfig(tokens=TOKENS, minutes=5), {"*down_proj": {"refine": refined != "model"}}
    config = WeightOnlyConfig(method="gptq", refine=refined == "model", overrides=overrides, calibration=calibration)
    own = config.for_module("layers.0.mlp.down_proj")
    assert own.refine == (refined != "model") and own.calibration is config.calibration and own.needs_calibration()
    with pytest.raises(ValueError, match="minutes=5.*None where nothing has refine=True"):
        WeightOnlyConfig(method="gptq", overrides={"*down_proj": {"refine": False}}, calibration=calibration)


def test_in_bfloat16_norms_are_stored_rounded(steps):
    original, blockwise, _ = compressed(SCHEMES["int2"], dtype=torch.bfloat16)
    _, model, _ = compressed(SCHEMES["int2"], dtype=torch.bfloat16, minutes=5)
    assert divergence(original, model) < divergence(original, blockwise)
    assert stored(model) == stored(blockwise)


def test_a_training_that_finds_nothing_leaves_the_model_as_its_blocks_were_made(steps, monkeypatch, caplog):
    _, blockwise, decided = compressed(SCHEMES["int4"])
    for name in ("RATE", "VECTOR_RATE"):
        monkeypatch.setattr(end_to_end, name, 100.0)
    _, model, tuned = compressed(SCHEMES["int4"], minutes=5)
    assert tuned == decided and "found nothing better" in caplog.text
    expected = state_of(blockwise)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(model).items())


def test_the_teacher_gives_the_logits_of_the_original_model():
    """Also where the model changes what its output embedding gives (Gemma 2 caps it), and where that is compressed."""
    from hf_efficient.calibration.model_chains import BlockwiseModel

    model, original = tiny_model("gemma2"), tiny_model("gemma2")
    batches = [dict(input_ids=batch) for batch in TOKENS[:4].split(2)]
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    followed = BlockwiseModel(model, batches, [name for name in names if name != "lm_head"])
    (chain,) = followed.chains
    outputs = followed.record(chain)
    with torch.no_grad():
        for index in range(len(chain.modules)):
            outputs = chain.advance_all(index, outputs)
    chain.outputs = [states + 1 for states in outputs]
    teacher = end_to_end.Teacher(followed, head, outputs)
    model.set_output_embeddings(torch.nn.Linear(64, 128))
    with torch.no_grad():
        model.model.norm.weight += 1
        for number, batch in enumerate(batches):
            torch.testing.assert_close(teacher.logits(number), original(**batch).logits)


class _Interrupted(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("scheme", ["int2", "trellis"])
def test_an_interrupted_training_resumes_to_the_same_bits(scheme, steps, monkeypatch, tmp_path):
    monkeypatch.setattr(end_to_end, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(end_to_end.time, "perf_counter", lambda: 0.0)  # rates follow the steps alone
    _, uninterrupted, _ = compressed(SCHEMES[scheme], minutes=5)
    step = end_to_end.EndToEnd._step

    def interrupted(self, share):
        if self.steps == 6:
            raise _Interrupted
        return step(self, share)

    folder = tmp_path / "progress"
    with monkeypatch.context() as patch:
        patch.setattr(end_to_end.EndToEnd, "_step", interrupted)
        with pytest.raises(_Interrupted):
            compressed(SCHEMES[scheme], minutes=5, checkpoint_dir=folder)
    made = []
    monkeypatch.setattr(end_to_end.EndToEnd, "_step", lambda self, share: made.append(0) or step(self, share))
    _, model, _ = compressed(SCHEMES[scheme], minutes=5, checkpoint_dir=folder)
    assert len(made) == 2 * 7 - 6 and not folder.exists()
    expected = state_of(uninterrupted)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(model).items())


def test_ctrl_c_leaves_norms_as_they_were(steps, monkeypatch):
    def step(self, share):
        self.vectors.exact[0].data += 1
        self.vectors.write()
        raise KeyboardInterrupt

    monkeypatch.setattr(end_to_end.EndToEnd, "_step", step)
    model = tiny_model("llama")
    before = [parameter.clone() for parameter in model.parameters() if parameter.ndim == 1]
    monkeypatch.setattr(sys.modules[__name__], "tiny_model", lambda *args, **sizes: model)
    with pytest.raises(KeyboardInterrupt):
        compressed(SCHEMES["int4"], minutes=5)
    vectors = [norm for norm in model.parameters() if norm.ndim == 1 and len(norm) == 64]
    assert all(torch.equal(own, kept) for own, kept in zip(vectors, before))


def test_time_ends_it(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(end_to_end.time, "perf_counter", lambda: float(next(now)))
    made, step = [], end_to_end.EndToEnd._step
    monkeypatch.setattr(end_to_end.EndToEnd, "_step", lambda self, share: made.append(share) or step(self, share))
    compressed(SCHEMES["int4"], minutes=0.25)
    assert 5 < len(made) < 15 and made == sorted(made)


def test_models_with_two_chains_are_named(caplog):
    model, batches = make("t5")
    calibration = CalibrationConfig(inputs=batches, minutes=1)
    config = WeightOnlyConfig(bits=4, group_size=16, method="rtn", refine=True, calibration=calibration)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    calibrate(model, dict.fromkeys(names, config), calibration, None, refine=refinement({"": config}))
    assert "is not tuned as a whole, because its layers make 2 chains" in caplog.text


def test_from_disk_to_disk_it_is_refused():
    model = tiny_model("llama")
    residence = InMemory(model)
    residence.recomputes = False
    config = WeightOnlyConfig(refine=True, method="gptq", calibration=CalibrationConfig(tokens=TOKENS, minutes=1))
    with pytest.raises(ValueError, match="minutes=1 is not supported where a model is compressed"):
        calibrate(model, {}, config.calibration, None, residence=residence)


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: CalibrationConfig(minutes=0), ["minutes=0", "above 0"]),
        (lambda: CalibrationConfig(minutes=float("inf")), ["minutes=inf"]),
        (lambda: CalibrationConfig(minutes="ten"), ["minutes='ten'"]),
        (lambda: WeightOnlyConfig(method="gptq", calibration={"minutes": 1}), ["minutes=1", "refine=True"]),
        (lambda: WeightOnlyConfig(quality="fast", calibration={"minutes": 1}), ["minutes=1", "refine=True"]),
        (lambda: SparseConfig(0.5, refine=True, calibration={"minutes": 1}), ["minutes=1", "SparseConfig"]),
        (lambda: W8A8Config(calibration={"minutes": 1}), ["minutes=1", "W8A8Config"]),
    ],
)
def test_where_it_is_not_served(make, named):
    with pytest.raises(ValueError) as error:
        make()
    assert all(part in str(error.value) for part in named)


def test_it_is_part_of_the_description_of_a_text_only_where_it_is_asked_for():
    assert "minutes" not in CalibrationConfig().to_dict()
    config = WeightOnlyConfig(method="gptq", refine=True, calibration={"minutes": 2})
    assert WeightOnlyConfig(**config.to_dict()).calibration.minutes == 2
    assert WeightOnlyConfig(calibration={"minutes": 2}).refine  # "balanced" where a text is given
