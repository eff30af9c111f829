"""Published draft heads on disk: shards, and what is refused by name."""

import functools
import json

import pytest
import torch
from helpers import tiny_model
from hub_directory import serving
from huggingface_hub import hf_hub_download
from published_heads import dflash, dflash_of_speculators, eagle, eagle3, hydra
from safetensors.torch import load_file, save_file

from hf_efficient import DraftHeads, EagleHead


def change(folder, tensors=None, **config):
    """Changes entries; those that are None are removed."""
    path, (weights,) = folder / "config.json", folder.glob("*.safetensors")
    for old, new, save in (
        (json.loads(path.read_text()), config, lambda new: path.write_text(json.dumps(new))),
        (load_file(weights), tensors or {}, lambda new: save_file(new, weights)),
    ):
        save({key: value for key, value in {**old, **new}.items() if value is not None})


ONES = torch.ones(64, 128)
flash = functools.partial(dflash, layers=[0], block=4)
flash_too = functools.partial(dflash_of_speculators, draft=40, layers=[0], block=4)


@pytest.mark.parametrize(
    ("kind", "tensors", "config", "message"),
    [
        (eagle, {"fc.weight": None}, {}, "the tensor 'fc.weight' is missing"),
        (eagle, {"fc.weight": torch.ones(64, 9)}, {}, r"'fc.weight' has shape \[64, 9\], .* say \[64, 128\]"),
        (eagle, {"fc.weight": ONES.to(torch.float8_e4m3fn)}, {}, "is torch.float8_e4m3fn: float16, bfloat16"),
        (eagle, {"layers.0.input_layernorm.weight": ONES[0, :64]}, {}, "no meaning in this layout: layers.0.input_lay"),
        (eagle, {"layers.0.self_attn.k_proj.bias": ONES[0, :32]}, {}, "some biases of .*; all or none are allowed"),
        (eagle, {"layers.0.self_attn.q_proj.weight": None}, {}, "none of the tensors midlayer.self_attn.q_proj"),
        (eagle, {}, {"num_hidden_layers": 2}, "num_hidden_layers=2; heads of 1 layer are read"),
        (eagle, {}, {"hidden_size": None}, "hidden_size=None must be an integer from 1"),
        (eagle, {}, {"vocab_size": 10**9}, "vocab_size=1000000000 must be an integer from 1 to 16777216"),
        (eagle, {}, {"rope_scaling": {"rope_type": "linear"}}, "none of a layer of llama: .*'factor'"),
        (eagle3, {}, {"eagle_config": [1]}, r"eagle_config=\[1\] must be an object"),
        (flash, {}, {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 128}}, "=128 must be .* 0 to 127"),
        (eagle, {}, {"hidden_act": "gelu"}, "hidden_act='gelu'; 'silu' is allowed"),
        (eagle, {}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'; one of"),
        (hydra, {}, {"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch='prefix-mlp'; 'mlp' is allowed"),
        (hydra, {}, {"grounded_heads": None}, "grounded_heads=None; True is allowed"),
        (hydra, {"hydra_mlp.1.0.linear.bias": None}, {}, "the tensor 'hydra_mlp.1.0.linear.bias' is missing"),
        (flash, {}, {"dflash_config": {"markov_rank": 4}}, "markov_rank.* must be an object of block_size, mask"),
        (flash, {}, {"layer_types": ["chunked_attention"] * 2}, "must say full_attention or sliding_attention"),
        (flash, {}, {"layer_types": ["sliding_attention"] * 2}, "sliding_window=None must be an integer from 1"),
        (flash_too, {}, {"sample_from_anchor": True}, r"sample_from_anchor=True; one of \[False\] is allowed"),
        (flash_too, {}, {"aux_hidden_state_layer_ids": [0]}, "must be a list of integers of at least 1"),
        (flash_too, {"d2t": None}, {}, "draft_vocab_size=40 of vocab_size=128 needs the tensor 'd2t'"),
        (flash, {}, {"block_size": 1}, "block_size=1 must be an integer from 2 to 64"),
        (flash, {"layers.1.self_attn.g_proj.weight": ONES}, {}, "no meaning in this layout: layers.1.self_attn.g"),
        (eagle, {}, {"speculators_model_type": "dspark"}, "_type='dspark'; .* 'eagle3' and 'dflash' are"),
        (eagle3, {"d2t": None}, {}, "draft_vocab_size=50 of vocab_size=128 needs the tensor 'd2t'"),
        (eagle3, {"d2t": torch.arange(50) * 3}, {}, "different tokens from 0 to 127"),
        (eagle3, {"t2d": torch.ones(128).bool()}, {}, "t2d and d2t name different tokens"),
        (eagle3, {}, {"norm_output": True}, "norm_output=true means different things"),
        (eagle3, {}, {"norm_before_residual": 1}, "norm_before_residual=1; true or false is allowed"),
        (eagle3, {}, {"fc_norm": True}, "the tensor 'fc_norm.0.weight' is missing"),
        (eagle3, {}, {"eagle_config": {"use_aux_hidden_state": False}}, "_state=False .* True is allowed"),
        (eagle3, {}, {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "must be a list of integers of at least 1"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(kind, tensors, config, message, tmp_path):
    kind(tmp_path, 64, 128, *[50] * (kind is eagle3))
    change(tmp_path, tensors, **config)
    with pytest.raises(ValueError, match=message):
        DraftHeads.from_pretrained(tmp_path)


def test_weights_may_come_in_shards(tmp_path):
    eagle3(tmp_path, 64, 128, 50)
    whole = DraftHeads.from_pretrained(tmp_path)
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    tensors = load_file(path)
    path.unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, tmp_path / shard)
    index.write_text(json.dumps({"weight_map": places}))
    state = DraftHeads.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.state_dict().items()) and len(state) > 9
    for weights in ({"fc.weight": "../model.safetensors"}, {"fc.weight": "model.bin"}, ["model.safetensors"], None):
        index.write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(ValueError, match="weight_map must name safetensors files beside it|is no index"):
            DraftHeads.from_pretrained(tmp_path)


def test_files_that_are_not_downloaded_yet_are_no_files_to_convert(tmp_path, monkeypatch):
    """Offline with the config of a repository alone; gated weights."""
    eagle3(tmp_path / "repos" / "me" / "heads", 64, 128, 50)
    with serving(tmp_path / "repos", monkeypatch) as hub:
        hf_hub_download("me/heads", "config.json")
        with pytest.raises(OSError, match="couldn't find them in the cached files"):
            DraftHeads.from_pretrained("me/heads", local_files_only=True)
        hub.token = "hf_mine"
        with pytest.raises(OSError, match="trying to access a gated repo"):
            DraftHeads.from_pretrained("me/heads")
        DraftHeads.from_pretrained("me/heads", token="hf_mine")
        asked = len(hub.requests)
        DraftHeads.from_pretrained("me/heads", local_files_only=True)
        assert len(hub.requests) == asked


def test_other_files_classes_and_targets_are_refused_by_name(tmp_path, monkeypatch):
    target = tiny_model("llama", num_hidden_layers=6)
    eagle3(tmp_path, 64, 128, 50)
    heads = DraftHeads.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds PublishedEagle, not EagleHead: load it with DraftHeads"):
        EagleHead.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="published EAGLE heads are saved in no layout of ours"):
        heads.save_pretrained(tmp_path / "copy")
    shallow = tiny_model("llama")
    with pytest.raises(ValueError, match=r"\[1, 0, -2\] .* has 2: .* eagle_aux_hidden_state_layer_ids"):
        heads.check(shallow)
    with pytest.raises(ValueError, match="vocab_size=128, LlamaForCausalLM has vocab_size=100"):
        heads.check(tiny_model("llama", num_hidden_layers=6, vocab_size=100))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="has no model.safetensors: .* Convert pytorch_model.bin") as refusal:
        DraftHeads.from_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(str(refusal.value).split('python -c "')[1].rstrip('"'))  # what it says to do
    DraftHeads.from_pretrained(tmp_path).check(target)
    (tmp_path / "config.json").unlink()
    with pytest.raises(OSError, match="draft_heads.json"):
        DraftHeads.from_pretrained(tmp_path)
