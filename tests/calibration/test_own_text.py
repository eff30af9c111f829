"""Calibration without data: random tokens, and text that the model writes."""

import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_efficient import CalibrationConfig, WeightOnlyConfig
from hf_efficient.calibration import own_text
from hf_efficient.calibration.loading import can_run
from hf_efficient.layers import EfficientLinear


def asked(kind, **more):
    return CalibrationConfig(**{"own_text": kind, "num_samples": 3, "sequence_length": 16, **more})


@pytest.mark.parametrize("kind", ["random", "sampled"])
def test_tokens_are_of_the_vocabulary_and_follow_from_the_seed(kind, endless_llama):
    one, again, other = (own_text.own_tokens(endless_llama, asked(kind, seed=seed)) for seed in (0, 0, 1))
    assert one.shape == (3, 16) and one.dtype is torch.int64
    assert 0 <= one.min() and one.max() < endless_llama.config.vocab_size
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_windows_are_no_longer_than_the_model_has_positions(endless_llama):
    endless_llama.config.max_position_embeddings = 8
    assert own_text.own_tokens(endless_llama, asked("random")).shape == (3, 8)


def test_text_begins_with_the_token_that_begins_text(endless_llama):
    endless_llama.config.bos_token_id = 7
    assert (own_text.own_tokens(endless_llama, asked("sampled"))[:, 0] == 7).all()
    endless_llama.config.bos_token_id = 10**6  # as in configs that were written for another tokenizer
    first = own_text.own_tokens(endless_llama, asked("sampled"))[:, 0]
    assert first.max() < endless_llama.config.vocab_size


def test_windows_that_repeat_others_are_left_out(endless_llama, monkeypatch):
    fresh = iter(torch.arange(12 * 16).view(12, 16))
    stale = torch.zeros(16, dtype=torch.int64)
    monkeypatch.setattr(own_text, "_sample", lambda model, first, length: torch.stack(_take(fresh, stale, len(first))))
    rows = own_text.own_tokens(endless_llama, asked("sampled"))
    assert rows.shape == (3, 16) and len({tuple(row.tolist()) for row in rows}) == 3
    assert not any(torch.equal(row, stale) for row in rows)


def _take(fresh, stale, count):
    """Of all windows, the third is stale."""
    return [stale if index == 2 else next(fresh) for index in range(count)]


@pytest.mark.parametrize("most", [2, 0])
def test_fewer_windows_are_written_at_once_where_memory_holds_no_more(most, endless_llama, monkeypatch):
    counts, sample = [], own_text._sample

    def small(model, first, length):
        counts.append(len(first))
        if len(first) > most:
            raise torch.OutOfMemoryError
        return sample(model, first, length)

    monkeypatch.setattr(own_text, "_sample", small)
    if most == 0:
        with pytest.raises(torch.OutOfMemoryError):
            own_text.own_tokens(endless_llama, asked("sampled"))
    else:
        assert own_text.own_tokens(endless_llama, asked("sampled")).shape == (3, 16)
    assert counts == ([3, 1, 1, 1] if most else [3, 1])


def test_a_few_more_windows_are_written_than_are_missing(endless_llama, monkeypatch):
    """One is stale: without the others its place would take a round of its own."""
    counts, fresh = [], iter(torch.arange(80 * 16).view(80, 16))
    stale = torch.zeros(16, dtype=torch.int64)

    def written(model, first, length):
        counts.append(len(first))
        return torch.stack(_take(fresh, stale, len(first)))

    monkeypatch.setattr(own_text, "_sample", written)
    monkeypatch.setattr(own_text, "_ROWS", 64)
    assert own_text.own_tokens(endless_llama, asked("sampled", num_samples=64)).shape == (64, 16)
    assert counts == [66]


def test_a_model_that_only_repeats_itself_is_refused(endless_llama, monkeypatch):
    repeated = torch.zeros(3, 32, dtype=torch.int64)
    monkeypatch.setattr(own_text, "_sample", lambda model, first, length: repeated[: len(first)])
    with pytest.raises(ValueError, match="repeats itself"):
        own_text.own_tokens(endless_llama, asked("sampled", sequence_length=32))


