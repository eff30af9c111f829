"""Mixtures whose experts are not all on the device: the same bits as with all of them, and what moved."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_same_tensors, left_padded_batch, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from hf_efficient import ExpertOffload, PagedCache, PromptLookup, W8A8Config, WeightOnlyConfig, speculative_generate
from hf_efficient.expert_offload.copies import Copier
from hf_efficient.expert_offload.residents import Counts, Residents, by_expert


BATCH = left_padded_batch()
ONE = {name: tensor[1:2] for name, tensor in BATCH.items()}
CONFIGS = {"int4": WeightOnlyConfig(bits=4, group_size=32), "w8a8": W8A8Config()}


def expert_bytes(model) -> int:
    """Of one expert in every layer."""
    return sum(
        tensor[0].nbytes for name, tensor in model.state_dict().items() if ".experts." in name and tensor.ndim > 2
    )


def generated(model, inputs, **options):
    options = dict(max_new_tokens=10, do_sample=False, output_logits=True, return_dict_in_generate=True) | options
    with torch.no_grad():
        return model.generate(**inputs, **options)


def assert_same(found, expected) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.logits, expected.logits, strict=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Compressed models by name, saved."""
    made = {}
    for name, config in CONFIGS.items():
        dense, made[name] = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp(name)
        tiny_model("qwen3_moe", torch.bfloat16, num_experts=8).save_pretrained(dense)
        AutoModelForCausalLM.from_pretrained(dense, quantization_config=config).save_pretrained(made[name])
    return made


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_dense_experts(name, implementation, tmp_path):
    model = tiny_model(name, torch.bfloat16)
    model.set_experts_implementation(implementation)
    expected = generated(model, BATCH), generated(model, ONE)
    for policy in ("lru" if implementation == "grouped_mm" else "frequency", "predicted"):
        offload = ExpertOffload(2 * expert_bytes(model), policy, disk=tmp_path)
        offload.attach(model)
        assert_same(generated(model, BATCH), expected[0])
        assert_same(generated(model, ONE), expected[1])
        stats = offload.stats()
        assert stats["experts"] == 8 and stats["resident"] == 4
        assert 0 < stats["hits"] and 0 < stats["misses"] and stats["bytes_to_device"] > 0
        assert (stats["prefetched_used"] > 0) == (policy == "predicted")
        offload.detach()
        assert not list(tmp_path.iterdir())  # its files are gone
        assert_same(generated(model, ONE), expected[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_compressed_experts(name, folders, tmp_path):
    expected = AutoModelForCausalLM.from_pretrained(folders[name])
    model = AutoModelForCausalLM.from_pretrained(folders[name])
    offload = ExpertOffload(3 * expert_bytes(model), "predicted", disk=tmp_path)
    offload.attach(model)
    for inputs in (BATCH, ONE, ONE):  # the last one on captured forwards
        assert_same(generated(model, inputs), generated(expected, inputs))
    assert 4 <= offload.stats()["resident"] <= 6 and 0.1 < offload.stats()["hit_rate"] < 1
    assert_same_tensors(model.state_dict(), expected.state_dict())
    offload.detach()
    assert_same(generated(model, ONE), generated(expected, ONE))


@pytest.mark.parametrize("compressed", [False, True])
def test_speculation_and_pages(compressed, folders):
    if compressed:
        model = AutoModelForCausalLM.from_pretrained(folders["int4"])
    else:
        model = tiny_model("qwen3_moe", torch.bfloat16, num_experts=8)
    model.generation_config.pad_token_id = 0
    ways = [
        lambda: generated(model, ONE, past_key_values=PagedCache(model.config)).sequences,
        lambda: generated(model, BATCH, past_key_values=PagedCache(model.config)).sequences,
        lambda: generated(model, ONE, prompt_lookup_num_tokens=3).sequences,
        lambda: model.generate(
            **ONE, max_new_tokens=10, do_sample=False, custom_generate=speculative_generate, draft_model=PromptLookup()
        ),
    ]
    expected = [way() for way in ways]
    offload = ExpertOffload(3 * expert_bytes(model), "predicted")
    offload.attach(model)
    assert all(torch.equal(way(), wanted) for way, wanted in zip(ways, expected))
    assert offload.stats()["misses"] > 0


def test_what_is_saved_and_loaded(tmp_path):
    model = tiny_model("mixtral", torch.bfloat16)
    model.save_pretrained(tmp_path / "before")
    offload = ExpertOffload(expert_bytes(model), disk=tmp_path)
    offload.attach(model)
    generated(model, ONE)
    model.save_pretrained(tmp_path / "after")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    other = tiny_model("mixtral", torch.bfloat16, seed=1)
    model.load_state_dict(other.state_dict())
    assert_same(generated(model, ONE), generated(other, ONE))
    del model, offload
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]  # files end with the model


def residents(policy: str, most: int = 2, experts: int = 6) -> Residents:
    weights = {"weight": torch.arange(experts).repeat(3, 1).T.contiguous()}
    return Residents(by_expert(weights), most, policy, Copier(torch.device("cpu")), Counts())


def test_which_experts_stay():
    lru = residents("lru")
    for active in ([0], [1], [0], [2]):  # 1 was used longest ago
        lru.begin(active)
        assert all(lru.get(expert)["weight"].tolist() == [expert] * 3 for expert in active)
    assert set(lru._held) == {0, 2}
    lru.begin([2, 3, 4, 5])  # one that is needed now is never replaced: two of them only pass
    assert 2 in lru._held and len(lru._held) == 2
    assert [lru.get(expert)["weight"][0].item() for expert in (2, 3, 4, 5)] == [2, 3, 4, 5]
    often = residents("frequency")
    for active in ([0], [0], [0], [1], [1], [2], [3]):
        often.begin(active)
    assert set(often._held) == {0, 1}
    assert (often.counts.hits, often.counts.misses) == (3, 4)
    assert often.counts.bytes_to_device == 2 * 24  # those that were passing lie in the same memory
    ahead = residents("predicted")
    ahead.prefetch([5, 4, 3])
    assert set(ahead._held) == {4, 5} and ahead.get(5)["weight"].tolist() == [5] * 3
    ahead.begin([5])
    assert (ahead.counts.hits, ahead.counts.prefetched, ahead.counts.prefetched_used) == (1, 2, 1)


@pytest.mark.parametrize("policy", ["lru", "predicted"])
def test_forwards_of_two_threads(policy, monkeypatch):
    """They take turns in a layer: none writes over the experts that another one reads."""
    model, rows = tiny_model("qwen3_moe", torch.bfloat16, num_experts=8), torch.arange(3, 27).view(2, 1, 12)
    logits = torch.no_grad()(lambda ids: model(ids).logits)
    expected = [logits(ids) for ids in rows]
    ExpertOffload(2 * expert_bytes(model), policy).attach(model)
    get = Residents.get
    monkeypatch.setattr(Residents, "get", lambda *args: time.sleep(1e-3) or get(*args))  # time for the other thread
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(logits, [*rows] * 4))
    assert all(map(torch.equal, found, expected * 4))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(device_memory=100), "device_memory=100 has no room for one expert of each of 2 layers"),
        (dict(device_memory="some"), "device_memory='some': must be"),
        (dict(device_memory="1MB", policy="mru"), "policy='mru': must be one of lru, frequency, predicted"),
        (dict(device_memory="1MB", disk="/nowhere"), "disk='/nowhere': must be a folder that exists"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExpertOffload(**arguments).attach(tiny_model("mixtral"))


def test_what_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        ExpertOffload("1MB").attach(tiny_model("llama"))
    model, offload = tiny_model("mixtral"), ExpertOffload("1MB")
    offload.attach(model)
    with pytest.raises(ValueError, match="serves a model already"):
        offload.attach(model)
    with pytest.raises(ValueError, match="is offloaded by another ExpertOffload"):
        ExpertOffload("1MB").attach(model)
    with pytest.raises(RuntimeError, match="compute no gradients"):
        model(**ONE)
    with pytest.raises(ValueError, match="cannot be cast"):
        model.half()
    with pytest.raises(ValueError, match="neither copied nor pickled"):
        copy.deepcopy(model)
    model.to("cpu")  # moves nothing


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["lru", "frequency", "predicted"])
def test_on_a_gpu(policy):
    model = tiny_model("qwen3_moe", torch.bfloat16, num_experts=8)
    on_device = {name: tensor.cuda() for name, tensor in ONE.items()}
    expected = generated(copy.deepcopy(model).cuda(), on_device)
    offload = ExpertOffload(2 * expert_bytes(model), policy, device="cuda")
    offload.attach(model)
    assert torch.equal(generated(model, on_device).sequences, expected.sequences)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.is_pinned() and model.model.embed_tokens.weight.is_cuda
    assert offload.stats()["bytes_to_device"] > 0
    offload.detach()
    assert experts.gate_up_proj.is_cuda
    assert torch.equal(generated(model, on_device).sequences, expected.sequences)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_model_that_accelerate_placed(compressed, folders):
    """With hooks on every module, as of a `device_map` over several devices: they stay, and so do the bits."""
    from accelerate import dispatch_model

    load = AutoModelForCausalLM.from_pretrained
    made = [load(folders["int4"]) if compressed else tiny_model("qwen3_moe", torch.bfloat16) for _ in range(2)]
    model, expected = (each.eval() for each in made)
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = dispatch_model(model, {**places, "lm_head": "cpu"}, force_hooks=True)
    hooked = {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    offload = ExpertOffload(2 * expert_bytes(model), "predicted")
    with pytest.raises(ValueError, match="device='cpu': the device_map of Qwen3MoeForCausalLM says where"):
        ExpertOffload("1MB", device="cpu").attach(model)
    offload.attach(model)
    assert_same(generated(model, BATCH), generated(expected, BATCH))
    assert offload.stats()["misses"] > 0
    offload.detach()
    assert {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")} == hooked
    misses = offload.stats()["misses"]
    assert_same(generated(model, BATCH), generated(expected, BATCH))
    assert offload.stats()["misses"] == misses


def test_experts_that_accelerate_offloaded(tmp_path):
    from accelerate import cpu_offload

    with pytest.raises(ValueError, match=r"is offloaded by accelerate: .* give ExpertOffload\(disk="):
        ExpertOffload("1MB").attach(cpu_offload(tiny_model("mixtral")))


@pytest.mark.parametrize("name", [None, "int4"])
def test_continuous_batching(name, folders):
    """Requests of several lengths: the same tokens."""
    load = AutoModelForCausalLM.from_pretrained
    model = tiny_model("qwen3_moe", torch.bfloat16) if name is None else load(folders[name])
    prompts = [[5, 17, 40, 99, 12], [33] * 3, list(range(60, 76))]
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)

    def answers():
        pages = ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=24)
        outputs = model.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=pages, progress_bar=False
        )
        assert not any(output.error for output in outputs.values())
        return [outputs[key].generated_tokens for key in sorted(outputs, key=lambda key: int(key.split("_")[-1]))]

    expected, offload = answers(), ExpertOffload(2 * expert_bytes(model), "lru")
    offload.attach(model)
    assert answers() == expected and offload.stats()["misses"] > 0
