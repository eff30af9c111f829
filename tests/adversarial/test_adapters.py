"""PEFT's adapters on compressed models compute what they compute on the dequantized model: before and after merging,
in the gradients, and after a reload. What needs a weight that can change is refused by name."""

import contextlib
import copy
import importlib.util
import io
import sys

import foreign_layouts
import pytest
import torch
from helpers import assert_close, rms_error_ratio, tiny_model
from table import METHODS
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import hf_efficient
from hf_efficient.checkpoints import adopt
from hf_efficient.integrations.peft import merge_and_unload
from hf_efficient.layers import CompressedModule, EfficientLinear


peft = pytest.importorskip("peft")
BaseTuner = pytest.importorskip("peft.tuners.tuners_utils").BaseTuner

hf_efficient.register()
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
ALL = "all-linear"
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],  # attn.c_proj is square
    "mixtral": ["q_proj", "o_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
}
# name -> config class of PEFT and arguments
ADAPTERS = {
    "lora": ("LoraConfig", dict(r=4)),
    "lora bias": ("LoraConfig", dict(r=4, bias="all")),
    "dora": ("LoraConfig", dict(r=4, use_dora=True)),
    "rslora": ("LoraConfig", dict(r=4, use_rslora=True, init_lora_weights="gaussian")),
    "mica": ("LoraConfig", dict(r=4, init_lora_weights="mica")),
    "adalora": ("AdaLoraConfig", dict(init_r=4, total_step=10)),
    "loha": ("LoHaConfig", dict(r=4)),
    "lokr": ("LoKrConfig", dict(r=4)),
    "ia3": ("IA3Config", dict(feedforward_modules=[])),
    "vera": ("VeraConfig", dict(r=4)),
    "oft": ("OFTConfig", dict(oft_block_size=16)),
    "boft": ("BOFTConfig", dict(boft_block_size=4)),
    "hra": ("HRAConfig", dict(r=4)),
    "miss": ("MissConfig", dict(r=4)),
    "delora": ("DeloraConfig", dict(r=4)),
    "frod": ("FrodConfig", dict()),
    "shira": ("ShiraConfig", dict(r=4)),
    "randlora": ("RandLoraConfig", dict(r=4)),
}
ON_CONV1D = ("lora", "lora bias", "dora", "rslora", "mica", "adalora", "ia3", "vera")  # what PEFT has for plain GPT-2
FORMATS = {
    "int4": dict(METHODS["rtn_2"], bits=4),
    "int8 channel": dict(METHODS["rtn_2"], bits=8, group_size=-1),
    "nf4 double": METHODS["nf4_double"],
    "w8a8": METHODS["w8a8"],
    "fp8": METHODS["fp8"],
    "ternary": METHODS["bitnet"],
    "2:4": METHODS["magnitude_2:4"],
    "2:4 int4": dict(METHODS["magnitude_2:4"], weights={"bits": 4, "group_size": 32}),
}
ADOPTED = {"gptq": "gptq", "awq": "awq", "bitsandbytes": "bitsandbytes_4bit"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PEFT's, about its own configs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name, layout=None):
        if (name, layout) not in made:
            made[name, layout] = tmp_path_factory.mktemp("model")
            model = tiny_model(name)
            if layout:
                foreign_layouts.write(made[name, layout], model, getattr(foreign_layouts, layout), torch.float16)
            else:
                model.save_pretrained(made[name, layout])
        return made[name, layout]

    return folder


@pytest.fixture(scope="module")
def load(folders):
    made = {}

    def fresh(name, format, **more):
        if format in ADOPTED:
            return AutoModelForCausalLM.from_pretrained(folders(name, ADOPTED[format]), dtype=torch.float32).eval()
        arguments = {**FORMATS[format], **more}
        config = AUTO_QUANTIZATION_CONFIG_MAPPING[arguments.pop("quant_method")](**arguments)
        return AutoModelForCausalLM.from_pretrained(
            folders(name), quantization_config=config, dtype=torch.float32
        ).eval()

    def make(name, format="int4", **more):
        key = name, format, str(more)
        if key not in made:
            made[key] = fresh(name, format, **more)
        return copy.deepcopy(made[key])

    return make


def config_of(adapter, targets, **more):
    kind, arguments = ADAPTERS[adapter]
    return getattr(peft, kind)(target_modules=targets, task_type="CAUSAL_LM", **{**arguments, **more})


def adapted(model, config):
    """`model` with an adapter, and numbers in it that depend on nothing but its names."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(2)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def with_linears(model):
    """`model` with an nn.Linear for each Conv1D, which many adapters know nothing of."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            new = nn.Linear(*module.weight.shape)
            new.weight, new.bias = nn.Parameter(module.weight.data.t().contiguous()), module.bias
            model.set_submodule(name, new)
    return model


def pruned_places(model) -> dict[str, torch.Tensor]:
    """Name of a weight -> where it is pruned, [N, K] (experts in front)."""
    return {
        f"{name}.{weight.prefix[:-1] or 'weight'}": ~weight.format.mask(
            module.canonical(weight.prefix), weight.in_features
        )
        for name, module in model.named_modules()
        if isinstance(module, CompressedModule)
        for weight in module.compressed_weights()
    }


def gradients(model) -> dict[str, torch.Tensor]:
    model(input_ids=IDS, labels=IDS).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def check(name, make, config, reference, tmp_path, tolerance=1e-5):
    """The adapter of `config` on the model of `make()` against that on `reference`, a dense model."""
    compressed, dense = adapted(make(), config()), adapted(reference, config())
    actual, expected = logits(compressed), logits(dense)
    reason = "the same adapter over weights that differ by rounding of products, or by that of inputs"
    assert_close(actual, expected, tolerance, 1e3 * tolerance, reason)
    base = logits(make())
    assert rms_error_ratio(actual, base) > 1e-3, "the adapter does something"
    if getattr(compressed.active_peft_config, "bias", "none") == "none":  # biases that are trained stay as they are
        with compressed.disable_adapter():
            assert torch.equal(logits(compressed), base)
    ours, theirs = gradients(compressed), gradients(dense)
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        assert rms_error_ratio(gradient, theirs[key]) < 30 * tolerance, key
    compressed.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make(), tmp_path).eval()
    assert torch.equal(logits(again), actual)
    merged = merge_and_unload(again)
    assert not any(isinstance(module, CompressedModule) for module in merged.modules())
    return merged, expected


