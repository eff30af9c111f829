"""`estimate` against what is really saved, allocated and computed."""

import functools
import json
import struct

import pytest
import table
import torch
import transformers
from helpers import TINY_MODELS, save_tiny, threads
from torch.utils.flop_counter import FlopCounterMode

import hf_efficient
from hf_efficient.cli import main
from hf_efficient.cli.config_option import make_config
from hf_efficient.evaluation import devices, memory, roofline
from hf_efficient.kernels.native import tiers
from hf_efficient.kernels.widened_products import multiplies_bfloat16


HERE = devices.Device("here", "cpu", 16 * 10**9, 1e10, {"float32": 1e11, "bfloat16": 2e11, "int8": 4e11}, "made up")
BATCH, PROMPT, NEW = 3, 100, 80
SHAPE = dict(vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=2048)
SHAPES = {
    "dense": ("LlamaConfig", dict(SHAPE, intermediate_size=352, num_key_value_heads=2)),
    "sliding": ("MistralConfig", dict(SHAPE, intermediate_size=352, num_key_value_heads=2, sliding_window=32)),
    "mixture": (
        "MixtralConfig",
        dict(SHAPE, intermediate_size=192, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2),
    ),
    "encoder": ("BertConfig", dict(SHAPE, intermediate_size=384, architectures=["BertForMaskedLM"])),
    "encoder-decoder": (
        "T5Config",
        dict(vocab_size=512, d_model=128, d_kv=16, d_ff=352, num_layers=3, num_heads=8, decoder_start_token_id=0),
    ),
}
CONFIGS = {
    "none": None,
    "int4": hf_efficient.WeightOnlyConfig(bits=4, group_size=32),
    "w8a8": hf_efficient.W8A8Config(),
}
EMBEDDED = hf_efficient.WeightOnlyConfig(bits=4, group_size=32, method="rtn", embeddings=True)


def config_of(name: str):
    cls, arguments = SHAPES[name]
    return getattr(transformers, cls)(**arguments, dtype="bfloat16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models of the shapes, saved on first use."""
    made = {}

    def folder(name: str):
        if name not in made:
            config = config_of(name)
            auto = {"encoder": "AutoModelForMaskedLM", "encoder-decoder": "AutoModelForSeq2SeqLM"}
            model = getattr(transformers, auto.get(name, "AutoModelForCausalLM")).from_config(config)
            made[name] = tmp_path_factory.mktemp("shapes") / name
            model.to(torch.bfloat16).save_pretrained(made[name])
        return made[name]

    return folder


def load(folder, quantization=None):
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype="auto", quantization_config=quantization)
    return model.eval()


def saved_bytes(folder) -> int:
    """Of the tensors in a folder's safetensors files, without their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        total += len(content) - 8 - struct.unpack("<Q", content[:8])[0]
    return total


def most_allocated(run) -> int:
    """The most bytes that torch's CPU allocator had given out at once since `run` began."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("quantization", CONFIGS)
@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_those_of_the_loaded_and_saved_model(name, quantization, folders, tmp_path):
    check_sizes(folders(name), CONFIGS[quantization], tmp_path)


def check_sizes(folder, quantization, tmp_path):
    estimate = hf_efficient.estimate(folder, quantization, batch_size=BATCH, device=HERE)
    model = load(folder, quantization)
    model.save_pretrained(tmp_path)
    assert estimate.checkpoint_bytes == saved_bytes(tmp_path)
    assert estimate.weight_bytes == memory.weight_bytes(model)
    assert estimate.parameters == load(folder).num_parameters()
    assert estimate.architecture == type(model).__name__
    again = hf_efficient.estimate(tmp_path, device=HERE, batch_size=BATCH)  # of the compressed checkpoint itself
    assert again == estimate


@pytest.mark.parametrize("name", ["dense", "tied", "encoder-decoder"])
def test_sizes_with_a_compressed_embedding(name, folders, tmp_path):
    folder = folders("dense" if name == "tied" else name)
    if name == "tied":
        config = config_of("dense")
        config.tie_word_embeddings = True
        folder = tmp_path / "tied"
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    check_sizes(folder, EMBEDDED, tmp_path / "saved")
    plain, own = (hf_efficient.estimate(folder, config, device=HERE) for config in (None, EMBEDDED))
    assert (own.parameters, own.active_parameters) == (plain.parameters, plain.active_parameters)
    assert own.decode.flops == plain.decode.flops and own.decode.bytes_moved < plain.decode.bytes_moved


@pytest.fixture
def one_thread():
    """Some kernels allocate for each thread: 3 % of what these tiny models take, which `estimate` does not count."""
    yield from threads(1)


