import pytest
import torch
from helpers import assert_close
from saved_models import INT4, folder, load
from torch import nn

from hf_efficient.integrations.peft import merge_and_unload


peft = pytest.importorskip("peft")


def int4(name="llama"):
    return load(folder(name), **INT4)


TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"], "mixtral": ["q_proj", "o_proj"]}
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def lora(name, **kwargs):
    return peft.LoraConfig(r=4, target_modules=TARGETS[name], task_type="CAUSAL_LM", **kwargs)


def train(model, steps=4):
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainable and all(p.is_floating_point() for p in trainable)
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_train_save_and_reload_an_adapter(name, tmp_path):
    base = int4(name)
    codes = {k: v.clone() for k, v in base.state_dict().items() if "qweight" in k}
    model = peft.get_peft_model(base, lora(name))
    losses = train(model)
    assert losses[-1] < losses[0] - 0.05, losses
    after = model.get_base_model().state_dict()
    assert all(
        any(torch.equal(v, after[k2]) for k2 in (k, k.replace("qweight", "base_layer.qweight")) if k2 in after)
        for k, v in codes.items()
    )
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(int4(name), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_merge_dequantizes_first():
    model = peft.get_peft_model(int4(), lora("llama"))
    train(model, 2)
    with torch.no_grad():
        expected = model(IDS).logits
        with pytest.raises(ValueError, match="merges into dequantized weights"):
            peft.get_peft_model(int4(), lora("llama")).merge_and_unload()
        merged = merge_and_unload(model)
        assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
        assert_close(merged(IDS).logits, expected, 1e-4, 1e-2, "the same product, with the adapter added to the weight")


def test_transformers_own_adapter_loading(tmp_path):
    model = int4()
    model.add_adapter(lora("llama"))
    train(model, 2)
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = int4()
    again.load_adapter(str(tmp_path))
    with torch.no_grad():
        assert_close(again(IDS).logits, expected, 1e-6, 1e-5, "the same adapter")
