"""cache.save() and PagedCache.load(): the same bits go on, and no file but the right one is taken."""

import json

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import step
from safetensors import safe_open
from safetensors.torch import save_file

from hf_efficient import PagedCache
from hf_efficient.cache.bookkeeping.fingerprint import weights_fingerprint
from hf_efficient.cache.persistence import _digest


@pytest.fixture
def saved(llama, tmp_path):
    """(path, inputs of its two ragged sequences)"""
    llama.set_attn_implementation("flash_paged")
    inputs = left_padded_batch((5, 19))
    cache = PagedCache(llama.config, block_size=8)
    step(llama, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    cache.save(tmp_path / "chat.safetensors", llama)
    return tmp_path / "chat.safetensors", inputs


def longer(inputs, width=4):
    more = left_padded_batch((width,) * len(inputs["input_ids"]), seed=7)
    return {name: torch.cat([tensor, more[name]], 1) for name, tensor in inputs.items()}


def continued(model, inputs, cache, **kwargs):
    """Tokens and logits of 20 more, and the pages afterwards."""
    output = model.generate(
        **longer(inputs), max_new_tokens=20, past_key_values=cache, output_logits=True, return_dict_in_generate=True,
        **{"do_sample": False, **kwargs},
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits), [layer.store.read(cache.state.plan) for layer in cache.layers]


@pytest.mark.parametrize("num_blocks", [None, 40])
@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_generate_goes_on_bit_for_bit(name, implementation, num_blocks, tmp_path):
    model, inputs = tiny_model(name), left_padded_batch((5, 19, 8))
    model.set_attn_implementation("eager" if name == "gemma2" and implementation == "sdpa" else implementation)
    cache = PagedCache(model.config, block_size=8, num_blocks=num_blocks)
    step(model, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    cache.save(tmp_path / "pages", model)
    stats, seqlens = cache.stats(), cache.cache_seqlens
    expected = continued(model, inputs, cache)
    for given in (model, model.config):
        loaded = PagedCache.load(tmp_path / "pages", given)
        assert loaded.stats() == stats and loaded.cache_seqlens == seqlens
        actual = continued(model, inputs, loaded)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["pages"]


@pytest.mark.parametrize(
    "kwargs", [dict(do_sample=True, num_return_sequences=3), dict(num_beams=3)], ids=["sampling", "beams"]
)
def test_one_prompt_for_many_continuations(llama, tmp_path, kwargs):
    """Rows that share blocks are stored once and share them after loading."""
    prompt = left_padded_batch((21,))
    cache = PagedCache(llama.config, block_size=8)
    step(llama, cache, prompt["input_ids"])
    cache.batch_repeat_interleave(3)
    cache.save(tmp_path / "pages")
    loaded = PagedCache.load(tmp_path / "pages", llama)
    assert loaded.stats() == cache.stats() and loaded.stats().blocks_shared == 3
    with safe_open(tmp_path / "pages", "pt") as file:
        assert file.get_slice("layers.0.pages.keys").get_shape() == [3, 8, 2, 16]
    results = []
    for each in (cache, loaded):
        torch.manual_seed(3)
        results.append(llama.generate(**longer(prompt), max_new_tokens=12, past_key_values=each, **kwargs))
    assert torch.equal(*results)


def test_rewound_and_ragged_sequences(llama, tmp_path):
    cache = PagedCache(llama.config, block_size=8)
    step(llama, cache, torch.randint(3, 128, (3, 30)))
    cache.rewind([0, 30, 9])
    cache.save(tmp_path / "pages", llama)
    loaded = PagedCache.load(tmp_path / "pages", llama)
    tokens, positions = torch.randint(3, 128, (3, 2)), torch.tensor([[0, 1], [30, 31], [9, 10]])
    expected = step(llama, cache, tokens, position_ids=positions)
    assert torch.equal(step(llama, loaded, tokens, position_ids=positions), expected)


def test_an_empty_cache_is_not_saved(llama, tmp_path):
    cache = PagedCache(llama.config)
    with pytest.raises(ValueError, match="holds no tokens"):
        cache.save(tmp_path / "pages")
    with pytest.raises(FileNotFoundError):
        PagedCache.load(tmp_path / "pages", llama)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("other", "pattern"),
    [
        (lambda: tiny_model("llama", num_key_value_heads=1), "num_key_value_heads is 2 there and 1 here"),
        (lambda: tiny_model("llama", num_hidden_layers=3), "num_hidden_layers is 2 there and 3 here"),
        (lambda: tiny_model("llama", rope_parameters=dict(rope_type="default", rope_theta=5e5)), "rope_parameters is"),
        (lambda: tiny_model("mistral"), "model_type is llama there and mistral here"),
        (lambda: tiny_model("llama", seed=1), "weights, their dtype or the active adapters differ"),
        (lambda: tiny_model("llama", torch.bfloat16), "weights, their dtype or the active adapters differ"),
    ],
    ids=["heads", "layers", "rope", "architecture", "weights", "dtype"],
)
def test_another_model(saved, other, pattern):
    with pytest.raises(ValueError, match=rf"chat\.safetensors'\): the file is of another model.*{pattern}"):
        PagedCache.load(saved[0], other())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_count(saved, llama):
    peft = pytest.importorskip("peft")
    before = weights_fingerprint(llama)
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    active = weights_fingerprint(model)
    with model.disable_adapter():
        disabled = weights_fingerprint(model)
    projection = model.base_model.model.model.layers[0].self_attn.q_proj
    projection.set_scale("default", 3.0)
    assert len({before, active, disabled, weights_fingerprint(model)}) == 4
    with pytest.raises(ValueError, match="active adapters differ"):
        PagedCache.load(saved[0], model)
    assert weights_fingerprint(llama) == before


@pytest.mark.parametrize("part", [0, 4, 0.3, 0.99])
def test_a_truncated_file(saved, llama, part):
    content = saved[0].read_bytes()
    saved[0].write_bytes(content[: part if part > 1 else int(len(content) * part)])
    with pytest.raises(ValueError, match=r"load\('.*chat\.safetensors'\)"):
        PagedCache.load(saved[0], llama)


@pytest.mark.parametrize("position", [0.1, 0.5, 0.999])
def test_an_altered_file(saved, llama, position):
    content = bytearray(saved[0].read_bytes())
    content[int(len(content) * position)] ^= 1
    saved[0].write_bytes(content)
    with pytest.raises(ValueError, match=r"load\('.*chat\.safetensors'\)"):
        PagedCache.load(saved[0], llama)


def test_other_files(tmp_path, llama):
    save_file({"keys": torch.zeros(3)}, tmp_path / "model.safetensors")
    torch.save({"keys": torch.zeros(3)}, tmp_path / "pickle")
    with pytest.raises(ValueError, match=r"model\.safetensors'\): not a file of PagedCache\.save"):
        PagedCache.load(tmp_path / "model.safetensors", llama)
    with pytest.raises(ValueError, match=r"pickle'\)"):
        PagedCache.load(tmp_path / "pickle", llama)
    with pytest.raises(ValueError, match=rf"load\('{tmp_path}'\)"):
        PagedCache.load(tmp_path, llama)


def first_block(block):
    def change(header, tensors):
        header["groups"][0]["tables"][1][0] = block

    return change


def length(tokens):
    def change(header, tensors):
        header["groups"][0]["lengths"][1] = tokens

    return change


def capacity(blocks, fixed=False):
    def change(header, tensors):
        header["groups"][0]["capacity"] = blocks
        header["num_blocks"] = blocks if fixed else None

    return change


def wide(header, tensors):
    header["layers"]["0"]["form"][2] = 10**9


def without_layer_1(header, tensors):
    del header["layers"]["1"]
    del tensors["layers.1.pages.keys"], tensors["layers.1.pages.values"]


def narrower_keys(header, tensors):
    tensors["layers.1.pages.keys"] = tensors["layers.1.pages.keys"][..., :8].contiguous()


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (first_block(-1), "sequence 1 has block -1, and there are the blocks 0 to"),
        (first_block(10**6), "sequence 1 has block 1000000, and there are the blocks 0 to"),
        (first_block("0"), ""),
        (length(40), "sequence 1 has 40 tokens and the blocks"),
        (length(18), "19 columns and their mask do not fit sequences of"),
        (capacity(10**12), "its blocks take .* bytes on cpu, and .* are free there"),
        (capacity(10**12, fixed=True), "its blocks take .* bytes on cpu, and .* are free there"),
        (wide, r"layers\.0\.pages\.keys is torch\.float32 .* and must be"),
        (lambda header, tensors: header["groups"][0].update(dropped=[0, 8]), "layers that see all tokens have dropped"),
        (narrower_keys, r"layers\.1\.pages\.keys is torch\.float32 .* and must be"),
        (lambda header, tensors: tensors.pop("layers.0.pages.values"), "layers.0.pages.values"),
        (lambda header, tensors: tensors.update(more=torch.zeros(1)), "tensors that do not belong"),
        (without_layer_1, r"no pages of the layers \[1\]"),
        (lambda header, tensors: header.pop("groups"), "groups"),
        (lambda header, tensors: header.update(block_size=7), "block_size=7"),
    ],
)
def test_what_no_cache_can_be(saved, llama, change, pattern):
    """Files whose digest is right, written by something else."""
    with safe_open(saved[0], "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}
    header = json.loads(metadata["header"])
    change(header, tensors)
    metadata["header"] = json.dumps(header)
    save_file(tensors, saved[0], {**metadata, "digest": _digest(metadata["header"], tensors)})
    with pytest.raises(ValueError, match=rf"chat\.safetensors'\): .*{pattern}"):
        PagedCache.load(saved[0], llama)


def test_a_failed_save_leaves_the_old_file(saved, llama, monkeypatch):
    from hf_efficient.cache import persistence

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    before = saved[0].read_bytes()
    cache = PagedCache.load(saved[0], llama)
    monkeypatch.setattr(persistence, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.save(saved[0], llama)
    assert saved[0].read_bytes() == before and len(list(saved[0].parent.iterdir())) == 1