def _spread_evenly(router) -> None:
    """Each expert gets as many tokens, as `estimate` takes it."""
    choose = router.forward

    def forward(hidden):
        logits, weights, index = choose(hidden)
        return logits, weights, torch.arange(index.numel()).view_as(index) % 4

    router.forward = forward


@pytest.mark.parametrize("quantization", CONFIGS)
@pytest.mark.parametrize("name", ["dense", "sliding", "mixture", "encoder"])
def test_activations_are_what_the_allocator_gives_out(name, quantization, folders, one_thread):
    chosen = dict(batch_size=BATCH, prompt_tokens=PROMPT, new_tokens=NEW, device=HERE)
    estimate = hf_efficient.estimate(folders(name), CONFIGS[quantization], **chosen)
    model = load(folders(name), CONFIGS[quantization])
    model.set_attn_implementation("flash_paged")
    for layer in model.model.layers if name == "mixture" else ():
        _spread_evenly(layer.mlp.gate)
    ids, options = torch.randint(3, 500, (BATCH, PROMPT)), {}
    with torch.no_grad():
        model(ids)  # what kernels allocate once
    if name != "encoder":
        options = dict(past_key_values=hf_efficient.PagedCache(model.config), logits_to_keep=1)
    measured = most_allocated(lambda: model(ids, **options))
    if options:
        measured -= options["past_key_values"].stats().bytes_allocated
    # torch's operators dequantize parts of a weight, which `estimate` does not count: at most 2 M numbers at a time
    dequantizes = tiers.tier() is tiers.TORCH and quantization == "int4"
    if not multiplies_bfloat16() and (quantization == "none" or name == "encoder"):
        # torch copies operands of dense products in bfloat16, which `estimate` does not count either
        assert 0.5 * measured < estimate.activation_bytes < 1.02 * measured
        return
    assert estimate.activation_bytes == pytest.approx(measured, rel=0.08 if dequantizes else 0.02)


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8", "int4", "int2"])
@pytest.mark.parametrize("name", ["dense", "sliding"])
def test_the_cache_is_what_paged_cache_allocates(name, kv_format, folders):
    prompt, new = (300, 60) if kv_format in ("int4", "int2") else (PROMPT, NEW)
    chosen = dict(batch_size=BATCH, prompt_tokens=prompt, new_tokens=new)
    estimate = hf_efficient.estimate(folders(name), kv_format=kv_format, **chosen)
    model = load(folders(name))
    model.set_attn_implementation("flash_paged")
    cache, ids, most = hf_efficient.PagedCache(model.config, kv_format=kv_format), torch.ones(BATCH, prompt).long(), 0
    with torch.no_grad():
        for _ in range(new):
            ids = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            rings = sum(tensor.nbytes for layer in cache.layers for tensor in layer.store.rows.values())
            most = max(most, cache.stats().bytes_allocated + rings)
    assert estimate.kv_cache_bytes == most
    stats = cache.stats()
    per_block = stats.bytes_used / stats.blocks_used * len(set(map(id, cache.states)))
    assert estimate.kv_token_bytes == pytest.approx(per_block / cache.block_size)


def test_a_cache_that_paged_cache_cannot_hold_is_that_of_transformers(folders):
    chosen = dict(batch_size=BATCH, prompt_tokens=30, new_tokens=12)
    estimate = hf_efficient.estimate(folders("encoder-decoder"), **chosen)
    assert any("encoder-decoder" in note for note in estimate.notes)
    output = load(folders("encoder-decoder")).generate(
        torch.ones(BATCH, 30).long(), max_new_tokens=12, min_new_tokens=12, return_dict_in_generate=True
    )
    parts = (output.past_key_values.self_attention_cache, output.past_key_values.cross_attention_cache)
    held = sum(tensor.nbytes for part in parts for layer in part.layers for tensor in (layer.keys, layer.values))
    assert estimate.kv_cache_bytes == held
    with pytest.raises(ValueError, match="encoder-decoder"):
        hf_efficient.estimate(folders("encoder-decoder"), kv_format="int8", **chosen)