@pytest.mark.parametrize(
    "name, adapter", [("llama", a) for a in ADAPTERS] + [("gpt2", a) for a in (*ON_CONV1D, "lokr", "oft", "frod")]
)
def test_adapters_compute_as_on_dequantized_weights(name, adapter, load, tmp_path):
    reference = load(name).dequantize()
    reference = reference if adapter in ON_CONV1D else with_linears(reference)
    merged, expected = check(name, lambda: load(name), lambda: config_of(adapter, TARGETS[name]), reference, tmp_path)
    assert_close(logits(merged), expected, 2e-5, 1e-2, "the same product, with the adapter in the weight")
    if name == "gpt2":
        assert type(merged.transformer.h[0].attn.c_proj) is Conv1D


@pytest.mark.parametrize("adapter", ["lora", "dora", "lokr", "oft"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_adapters_of_mixtures(name, adapter, load, tmp_path):
    targets = ALL if adapter == "lora" else TARGETS[name]
    reference = load(name).dequantize()
    merged, expected = check(name, lambda: load(name), lambda: config_of(adapter, targets), reference, tmp_path)
    assert_close(logits(merged), expected, 2e-5, 1e-2, "the same product, with the adapter in the weight")


def test_all_linear_means_the_same_of_a_compressed_mixture(load):
    for name in ("mixtral", "qwen3_moe", "gpt_oss"):
        ours, theirs = config_of("lora", ALL), config_of("lora", ALL)
        compressed, dense = peft.get_peft_model(load(name), ours), peft.get_peft_model(load(name).dequantize(), theirs)
        assert compressed.targeted_module_names == dense.targeted_module_names
        assert compressed.targeted_parameter_names == dense.targeted_parameter_names


def test_experts_with_transposed_weights_and_biases(load, tmp_path):
    """gpt_oss; several adapters at once add up."""
    targets = {"target_parameters": [f"experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj")]}
    reference = load("gpt_oss").dequantize()
    config = lambda: config_of("lora", ["q_proj"], **targets)  # noqa: E731
    merged, expected = check("gpt_oss", lambda: load("gpt_oss"), config, reference, tmp_path)
    assert_close(logits(merged), expected, 2e-5, 1e-2, "the same product, with the adapter in the weight")
    both = []
    for model in (load("gpt_oss"), load("gpt_oss").dequantize()):
        model = adapted(model, config())
        model.load_adapter(tmp_path, "second")
        model.base_model.set_adapter(["default", "second"])
        both.append(logits(model))
    assert_close(both[0], both[1], 1e-5, 1e-2, "the same adapters")


@pytest.mark.parametrize(
    "format, name, adapter",
    [
        *((format, "llama", adapter) for format in (*FORMATS, *ADOPTED) for adapter in ("lora", "dora")),
        *((format, "mixtral", "lora") for format in (*FORMATS, "gptq")),
    ],
)
def test_formats(format, name, adapter, load, tmp_path, monkeypatch):
    if format in ADOPTED:
        monkeypatch.setattr(adopt, "_adopted", set())
        hf_efficient.adopt(*{"gptq": ["gptq"], "awq": ["awq"], "bitsandbytes": ["bitsandbytes"]}[format])
    targets = ALL if adapter == "lora" else TARGETS[name]
    reference = load(name, format).dequantize()
    plain = rms_error_ratio(
        logits(load(name, format)), logits(reference)
    )  # of inputs in 8 bits, which adapters have not
    merged, expected = check(
        name, lambda: load(name, format), lambda: config_of(adapter, targets), reference, tmp_path, 1e-5 + 3 * plain
    )
    if "2:4" not in format:
        assert_close(logits(merged), expected, 2e-5, 1e-2, "the same product, with the adapter in the weight")
        return
    dense = adapted(load(name, format).dequantize(), config_of(adapter, targets)).merge_and_unload()
    pruned = pruned_places(load(name, format))
    assert pruned
    for key, value in merged.named_parameters():
        kept = dense.get_parameter(key).detach()
        assert_close(value, kept.masked_fill(pruned.get(key, torch.tensor(False)), 0), 1e-6, 1e-4, f"{key}: merged")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_modules_to_save_are_dense_copies(name, load, tmp_path):
    """Compressed layers among them, or a whole block that holds some: they train as those of the plain model do."""
    saved = {"gpt2": ["c_fc", "ln_f"], "llama": ["mlp"], "mixtral": ["experts", "lm_head"]}[name]
    config = lambda: config_of("lora", TARGETS[name][:1], modules_to_save=saved)  # noqa: E731
    merged, expected = check(name, lambda: load(name), config, load(name).dequantize(), tmp_path)
    assert_close(logits(merged), expected, 2e-5, 1e-2, "the same product, with the adapter in the weight")
    # what was saved over compressed weights is one for the plain model, too
    plain = peft.PeftModel.from_pretrained(load(name).dequantize(), tmp_path).eval()
    assert_close(logits(plain), expected, 1e-5, 1e-2, "the same adapter")


def test_sparse_square_conv1d_keeps_its_own_zeros(load):
    model = load("gpt2", "2:4")
    zeros = model.transformer.h[0].attn.c_proj.dequantized().t() == 0
    merged = merge_and_unload(adapted(model, config_of("lora", ["attn.c_proj"])))
    assert torch.equal(merged.transformer.h[0].attn.c_proj.weight == 0, zeros)


def test_merging_a_sparse_model_with_a_trained_block(load):
    """The block that modules_to_save trained is kept as it was trained, the zeros of adapted layers stay."""
    model = adapted(load("llama", "2:4"), config_of("lora", ["q_proj"], modules_to_save=["mlp"]))
    trained = model.base_model.model.model.layers[0].mlp.modules_to_save["default"].up_proj.weight.clone()
    zeros = pruned_places(load("llama", "2:4"))["model.layers.0.self_attn.q_proj.weight"]
    merged = merge_and_unload(model).model.layers[0]
    assert torch.equal(merged.mlp.up_proj.weight, trained)
    assert torch.equal(merged.self_attn.q_proj.weight == 0, zeros)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora", "kasa"])
@pytest.mark.parametrize("targets", [ALL, "q_proj"])
def test_initialisations_that_change_the_base_are_refused(init, targets, load):
    model = load("llama", modules_to_not_convert=["layers.0"])
    before, expected = {key: value.clone() for key, value in model.state_dict().items()}, logits(model)
    options = {"kasa_config": peft.KasaConfig()} if init == "kasa" else {"init_lora_weights": init}
    targets = targets if targets == ALL else [targets]
    with pytest.raises(ValueError, match=rf"LoraConfig\(.*{init}.*layers\.1.*AffineFormat\(bits=4.*dequantize\(\)"):
        peft.get_peft_model(model, config_of("lora", targets, **options))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    assert torch.equal(logits(model), expected)
    on_dense_layers = [f"layers.0.self_attn.{name}_proj" for name in "qk"]
    peft.get_peft_model(model, config_of("lora", on_dense_layers, **options))


def test_training_a_compressed_layer_itself_is_refused(load):
    with pytest.raises(ValueError, match="LNTuningConfig.*q_proj.*modules_to_save"):
        peft.get_peft_model(load("llama"), peft.LNTuningConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"q_proj\.weight is the weight of an EfficientLinear.*target_modules"):
        peft.get_peft_model(load("llama"), config_of("lora", [], target_parameters=["q_proj.weight"]))
    with pytest.raises(ValueError, match=r"gate_up_proj_scale is a part .* one of \['gate_up_proj', 'down_proj'\]"):
        peft.get_peft_model(load("mixtral"), config_of("lora", [], target_parameters=["experts.gate_up_proj_scale"]))
    model = adapted(load("llama"), config_of("lora", ["down_proj"]))
    with pytest.raises(ValueError, match="modules_to_save: .*down_proj.base_layer is adapted as well"):
        model.add_adapter("second", config_of("lora", ["q_proj"], modules_to_save=["mlp"]))


def test_offloaded_layers(load, tmp_path, monkeypatch):
    """An adapter that only adds computes there, too; PEFT loads it given a device map. One that reads the weight says
    why not."""
    monkeypatch.chdir(tmp_path)  # PEFT writes what it offloads to a relative path
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    where = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    base = adapted(load("llama"), config_of("lora", ["q_proj"]))
    base.save_pretrained(tmp_path / "adapter")
    load("llama").save_pretrained(tmp_path / "model")

    def offloaded():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=where, offload_folder=tmp_path / "disk", dtype=torch.float32
        )

    placed = {f"base_model.model.{name}": device for name, device in where.items()}
    options = {"device_map": placed, "offload_dir": tmp_path / "adapter disk"}
    model = peft.PeftModel.from_pretrained(offloaded(), tmp_path / "adapter", **options).eval()
    assert_close(logits(model), logits(base), 1e-5, 1e-2, "the same adapter")
    with pytest.raises(ValueError, match=r"LoraConfig\(use_dora=.*layers.1.self_attn.q_proj, which is offloaded"):
        peft.get_peft_model(offloaded(), config_of("dora", ["q_proj"]))


