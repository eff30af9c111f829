"""LayerPrefetch: layers on the disk are read while the one before computes, and the bits stay."""

import threading

import pytest
import torch
from helpers import tiny_model
from transformers import AutoModelForCausalLM

from hf_efficient import LayerPrefetch, PagedCache, W8A8Config, WeightOnlyConfig


CONFIGS = {"dense": None, "int4": WeightOnlyConfig(bits=4, group_size=32), "w8a8": W8A8Config()}
IDS = torch.arange(3, 15).view(1, -1)
ON_DISK = {"model.layers.0": "cpu", **{f"model.layers.{i}": "disk" for i in (1, 2, 3)}}
PLACES = {**ON_DISK, "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models of four layers by name."""
    made = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    tiny_model("llama", num_hidden_layers=4).save_pretrained(made["dense"])
    for name in ("int4", "w8a8"):
        model = AutoModelForCausalLM.from_pretrained(made["dense"], quantization_config=CONFIGS[name])
        model.save_pretrained(made[name])
    return made


def load(folder, tmp_path, **places):
    places = {**PLACES, **places}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=str(tmp_path / "offload"))


def tokens(model, **options):
    model.generation_config.pad_token_id = 0
    return model.generate(IDS, max_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits(name, folders, tmp_path):
    model = load(folders[name], tmp_path)
    with torch.no_grad():
        expected, written = model(IDS).logits, tokens(model)
        prefetch = LayerPrefetch()
        prefetch.attach(model)
        for _ in range(2):
            assert torch.equal(model(IDS).logits, expected)
    ahead = prefetch.stats()
    assert torch.equal(tokens(model), written)
    if name == "dense":
        cache = PagedCache(model.config)
        assert torch.equal(tokens(model, past_key_values=cache), written)
    per_layer = ahead["bytes_waited"]  # the first layer of the first forward
    assert ahead["layers"] == 3 and per_layer > 0 and ahead["bytes_ahead"] == 5 * per_layer
    assert prefetch.stats()["bytes_waited"] == per_layer
    prefetch.detach()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("layers")]


def test_a_layer_is_read_before_the_one_in_front_ends(folders, tmp_path):
    """The MLP of a layer waits until the weights of the next layer are in memory: it would wait for ever otherwise."""
    model, prefetch, waited = load(folders["dense"], tmp_path), LayerPrefetch(), []
    prefetch.attach(model)

    def wait(following):
        def hook(*_):
            waited.append(len(following.is_read.result(timeout=60)))

        return hook

    for layer, following in zip(prefetch._layers, prefetch._layers[1:]):
        layer.module.mlp.register_forward_pre_hook(wait(following))
    with torch.no_grad():
        model(IDS)
    assert waited == [9, 9]  # seven linears and two norms


def test_reading_that_fails(folders, tmp_path, monkeypatch):
    model, prefetch = load(folders["dense"], tmp_path), LayerPrefetch()
    prefetch.attach(model)
    monkeypatch.setattr(type(prefetch._layers[1]), "read", lambda self: open(tmp_path / "none"))
    with torch.no_grad(), pytest.raises(FileNotFoundError):
        model(IDS)


def test_what_is_refused(folders, tmp_path):
    prefetch = LayerPrefetch()
    with pytest.raises(ValueError, match="LlamaForCausalLM has no decoder layer on the disk"):
        prefetch.attach(tiny_model("llama"))
    prefetch.attach(load(folders["dense"], tmp_path))
    with pytest.raises(ValueError, match="serves a model already"):
        prefetch.attach(tiny_model("llama"))


def test_one_layer_on_the_disk(folders, tmp_path):
    model = load(folders["dense"], tmp_path, **{"model.layers.1": "cpu", "model.layers.2": "cpu"})
    prefetch = LayerPrefetch()
    with torch.no_grad():
        expected = model(IDS).logits
        prefetch.attach(model)
        for _ in range(3):
            assert torch.equal(model(IDS).logits, expected)
    stats = prefetch.stats()
    assert stats["layers"] == 1 and stats["bytes_ahead"] == 2 * stats["bytes_waited"] > 0