def _counted(model, **inputs) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["dense", "sliding", "mixture", "encoder", "encoder-decoder"])
def test_flops_are_those_that_torch_counts_less_what_masks_hide(name, folders):
    estimate = hf_efficient.estimate(folders(name), batch_size=BATCH, prompt_tokens=PROMPT, new_tokens=1)
    model = load(folders(name)).float()
    model.set_attn_implementation("eager")
    ids, options = torch.ones(BATCH, PROMPT).long(), {}
    if name == "mixture":
        model.set_experts_implementation("eager")
    if name == "encoder-decoder":
        options = {"decoder_input_ids": torch.ones(BATCH, 1).long()}
    elif name != "encoder":
        options = {"logits_to_keep": 1}
    counted = _counted(model, input_ids=ids, **options)
    heads, dim = (8, 16)
    window = {"sliding": 32, "dense": PROMPT, "mixture": PROMPT}.get(name)
    if window is not None:
        seen = sum(min(position + 1, window) for position in range(PROMPT))
        counted -= 3 * 2 * BATCH * heads * 2 * dim * (PROMPT * PROMPT - seen)  # three layers, keys and values
    assert estimate.prefill.flops == pytest.approx(counted, rel=1e-3)  # rotary frequencies and their like
    if name == "dense":
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        step = _counted(model, input_ids=ids[:, :1], past_key_values=cache)
        assert estimate.decode.flops == pytest.approx(step, rel=1e-3)


# what loads without data in tests/table.py; the rest has the same formats
FORMATS = [name for name, row in table.METHODS.items() if not make_config(row).needs_calibration()]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def dense_bytes(tiny_folder):
    return hf_efficient.estimate(tiny_folder).checkpoint_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_its_size(name, tiny_folder, tmp_path):
    quantization = make_config(table.METHODS[name])
    estimate = hf_efficient.estimate(tiny_folder, quantization, device=HERE, prompt_tokens=8, new_tokens=2)
    model = load(tiny_folder, quantization)
    model.save_pretrained(tmp_path)
    assert estimate.checkpoint_bytes == saved_bytes(tmp_path)
    # doubly quantized scales stay part of the padded blocks that they were rounded in
    tolerance = 0.03 if name == "nf4_double" else 0
    assert estimate.weight_bytes == pytest.approx(memory.weight_bytes(model), rel=tolerance)


@pytest.mark.parametrize("name", sorted(set(table.METHODS) - set(FORMATS)))
def test_methods_that_need_data_are_estimated_without(name, tiny_folder, dense_bytes):
    quantization = make_config(table.METHODS[name])
    estimate = hf_efficient.estimate(tiny_folder, quantization, prompt_tokens=8, new_tokens=2)
    assert estimate.checkpoint_bytes < 0.8 * dense_bytes


def test_awq_as_saved(tiny_folder, tmp_path):
    calibration = {"texts": ["abcdefgh " * 40] * 4, "num_samples": 4, "sequence_length": 32}
    quantization = hf_efficient.WeightOnlyConfig(bits=4, group_size=32, method="awq", calibration=calibration)
    load(tiny_folder, quantization).save_pretrained(tmp_path)
    estimate = hf_efficient.estimate(tiny_folder, quantization)
    assert estimate.checkpoint_bytes == pytest.approx(saved_bytes(tmp_path), rel=0.02)


@pytest.mark.slow
def test_the_sample_model(sample_model):
    quantization = hf_efficient.WeightOnlyConfig(bits=4, group_size=64, method="rtn")
    chosen = dict(batch_size=2, prompt_tokens=64, new_tokens=1, device=HERE)
    dense, small = (hf_efficient.estimate(sample_model, each, **chosen) for each in (None, quantization))
    assert dense.checkpoint_bytes == saved_bytes(sample_model)
    assert dense.parameters == 134_515_008, "as the model's card says: 135M"
    model = load(sample_model, quantization)
    assert small.weight_bytes == memory.weight_bytes(model)
    model.set_attn_implementation("flash_paged")
    caches, ids = [hf_efficient.PagedCache(model.config) for _ in range(2)], torch.ones(2, 64).long()
    # the less of two: what another thread of this process allocates meanwhile is counted, too
    runs = [functools.partial(model, ids, past_key_values=cache, logits_to_keep=1) for cache in caches]
    measured = min(map(most_allocated, runs))
    assert small.kv_cache_bytes == caches[0].stats().bytes_allocated
    assert small.activation_bytes == pytest.approx(measured - small.kv_cache_bytes, rel=0.02)


