import pytest
import torch
from helpers import assert_close, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_efficient import WeightOnlyConfig
from hf_efficient.integrations.peft import merge_and_unload


peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    made = {}

    def make(name="llama", **config):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            tiny_model(name).save_pretrained(made[name])
        config = WeightOnlyConfig(**{"bits": 4, "group_size": 32, **config})
        return AutoModelForCausalLM.from_pretrained(made[name], quantization_config=config, dtype=torch.float32)

    return make


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
def test_train_save_and_reload_an_adapter(name, load, tmp_path):
    base = load(name)
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
    again = peft.PeftModel.from_pretrained(load(name), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_merge_dequantizes_first(load):
    model = peft.get_peft_model(load(), lora("llama"))
    train(model, 2)
    with torch.no_grad():
        expected = model(IDS).logits
        with pytest.raises(ValueError, match="merges into dequantized weights"):
            peft.get_peft_model(load(), lora("llama")).merge_and_unload()
        merged = merge_and_unload(model)
        assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
        assert_close(merged(IDS).logits, expected, 1e-4, 1e-2, "the same product, with the adapter added to the weight")


def test_transformers_own_adapter_loading(load, tmp_path):
    model = load()
    model.add_adapter(lora("llama"))
    train(model, 2)
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = load()
    again.load_adapter(str(tmp_path))
    with torch.no_grad():
        assert_close(again(IDS).logits, expected, 1e-6, 1e-5, "the same adapter")
