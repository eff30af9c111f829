"""Architectures whose layers are no plain `nn.Linear` called by its forward: weights that other code reads, classes
of their own."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from hf_efficient import CalibrationConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.experts import EfficientExperts
from hf_efficient.integrations import transformers_layers
from hf_efficient.layers import CompressedModule
from hf_efficient.targets import externally_read


INT4 = dict(bits=4, group_size=32)
SIZES = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS = dict(SIZES, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64)
RWKV = dict(SIZES, attention_hidden_size=64, intermediate_size=96, context_length=64, rescale_every=1)
LLAMA4 = dict(HEADS, head_dim=16, intermediate_size_mlp=96, num_local_experts=4, layer_types=["chunked_attention"] * 2)
# config -> (arguments, linear layers that stay dense)
MODELS = {
    "MambaConfig": (dict(SIZES, state_size=8), {"dt_proj"}),
    "FalconMambaConfig": (dict(SIZES, state_size=8), {"dt_proj"}),
    "JambaConfig": (
        dict(HEADS, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=8),
        {"dt_proj"},
    ),
    "RwkvConfig": (RWKV, {"attention.output", "feed_forward.value"}),
    "FalconConfig": (dict(HEADS, bias=True, new_decoder_architecture=False), set()),
    "Llama4TextConfig": (LLAMA4, {"feed_forward.router"}),
    "LlamaConfig": (HEADS, set()),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """(folder of a random model in bfloat16, names of linear layers that stay dense)"""
    arguments, dense = MODELS[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, request.param)(**arguments)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv" not in name and "A_log" not in name:
                nn.init.normal_(parameter, std=1 if "emb" in name else parameter.shape[-1] ** -0.5)
            elif name.endswith(".bias"):
                nn.init.normal_(parameter)
    path = tmp_path_factory.mktemp(request.param)
    model.bfloat16().save_pretrained(path)
    return path, dense


def load(path, config=None, dtype=torch.bfloat16):
    options = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


def logits(model):
    ids = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits.float()


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_the_quantized_model_computes_what_its_dense_twin_does(case, tmp_path):
    path, dense = case
    model = load(path, WeightOnlyConfig(**INT4))
    head = model.get_output_embeddings()
    linears = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, CompressedModule) and module is not head
    }
    assert all(any(name.endswith(end) for end in dense) for name in linears), linears
    assert all(any(name.endswith(end) for name in linears) for end in dense)
    assert sum(isinstance(module, CompressedModule) for module in model.modules()) >= 6
    model.save_pretrained(tmp_path)  # before any forward: that of RWKV divides weights, and transformers saves them so
    before = logits(model)
    assert error(before, logits(load(path))) < 0.5
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    again = load(tmp_path)
    assert torch.equal(logits(again), before)
    assert torch.equal(logits(copy.deepcopy(again)), before)
    again.dequantize()
    assert [type(m) for m in again.modules()] == [type(m) for m in load(path).modules()]
    assert error(logits(again), before) < 0.03, "bfloat16, in another order"
    in_float32, dense_in_float32 = load(tmp_path, dtype=torch.float32), load(tmp_path, dtype=torch.float32)
    dense_in_float32.dequantize()
    assert error(logits(in_float32), logits(dense_in_float32)) < 1e-5


TEXT = dict(input_ids=torch.arange(3, 12)[None])
TINY = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, pad_token_id=0)
WAVLM = dict(TINY, vocab_size=32, conv_dim=[32] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)
MOBILE_BERT = dict(TINY, vocab_size=128, embedding_size=32, intra_bottleneck_size=64, true_hidden_size=64)
LAYOUT = dict(
    TINY,
    vocab_size=128,
    visual_embed=False,
    coordinate_size=12,
    shape_size=8,
    input_size=32,
    max_2d_position_embeddings=64,
)
REFORMER = dict(
    vocab_size=128, hidden_size=64, attention_head_size=16, num_attention_heads=4, feed_forward_size=96,
    is_decoder=True, attn_layers=["lsh", "local"], axial_pos_embds_dim=[16, 48], axial_pos_shape=[4, 8],
    lsh_attn_chunk_length=4, local_attn_chunk_length=4, num_buckets=4, hash_seed=0, max_position_embeddings=32,
)  # fmt: skip
# class -> (arguments of its config, inputs, linear layers that stay dense)
OTHERS = {
    "WavLMForCTC": (WAVLM, dict(input_values=torch.randn(1, 4000)), {"q_proj", "k_proj", "v_proj", "out_proj"}),
    "MobileBertForMaskedLM": (MOBILE_BERT, TEXT, {"predictions.dense"}),
    "LayoutLMv3ForTokenClassification": (
        dict(LAYOUT, has_relative_attention_bias=True, has_spatial_attention_bias=True),
        TEXT,
        {"rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"},
    ),
    "ReformerModelWithLMHead": (REFORMER, TEXT, {"query_key", "self_attention.value"}),  # read with a cache
}


@pytest.mark.parametrize("name", OTHERS)
def test_encoders_sound_and_documents(name, tmp_path):
    arguments, inputs, dense = OTHERS[name]
    torch.manual_seed(0)
    cls, config = getattr(transformers, name), getattr(transformers, name.split("For")[0].split("Model")[0] + "Config")
    cls(config(**arguments)).save_pretrained(tmp_path)
    model = cls.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=WeightOnlyConfig(**INT4))
    plain = {n for n, m in model.named_modules() if type(m) is nn.Linear}
    assert all(any(n.endswith(end) for n in plain) for end in dense)
    assert sum(isinstance(module, CompressedModule) for module in model.modules()) >= 4
    twin = copy.deepcopy(model).dequantize()
    with torch.no_grad():
        assert error(model(**inputs).logits, twin(**inputs).logits) < 1e-5


def test_the_trace_goes_on_behind_attention(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        return nn.functional.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**HEADS))
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    expected = {name for name in linears if name.endswith("down_proj")}
    assert externally_read.read_elsewhere(model, linears) == expected


def test_other_schemes(case):
    path, _ = case
    expected = logits(load(path, dtype=torch.float32))
    for config in (WeightOnlyConfig(bits=8, group_size=-1), WeightOnlyConfig(codebook="nf4"), W8A8Config()):
        assert error(logits(load(path, config, torch.float32)), expected) < 0.3


def test_calibration(case):
    path, _ = case
    calibration = CalibrationConfig(tokens=torch.randint(3, 120, (4, 16), generator=torch.Generator().manual_seed(2)))
    config = WeightOnlyConfig(bits=8, group_size=32, method="gptq", calibration=calibration)
    if "Llama4" in str(path):
        with pytest.raises(ValueError, match="experts .Llama4TextExperts.: method='gptq'.*method='rtn'"):
            load(path, config)
        config = WeightOnlyConfig(
            bits=8, group_size=32, method="gptq", calibration=calibration, overrides={"experts": {"method": "rtn"}}
        )
    assert error(logits(load(path, config, torch.float32)), logits(load(path, dtype=torch.float32))) < 0.05


def test_without_the_list_the_trace_finds_them(case, monkeypatch):
    path, dense = case
    model = load(path)
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    known = transformers_layers.read_outside_forward(model)
    monkeypatch.setattr(transformers_layers, "READ_OUTSIDE_FORWARD", {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    found = externally_read.read_elsewhere(model, linears)
    assert found == known
    assert not getattr(getattr(model, "rwkv", None), "layers_are_rescaled", False), "the model itself did not run"


def test_a_forward_that_fails_shows_what_it_has_read():
    class Model(nn.Module):
        main_input_name = "input_ids"

        def __init__(self):
            super().__init__()
            self.called, self.read, self.later = (nn.Linear(8, 8, device="meta") for _ in range(3))

        def forward(self, input_ids):
            x = self.called(torch.zeros(1, 8)) @ self.read.weight
            return x.sum().item() * self.later.weight

    assert externally_read.read_elsewhere(Model(), ["called", "read", "later"]) == {"read"}


def test_a_checkpoint_that_holds_such_a_weight_compressed_is_refused(tmp_path, monkeypatch):
    """As releases before wrote them, which no forward could use."""
    arguments, _ = MODELS["MambaConfig"]
    AutoModelForCausalLM.from_config(transformers.MambaConfig(**arguments)).save_pretrained(tmp_path / "plain")
    with monkeypatch.context() as old:
        old.setattr(externally_read, "read_elsewhere", lambda model, names: set())
        load(tmp_path / "plain", WeightOnlyConfig(**INT4)).save_pretrained(tmp_path / "old")
    with pytest.raises(
        ValueError, match="holds .*mixer.dt_proj in compressed form, but MambaForCausalLM reads.*dequantize=True"
    ):
        load(tmp_path / "old")
    logits(load(tmp_path / "old", WeightOnlyConfig(dequantize=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_falcon_rounds_before_it_adds_the_bias(dtype):
    from transformers.models.falcon.modeling_falcon import FalconLinear

    from hf_efficient import methods
    from hf_efficient.layers import compress_linear

    torch.manual_seed(0)
    linear, config = FalconLinear(64, 48, dtype=dtype), WeightOnlyConfig(**INT4)
    tensors = methods.quantize(linear.weight.detach(), config.format(), "rtn")
    new, plain = (compress_linear(x, config.format(), tensors) for x in (linear, nn.Linear(64, 48, dtype=dtype)))
    plain.bias = None
    x = torch.randn(5, 64, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(new(x), plain(x) + linear.bias)
        assert torch.equal(pickle.loads(pickle.dumps(new))(x), new(x))
    x.requires_grad_()
    new(x).sum().backward()
    assert x.grad is not None and new.original is FalconLinear


def test_other_subclasses_of_linear_stay_dense():
    from hf_efficient.layers import is_linear

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class WithState(nn.Linear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.state = 1

        def forward(self, x):
            return x @ self.weight.T + self.bias

    class Odd(nn.Linear):
        def forward(self, x, gate):
            return x @ self.weight.T * gate

    before = torch.get_rng_state()
    assert is_linear(nn.Linear(2, 2, device="meta"))
    assert not any(is_linear(cls(2, 2, device="meta")) for cls in (Scaled, WithState, Odd))
    assert torch.equal(torch.get_rng_state(), before)


def test_llama4_experts_skip_tokens_that_are_not_theirs(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(transformers.Llama4TextConfig(**LLAMA4)).save_pretrained(tmp_path)
    model = load(tmp_path, WeightOnlyConfig(**INT4), torch.float32)
    experts = next(module for module in model.modules() if isinstance(module, EfficientExperts))
    rows = torch.randn(4 * 6, 64) * (torch.arange(24) % 3 == 0)[:, None]
    with torch.no_grad():
        found, none = experts(rows), experts(torch.zeros(8, 64))
        model.dequantize()
        torch.testing.assert_close(found, experts(rows), rtol=1e-4, atol=1e-5)
    assert not none.any()


def test_layers_whose_codes_are_renamed_when_saved_stay_dense(monkeypatch):
    """As `k_sconv.weight_proj` of Inkling 2, which transformers saves without `.weight`."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    from hf_efficient.targets import weights_in_files

    renamings = [WeightRenaming(r"(sconv)\.weight_proj", r"\1.weight_proj.weight"), WeightRenaming("old", "new")]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *args, **kwargs: renamings)
    names = ["layers.0.sconv.weight_proj", "layers.0.mlp.up_proj", "new.gate"]
    assert weights_in_files.lost_when_saved(None, names) == {"layers.0.sconv.weight_proj"}