def test_the_roofline_by_hand(folders):
    chosen = dict(batch_size=BATCH, prompt_tokens=PROMPT, new_tokens=NEW, device=HERE, price_per_hour=3.6)
    found = hf_efficient.estimate(folders("dense"), hf_efficient.W8A8Config(), **chosen)
    prefill, decode = found.prefill, found.decode
    rounded = 3 * 2 * BATCH * PROMPT * (128 * 128 * 2 + 2 * 128 * 32 + 3 * 128 * 352)  # linears of three blocks
    assert prefill.rounded_flops == rounded
    compute = (prefill.flops - rounded) / 2e11 + rounded / 4e11
    assert found.prefill_bound.compute_seconds == pytest.approx(compute)
    assert found.decode_bound.memory_seconds == pytest.approx(decode.bytes_moved / 1e10)
    assert (found.prefill_bound.limit, found.decode_bound.limit) == ("compute", "memory")
    assert decode.intensity == decode.flops / decode.bytes_moved
    assert found.decode_bound.tokens_per_second == pytest.approx(BATCH / found.decode_bound.seconds)
    seconds = found.prefill_bound.seconds + (NEW - 1) * found.decode_bound.seconds
    assert found.cost_per_million_new_tokens == pytest.approx(1e-3 * seconds / (BATCH * NEW) * 1e6)
    assert found.cost_per_million_prompt_tokens == pytest.approx(1e-3 * compute / (BATCH * PROMPT) * 1e6)
    row = (found.kv_cache_bytes + found.activation_bytes) / BATCH
    assert found.largest_batch == int((0.9 * 16e9 - found.weight_bytes) / row)
    # weights but the input embedding and the rotary frequencies; the cache at its mean length
    read = found.weight_bytes - 512 * 128 * 2 - 8 * 4
    mean = PROMPT + (NEW - 2) / 2
    assert decode.bytes_moved == pytest.approx(read + BATCH * mean * found.kv_token_bytes, rel=1e-3)
    less = hf_efficient.estimate(folders("dense"), **chosen | {"memory": "1KB"})
    assert less.largest_batch == 0


def test_few_tokens_read_few_experts(folders):
    few, many = (
        hf_efficient.estimate(folders("mixture"), batch_size=batch, prompt_tokens=8, new_tokens=2) for batch in (1, 64)
    )
    experts = 3 * 4 * 3 * 128 * 192 * 2  # bytes of all of them
    read = [each.decode.bytes_moved - each.batch_size * 8 * each.kv_token_bytes for each in (few, many)]
    assert read[1] - read[0] == pytest.approx(experts / 2, rel=1e-3)
    assert few.parameters - few.active_parameters == 512 * 128 + experts // 2 // 2


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_every_tiny_model_is_estimated_whole(name):
    cls, arguments = TINY_MODELS[name]
    small = dict(n_embd=64, n_layer=2, n_head=4) if name == "gpt2" else dict(SHAPE, hidden_size=64)
    config = getattr(transformers, cls)(**{**small, **arguments, "pad_token_id": 0, "dtype": "bfloat16"})
    found = hf_efficient.estimate(config, batch_size=2, prompt_tokens=24, new_tokens=8)
    assert found.notes == ()
    assert found.prefill.flops > found.decode.flops > 0 and found.active_parameters <= found.parameters
    assert found.total_bytes == found.weight_bytes + found.kv_cache_bytes + found.activation_bytes


def test_what_does_not_run_on_text_alone_has_its_weights():
    found = hf_efficient.estimate(transformers.WhisperConfig(), device="l4", price_per_hour=1)
    assert found.architecture == "WhisperForConditionalGeneration"
    assert found.parameters > 30e6 and found.prefill is None and found.total_bytes is None
    assert any("runs on input_features" in note for note in found.notes)


def test_a_device_is_measured(monkeypatch):
    monkeypatch.setattr(devices, "MATRIX", (512, 1024))
    monkeypatch.setattr(devices, "SQUARE", 64)
    found = devices.measure_device(seconds=0.001)
    assert found.kind in ("cpu", "accelerator") and found.bandwidth > 1e8
    assert set(found.operations) == {"float32", "bfloat16", "int8"} and min(found.operations.values()) > 1e6
    assert found.source.startswith("measured here") and found.memory_bytes > 0


def test_names_of_devices():
    assert devices.find_device("RTX 4090") is devices.DEVICES["rtx4090"]
    assert devices.DEVICES["a100"].rate("fp8", "bfloat16") == 312e12, "it has none: computed in bfloat16"
    assert roofline.largest_batch(100, 200, 1) == 0


def test_the_command_prints_a_table_or_json(tiny_folder, capsys):
    command = ["estimate", str(tiny_folder), "--batch", "2", "--device", "l4", "--price", "0.5", "--config", "none"]
    command += ["--config", '{"quant_method": "efficient_w8a8"}']
    assert main([*command, "--json"]) == 0
    plain, rounded = json.loads(capsys.readouterr().out)
    assert (plain["quantization"], rounded["quantization"]) == (None, "W8A8Config()")
    assert plain["decode_bound"]["limit"] == "memory" and plain["cost_per_million_new_tokens"] > 0
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "|  | none | int8 activations |" in printed and f"{plain['weight_bytes'] / 1e6:,.1f}" in printed
    assert "roofline of l4" in printed and "none was measured" in printed
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", str(tiny_folder), "--batch", "0"])
    assert "argument --batch: 0 is too small" in capsys.readouterr().err