@pytest.mark.parametrize("name, targets, options", [
    ("llama", ["q_proj"], {}), ("mixtral", ALL, {}), ("llama", ["lm_head"], dict(modules_to_save=["mlp"])),
])  # fmt: skip
def test_merging_into_compressed_weights_is_refused(name, targets, options, load):
    model = adapted(load(name, modules_to_not_convert=["lm_head"]), config_of("lora", targets, **options))
    expected = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter, lambda: model.merge_and_unload(safe_merge=True)):
        with pytest.raises(ValueError, match=r"is compressed.*hf_efficient\.integrations\.peft\.merge_and_unload"):
            merge()
        assert torch.equal(logits(model), expected)
    if options:
        with pytest.raises(ValueError, match=r"unload\(\): .*mlp is compressed.*delete_adapter"):
            model.unload()
        model.delete_adapter("default")
    plain = model.unload()
    assert torch.equal(logits(plain), logits(load(name, modules_to_not_convert=["lm_head"])))


def test_nothing_writes_to_a_compressed_weight(load):
    """Whatever method PEFT adds: the weight reads as a dense one, and refuses to change."""
    layer = adapted(load("llama"), config_of("lora", ["q_proj"])).base_model.model.model.layers[0].self_attn.q_proj
    base = layer.base_layer
    dense = EfficientLinear.dequantized(base)
    assert isinstance(base.weight, nn.Parameter) and base.weight.shape == dense.shape
    assert torch.equal(base.weight + 1, dense + 1) and torch.equal(torch.stack([base.weight])[0], dense)

    def add():
        base.weight.data += 1

    def assign():
        base.weight.data = dense

    def replace():
        base.weight = nn.Parameter(dense)

    def out():
        torch.add(dense, 1, out=base.weight)

    for write in (
        add,
        assign,
        replace,
        out,
        lambda: base.weight.data.copy_(dense),
        lambda: nn.init.zeros_(base.weight),
    ):
        with pytest.raises(RuntimeError, match="compressed"):
            write()
    assert torch.equal(base.weight.clone(), dense)


