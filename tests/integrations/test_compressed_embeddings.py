"""Models with a compressed input embedding in other hands: adapters, exports, accelerate."""

import fresh_processes
import pytest
import torch
from accelerate import cpu_offload, load_checkpoint_and_dispatch
from helpers import assert_close
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from saved_models import INT4, folder, load, logits
from torch import nn

import hf_efficient
from hf_efficient.checkpoints.export.bitsandbytes import save_as_bitsandbytes
from hf_efficient.integrations.accelerate import empty_model
from hf_efficient.integrations.peft import merge_and_unload


# PEFT's, about its own configs and tied weights
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EMBEDDED = dict(INT4, embeddings=True)
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))


def adapted(name="llama_tied", **options):
    return get_peft_model(load(folder(name), **EMBEDDED), LoraConfig(r=4, init_lora_weights=False, **options)).eval()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3"])
@pytest.mark.parametrize("targets", [["q_proj"], ["embed_tokens", "q_proj"], ["lm_head", "q_proj"]])
def test_lora(name, targets, tmp_path):
    model, plain = adapted(name, target_modules=targets), load(folder(name), **EMBEDDED)
    expected = logits(model)
    assert not torch.equal(expected, logits(plain))
    model(IDS).logits.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(plain, tmp_path).eval()
    assert torch.equal(logits(again), expected)
    assert torch.equal(logits(again.unload()), logits(load(folder(name), **EMBEDDED)))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_an_embedding_holds_no_codes(target, tmp_path):
    """It is loaded on the model as it was before it was compressed, or in other bits."""
    model = adapted(target_modules=[target])
    model.save_pretrained(tmp_path)
    assert all("lora" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    dense = load(folder("llama_tied"), **EMBEDDED).dequantize()
    dense = PeftModel.from_pretrained(dense, tmp_path).eval()
    assert_close(logits(dense), logits(model), 2e-5, 1e-3, "the same weights through other operators")


def test_lora_adds_to_the_rows_as_it_does_to_dense_ones():
    model = adapted(target_modules=["embed_tokens"])
    dense = load(folder("llama_tied"), **EMBEDDED)
    dense.dequantize()
    dense = get_peft_model(dense, LoraConfig(r=4, target_modules=["embed_tokens"])).eval()
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if "lora" in k}, strict=False)
    assert_close(logits(model), logits(dense), 2e-5, 1e-3, "the same weights through other operators")


@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"]])
def test_modules_to_save_are_dense_copies(modules):
    model = adapted(target_modules=["q_proj"], modules_to_save=modules)
    trained = [p for n, p in model.named_parameters() if "modules_to_save" in n]
    assert [p.shape for p in trained] == [(128, 64)] and trained[0].requires_grad
    assert torch.equal(trained[0], load(folder("llama_tied"), **EMBEDDED).model.embed_tokens.dequantized())
    model(IDS).logits.sum().backward()
    assert trained[0].grad.abs().sum() > 0


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("options", [dict(use_dora=True), dict(init_lora_weights="pissa")])
def test_adapters_that_read_the_weight_are_refused(module, options):
    with pytest.raises(ValueError, match=f"LoraConfig\\({next(iter(options))}=.*{module}.*is compressed"):
        get_peft_model(load(folder("llama_tied"), **EMBEDDED), LoraConfig(target_modules=[module], **options))


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_ids_that_are_no_row_numbers_are_refused(name, dtype):
    embedding = load(folder(name), **EMBEDDED).model.embed_tokens
    rows = embedding(IDS)
    assert torch.equal(embedding(IDS.int()), rows)
    with pytest.raises(TypeError, match=f"ids of {dtype} are no row numbers: allowed are torch.int32 and torch.int64"):
        embedding(IDS.to(dtype))


def test_trainable_tokens_are_refused():
    model = load(folder("llama_tied"), **EMBEDDED)
    with pytest.raises(ValueError, match="trainable tokens replace rows of the embedding, which is compressed"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]))