def test_the_state_of_random_numbers_and_training_stays(endless_llama):
    endless_llama.train()
    before = torch.get_rng_state()
    own_text.own_tokens(endless_llama, asked("sampled"))
    assert torch.equal(torch.get_rng_state(), before) and endless_llama.training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", eos_token_id=None).save_pretrained(path)
    return path


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=WeightOnlyConfig(**options))


def test_the_default_weighs_errors_by_the_models_own_inputs(folder):
    model = load(folder)
    config = model.config.quantization_config
    assert (config.method, config.calibration.own_text) == ("mse", "random")
    assert any(isinstance(module, EfficientLinear) for module in model.modules())
    unweighted = load(folder, method="mse")
    assert any(
        not torch.equal(mine.canonical()["scale"], other.canonical()["scale"])
        for mine, other in zip(model.modules(), unweighted.modules())
        if isinstance(mine, EfficientLinear)
    )


@pytest.mark.parametrize("more", [{"quality": "balanced"}, {"method": "awq"}])
def test_methods_that_need_text_take_the_models_own(folder, more):
    calibration = CalibrationConfig(num_samples=2, sequence_length=16)
    model = load(folder, calibration=calibration, **more)
    assert model.config.quantization_config.calibration.own_text == "sampled"
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2).shape == (1, 4)


def test_blocks_are_refined_under_the_attention_that_the_model_is_loaded_with(folder):
    """The codes that gradients through flash_paged choose are the ones of transformers' attention, up to ties."""
    config = WeightOnlyConfig(bits=2, group_size=16, method="gptq", refine=True, calibration=asked("random"))
    codes = {}
    for name in ("sdpa", "flash_paged"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, quantization_config=config)
        codes[name] = torch.cat([x.flatten() for _, x in model.state_dict().items() if x.dtype == torch.uint8])
    assert len(codes["sdpa"]) > 1000 and (codes["sdpa"] == codes["flash_paged"]).float().mean() > 0.99


def test_a_saved_default_is_loaded_as_it_is(folder, tmp_path):
    model = load(folder)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=WeightOnlyConfig())  # what it was made with


def test_a_checkpoint_that_lacks_a_weight_is_refused(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    missing = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != missing}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=f"no weights for 1 of the .*{missing}"):
        load(tmp_path)


def test_a_model_that_goes_to_disk_is_not_run(folder):
    assert not can_run(AutoModelForCausalLM.from_pretrained(folder), {"": "disk"})


def test_fewer_windows_than_asked_for_are_warned_of(endless_llama, monkeypatch):
    first = torch.arange(32)
    monkeypatch.setattr(own_text, "_sample", lambda model, begin, length: first.expand(len(begin), -1))
    warned = []
    monkeypatch.setattr(own_text.logger, "warning", warned.append)
    assert own_text.own_tokens(endless_llama, asked("sampled", sequence_length=32)).shape == (1, 32)
    assert "only 1 of 3 windows" in warned[0]


@pytest.mark.parametrize("kind", ["mixtral", "bert"])
def test_what_the_default_is_elsewhere(kind, tmp_path):
    if kind == "bert":
        from transformers import BertConfig, BertModel

        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
        BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
        model = BertModel.from_pretrained(tmp_path, quantization_config=WeightOnlyConfig(group_size=32))
        assert model.config.quantization_config.method == "hqq"
        with pytest.raises(ValueError, match="BertModel writes no text"):
            BertModel.from_pretrained(tmp_path, quantization_config=WeightOnlyConfig(method="gptq"))
    else:
        tiny_model(kind).save_pretrained(tmp_path)
        config = load(tmp_path).config.quantization_config
        assert (config.method, config.zero_point, config.calibration) == ("hqq", "float", None)


def test_a_model_that_does_not_fit_is_quantized_weight_by_weight(folder, monkeypatch):
    monkeypatch.setattr(own_text, "free_memory", lambda device: 1000)
    assert load(folder).config.quantization_config.method == "hqq"