def test_the_weight_of_an_adapted_layer_has_the_dtype_of_its_inputs(load):
    """Models cast to it (`x.to(self.proj.weight.dtype)`); packed codes are integers."""
    model = adapted(load("llama"), config_of("lora", ["q_proj"])).to(torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert "qweight" in layer.base_layer._parameters and layer.weight.dtype is torch.bfloat16


def test_prompts_are_not_merged(load):
    model = peft.get_peft_model(load("llama"), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        merge_and_unload(model)
    assert any(isinstance(module, EfficientLinear) for module in model.modules()), "nothing was dequantized"


@pytest.mark.own_loop
@pytest.mark.parametrize("name, options", [("llama", dict(use_dora=True)), ("qwen3_moe", {})])
def test_generating_with_adapters_on_and_off(name, options, load):
    model = adapted(load(name), config_of("lora", ALL, **options))
    model.generation_config.eos_token_id = None

    def generated():
        return [model.generate(input_ids=IDS, max_new_tokens=8, do_sample=False) for _ in range(2)]

    def expected():
        ids = IDS
        for _ in range(8):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        return ids

    with_adapter = expected()
    assert all(torch.equal(tokens, with_adapter) for tokens in generated())
    with model.disable_adapter():
        without = expected()
        assert not torch.equal(without, with_adapter)
        assert all(torch.equal(tokens, without) for tokens in generated())
    assert all(torch.equal(tokens, with_adapter) for tokens in generated())


def test_peft_is_served_from_the_moment_it_is_imported():
    """Looking for a package without importing it, as transformers does, changes nothing. Here hf_efficient came
    before peft; the other way round it serves at once."""
    called = []
    finder = hf_efficient._RegisterAfterImport("this", lambda: called.append("this"))
    sys.modules.pop("this", None)
    sys.meta_path.insert(0, finder)
    try:
        assert importlib.util.find_spec("this") and finder in sys.meta_path and not called
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module("this")
        assert called == ["this"] and finder not in sys.meta_path
    finally:
        sys.meta_path[:] = [other for other in sys.meta_path if other is not finder]
    assert hf_efficient._RegisterAfterImport("no_such_package", None).find_spec("no_such_package") is None
    spec = importlib.util.spec_from_file_location("hf_efficient_again", hf_efficient.__file__)
    before = list(sys.meta_path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert sys.meta_path == before and hasattr(BaseTuner.inject_adapter, "__wrapped__")