def test_merging():
    model = adapted("llama", target_modules=["embed_tokens", "q_proj"])
    expected = logits(model)
    with pytest.raises(ValueError, match="merge_and_unload\\(\\): .*is compressed"):
        model.merge_and_unload()
    merged = merge_and_unload(model)
    assert type(merged.model.embed_tokens) is nn.Embedding
    assert_close(logits(merged), expected, 2e-5, 1e-3, "the same sums in another order")
    with pytest.raises(ValueError, match="model.embed_tokens is adapted, and others have its weight"):
        merge_and_unload(adapted(target_modules=["embed_tokens"]))
    merge_and_unload(adapted(target_modules=["q_proj"]))


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize("from_folder", [True, False])
def test_targets_of_linear_layers_get_a_dense_embedding(format, from_folder, tmp_path):
    model = load(folder("llama_tied"), **EMBEDDED)
    model.save_pretrained(tmp_path / "saved")
    report = hf_efficient.export(tmp_path / "saved" if from_folder else model, tmp_path / "out", format)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert report.quantized_layers == 14 and not any("lm_head" in name for name in tensors)
    assert torch.equal(tensors["model.embed_tokens.weight"], model.model.embed_tokens.dequantized())


@pytest.mark.parametrize("from_folder", [True, False])
def test_gguf_keeps_the_codes_of_the_embedding(from_folder, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = load(folder("llama_tied"), **EMBEDDED)
    model.save_pretrained(tmp_path / "saved")
    hf_efficient.export(tmp_path / "saved" if from_folder else model, tmp_path / "out.gguf", "gguf")
    tensor = next(t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors if t.name == "token_embd.weight")
    assert tensor.tensor_type.name == "Q8_0"
    rows = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
    dense = model.model.embed_tokens.dequantized()
    assert_close(rows, dense, 2**-11, 2**-11 * dense.abs().max().item(), "scales in float16")


def test_bitsandbytes_is_refused_by_name(tmp_path):
    model = load(folder("llama"), bits=4, codebook="nf4", group_size=64, method="rtn", embeddings=True)
    with pytest.raises(ValueError, match="model.embed_tokens is AffineFormat.*bitsandbytes cannot hold"):
        save_as_bitsandbytes(model, tmp_path)


def test_accelerate(tmp_path):
    model = load(folder("llama_tied"), **EMBEDDED)
    model.save_pretrained(tmp_path)
    before = logits(model)
    empty = load_checkpoint_and_dispatch(empty_model(str(tmp_path)), str(tmp_path), device_map={"": "cpu"})
    assert torch.equal(logits(empty), before)
    again = load(tmp_path)
    cpu_offload(again, execution_device="cpu")
    assert again.model.embed_tokens.is_offloaded and again.lm_head.is_offloaded
    assert_close(logits(again), before, 2e-5, 1e-3, "offloaded weights are dequantized, then multiplied")


def test_without_the_plugin_a_checkpoint_is_refused(tmp_path):
    load(folder("llama_tied"), **EMBEDDED, modules_to_not_convert=["layers"]).save_pretrained(tmp_path)
    code = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    done = fresh_processes.run(["-c", code])
    assert done.returncode and "model.embed_tokens.qweight" in done.stderr and "MISMATCH" in done.stderr


def test_an_embedding_that_others_are_tied_to_is_not_replaced(tmp_path):
    """The output embedding would keep the old one, which no save holds."""
    model, new = load(folder("llama_tied"), **EMBEDDED), nn.Embedding(128, 64)
    with pytest.raises(ValueError, match=r"set_input_embeddings\(Embedding\): other modules are tied .*dequantize"):
        model.set_input_embeddings(new)
    untied, dense = load(folder("llama"), **EMBEDDED), model.dequantize()
    for name, each in (("untied", untied), ("dense", dense)):
        each.set_input_embeddings(new)
        each.tie_weights()
        each.save_pretrained(tmp_path / name)
        assert torch.equal(logits(load(tmp_path / name)), logits(each))
