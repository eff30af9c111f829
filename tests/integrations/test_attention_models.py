"""Models under flash_paged against eager attention in float32, and what users are told where it cannot serve.

Greedy decoding of every architecture with every cache stands in `test_matrix.py`, continuous batching in
`test_continuous_batching.py`.
"""

import pytest
import torch
import transformers
from encoder_decoder_models import random_weights
from helpers import TINY_MODELS, assert_close, enable_checkpointing, left_padded_batch, tiny_model
from transformers import AutoModelForCausalLM, masking_utils

from hf_efficient import PagedCache


FLOAT32 = dict(rms=1e-5, maximum=1e-4, reason="float32 sums in another order")
GREEDY = dict(max_new_tokens=10, do_sample=False)


def logits(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits(name):
    """Of a left-padded batch, without a cache, with transformers' own and with one that is read in place."""
    model, batch = tiny_model(name), left_padded_batch()
    tokens = batch["attention_mask"].bool()
    expected = logits(model, "eager", **batch)[tokens]
    for cache in (dict(use_cache=False), {}, dict(past_key_values=PagedCache(model.config, block_size=8))):
        assert_close(logits(model, "flash_paged", **batch, **cache)[tokens], expected, **FLOAT32)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_packed_sequences(name):
    """Positions that restart begin another sequence: as if each had been alone."""
    model = tiny_model(name)
    parts = [torch.randint(3, 128, (1, length)) for length in (4, 9, 6)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = dict(input_ids=torch.cat(parts, 1), position_ids=positions, use_cache=False)
    alone = torch.cat([logits(model, "eager", input_ids=part) for part in parts], 1)
    assert_close(logits(model, "flash_paged", **packed), alone, **FLOAT32)
    with pytest.raises(ValueError, match="position_ids restart.*use_cache=False"):
        logits(model, "flash_paged", **{**packed, "use_cache": True}, past_key_values=PagedCache(model.config))


# of rows in which sequences begin at other positions than 0, or of several rows
PACKED_ROWS = {
    "two rows": [[*range(5), *range(7)], [*range(3), *range(9)]],
    "cut at the left": [[*range(2, 6), *range(8)]],
    "cut twice": [[*range(6), *range(3, 9)]],
}


@pytest.mark.parametrize("rows", PACKED_ROWS.values(), ids=PACKED_ROWS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_packed_rows_with_gradients(name, rows):
    """As if each sequence had been alone. Of several rows as under eager attention, where the masks of some models know
    no positions."""
    model, positions = tiny_model(name), torch.tensor(rows)
    ids, weights = torch.randint(3, 128, positions.shape), torch.randn(*positions.shape, 128) / 10

    def outputs(implementation, parts):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        outs = [model(ids[:, part], position_ids=positions[:, part], use_cache=False).logits for part in parts]
        (torch.cat(outs, 1) * weights).sum().backward()
        return torch.cat([x.flatten() for x in (*outs, *(each.grad for each in model.parameters()))])

    cuts = [0, *(i for i in range(1, 12) if rows[0][i] != rows[0][i - 1] + 1), 12]
    alone = [slice(None)] if len(rows) > 1 else list(map(slice, cuts, cuts[1:]))
    assert_close(outputs("flash_paged", [slice(None)]), outputs("eager", alone), **FLOAT32)


def test_packed_rows_in_one_graph():
    """There the positions are not known before the graph runs."""
    model, ids = tiny_model("mistral", num_hidden_layers=1), torch.randint(3, 128, (2, 12))
    model.set_attn_implementation("flash_paged")
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    for rows in (PACKED_ROWS["two rows"], [[*range(12)]] * 2):
        inputs = dict(input_ids=ids, position_ids=torch.tensor(rows), use_cache=False)
        with torch.no_grad():
            actual = forward(**inputs).logits
        expected = logits(model, "eager", **inputs)
        model.set_attn_implementation("flash_paged")
        assert_close(actual, expected, **FLOAT32)
    torch._dynamo.reset()


def test_dynamo_warns_of_nothing(monkeypatch):
    warned = []
    monkeypatch.setattr("torch._dynamo.utils.warn_once", warned.append)
    model = tiny_model("llama", num_hidden_layers=1)
    model.set_attn_implementation("flash_paged")
    with torch.no_grad():
        torch.compile(model.forward, backend="eager")(torch.randint(3, 128, (2, 12)))
    torch._dynamo.reset()
    assert not warned


def test_cumulative_lengths_of_the_caller_are_kept():
    """`DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives them beside the positions."""
    model, ids = tiny_model("llama"), torch.randint(3, 128, (1, 12))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = dict(input_ids=ids, position_ids=torch.tensor([[*range(5), *range(3, 10)]]), use_cache=False)
    lengths = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=7, max_length_k=7)
    expected = logits(model, "eager", **packed)
    assert_close(logits(model, "flash_paged", **packed, **lengths), expected, **FLOAT32)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_beam_search(name):
    model, batch = tiny_model(name), left_padded_batch()
    options = dict(**GREEDY, num_beams=3, num_return_sequences=2)
    model.set_attn_implementation("eager")
    expected = model.generate(**batch, **options)
    model.set_attn_implementation("flash_paged")
    assert torch.equal(model.generate(**batch, **options), expected)


MLA = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=12, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention(name):
    """Keys of head dim 24, values of 12; transformers' cache and ours hold the latents, which become keys and values
    later."""
    config = getattr(transformers, f"{name}Config")(**MLA)
    model, batch = random_weights(AutoModelForCausalLM.from_config(config)), left_padded_batch()
    tokens = batch["attention_mask"].bool()
    expected = logits(model, "eager", **batch)[tokens]
    assert_close(logits(model, "flash_paged", **batch)[tokens], expected, **FLOAT32)
    model.set_attn_implementation("eager")
    expected = model.generate(**batch, **GREEDY)
    model.set_attn_implementation("flash_paged")
    for cache in (None, PagedCache(model.config)):
        assert torch.equal(model.generate(**batch, **GREEDY, past_key_values=cache), expected)


SIZES = dict(
    vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=2,
)  # fmt: skip
WHISPER = dict(
    num_mel_bins=8, max_source_positions=20, max_target_positions=32, suppress_tokens=None, begin_suppress_tokens=None
)  # fmt: skip
T5GEMMA = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_key_value_heads=2,
    head_dim=16,
    sliding_window=4,
)  # fmt: skip
ENCODER_DECODERS = {
    "BartForConditionalGeneration": ("BartConfig", dict(**SIZES, max_position_embeddings=64, forced_eos_token_id=None)),
    "MarianMTModel": ("MarianConfig", dict(**SIZES, max_position_embeddings=64, forced_eos_token_id=None)),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**SIZES, **WHISPER}),
    "T5GemmaForConditionalGeneration": (
        "T5GemmaConfig",
        dict(encoder=T5GEMMA, decoder=T5GEMMA, vocab_size=128, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    ),
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders(name):
    """Padding at the right of the encoder and of the decoder; attention that is not causal, and cross attention, whose
    queries are all tokens however the keys are padded (transformers' own flash attention drops some)."""
    config, arguments = ENCODER_DECODERS[name]
    model = random_weights(getattr(transformers, name)(getattr(transformers, config)(**arguments)))
    if name.startswith("Whisper"):
        inputs = dict(input_features=torch.randn(3, 8, 40))
    else:
        inputs = {key: tensor.flip(1) for key, tensor in left_padded_batch().items()}
    for lengths in ((6, 4, 5), (4, 11, 9)):  # the second as wide as the encoder's
        decoder = left_padded_batch(lengths, seed=1)
        mask = decoder["attention_mask"].flip(1)
        targets = dict(decoder_input_ids=decoder["input_ids"].flip(1), decoder_attention_mask=mask)
        expected = logits(model, "eager", **inputs, **targets)[mask.bool()]
        assert_close(logits(model, "flash_paged", **inputs, **targets)[mask.bool()], expected, **FLOAT32)
    for options in (GREEDY, dict(**GREEDY, num_beams=2)):
        model.set_attn_implementation("eager")
        expected = model.generate(**inputs, **options)
        model.set_attn_implementation("flash_paged")
        assert torch.equal(model.generate(**inputs, **options), expected)


@pytest.mark.parametrize(
    "name, extra",
    [
        ("Bert", {}),
        ("ModernBert", dict(local_attention=8, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)),
    ],
)
def test_encoders(name, extra):
    """Attention to everything, and within a window on both sides."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
        pad_token_id=0, **extra
    )  # fmt: skip
    model, batch = random_weights(getattr(transformers, f"{name}Model")(config)), left_padded_batch((5, 30, 17))
    tokens, states = batch["attention_mask"].bool(), {}
    for name in ("eager", "flash_paged"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            states[name] = model(**batch).last_hidden_state[tokens]
    assert_close(states["flash_paged"], states["eager"], **FLOAT32)


# Attention that transformers adds a bias to (T5, ALiBi) without asking a registered implementation.
@pytest.mark.parametrize(
    "name", ["T5ForConditionalGeneration", "BloomForCausalLM", "MptForCausalLM", "FalconForCausalLM"]
)
def test_models_with_attention_of_their_own_are_refused(name):
    config = getattr(transformers, name.split("For")[0] + "Config")()
    with torch.device("meta"), pytest.raises(ValueError, match=rf'{name} does not support flash attention.*"eager"'):
        getattr(transformers, name)._from_config(config, attn_implementation="flash_paged")


@pytest.mark.parametrize("name", TINY_MODELS)
def test_attention_weights_are_refused(name):
    model, batch = tiny_model(name), left_padded_batch()
    model.set_attn_implementation("flash_paged")
    for cache in (None, PagedCache(model.config)):
        with pytest.raises(ValueError, match='output_attentions=True.*attn_implementation="eager"'):
            logits(model, "flash_paged", **batch, output_attentions=True, past_key_values=cache)
    with pytest.raises(ValueError, match='output_attentions=True.*attn_implementation="eager"'):
        model.generate(**batch, **GREEDY, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="'eager'"):
        model.config.output_attentions = True


def test_attention_weights_of_encoders_are_refused():
    config = transformers.BartConfig(**ENCODER_DECODERS["BartForConditionalGeneration"][1])
    model = transformers.BartForConditionalGeneration(config).eval()
    model.set_attn_implementation("flash_paged")
    ids = torch.ones(1, 4, dtype=torch.long)
    for asked in (model, model.get_encoder()):
        with torch.no_grad(), pytest.raises(ValueError, match='output_attentions=True.*"eager"'):
            asked(input_ids=ids, output_attentions=True)


def gradients(model, implementation, **inputs):
    """Loss, and name -> gradient of every parameter that has one."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), found


def labelled(batch):
    """`batch` with labels for every token that follows one: what stands at padding is not compared."""
    follows = batch["attention_mask"].cumsum(-1) > 1
    return {**batch, "labels": batch["input_ids"].masked_fill(~follows, -100)}


def assert_same_gradients(model, **inputs):
    (loss, own), (expected_loss, expected) = (gradients(model, name, **inputs) for name in ("flash_paged", "eager"))
    assert loss == pytest.approx(expected_loss, rel=1e-5) and own.keys() == expected.keys() and len(own) > 5
    everything = [torch.cat([each.flatten() for each in found.values()]) for found in (own, expected)]
    assert_close(*everything, **FLOAT32)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_gradients(name):
    """Of a left-padded batch, and of sequences in one row."""
    model, batch = tiny_model(name), left_padded_batch()
    assert_same_gradients(model, **labelled(batch))
    ids = torch.randint(3, 128, (1, 12))
    assert_same_gradients(model, input_ids=ids, labels=ids)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_with_checkpointing(use_reentrant):
    model, batch = tiny_model("llama").train(), left_padded_batch()
    enable_checkpointing(model, dict(use_reentrant=use_reentrant))
    model.enable_input_require_grads()
    assert_same_gradients(model, **labelled(batch))


def test_packed_sequences_are_trained_as_if_alone():
    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    parts = [torch.randint(3, 128, (1, length)) for length in (4, 9, 6)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    weights = [torch.randn(1, part.shape[1], 128) for part in parts]
    (
        model(input_ids=torch.cat(parts, 1), position_ids=positions, use_cache=False).logits * torch.cat(weights, 1)
    ).sum().backward()
    own = torch.cat([each.grad.flatten() for each in model.parameters()])
    model.zero_grad()
    model.set_attn_implementation("eager")
    for part, weight in zip(parts, weights):
        (model(input_ids=part).logits * weight).sum().backward()
    assert_close(own, torch.cat([each.grad.flatten() for each in model.parameters()]), **FLOAT32)


def test_attention_dropout_is_refused_in_training():
    """gpt2 has it by default."""
    model, batch = tiny_model("gpt2").train(), left_padded_batch()
    model.set_attn_implementation("flash_paged")
    with pytest.raises(ValueError, match='attention dropout 0.1.*train with attn_implementation="sdpa"'):
        model(**batch, labels=batch["input_ids"])


def test_training_through_trainer(tmp_path):
    """The losses of `train` and `evaluate`."""
    batch = left_padded_batch((8, 8))
    rows = [{"input_ids": row, "labels": row} for row in batch["input_ids"]]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, learning_rate=1e-2, report_to=[], use_cpu=True, logging_steps=1
    )
    losses = {}
    for name in ("eager", "flash_paged"):
        model = tiny_model("llama")
        model.set_attn_implementation(name)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trained = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses[name] = [*trained, trainer.evaluate()["eval_loss"]]
    assert len(losses["eager"]) == 5 and losses["eager"][0] > 2 * losses["eager"][-1] - losses["eager"][0]
    assert losses["flash_paged"] == pytest.approx(losses["eager"], rel=1e-3)


def test_frozen_models_run_in_training_mode():
    """Without gradients to compute nothing stands in the way, but dropout does."""
    model, batch = tiny_model("llama").train().requires_grad_(False), left_padded_batch()
    model.set_attn_implementation("flash_paged")
    assert model(**batch, labels=batch["input_ids"]).loss.isfinite()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r'attention dropout 0.1: flash_paged has none; call model.eval\(\).*"sdpa"'):
        model(**batch)


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # one mask for all layers, one for each kind
def test_masks_of_four_dimensions_are_refused(name):
    model, batch = tiny_model(name), left_padded_batch()
    mask = torch.ones(3, 1, 11, 11, dtype=torch.bool).tril()
    if name == "gemma2":
        mask = {"full_attention": mask, "sliding_attention": mask}
    with pytest.raises(ValueError, match='attention_mask with 4 dimensions.*"sdpa"'):
        logits(model, "flash_paged", input_ids=batch["input_ids"], attention_mask=mask)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_head_masks_are_ignored_as_by_every_implementation(name):
    model, batch = tiny_model(name), left_padded_batch()
    tokens, mask = batch["attention_mask"].bool(), torch.zeros(2, 4)
    expected = logits(model, "eager", **batch, head_mask=mask)[tokens]
    assert_close(logits(model, "flash_paged", **batch, head_mask=mask)[tokens], expected, **FLOAT32)


def test_masks_of_a_model_are_refused_inside_a_compiled_graph():
    """There closures cannot be looked into. Without fullgraph transformers runs the mask uncompiled, and the error says
    why."""
    config = tiny_model("mistral").config
    config._attn_implementation = "flash_paged"

    def mask(embeddings, **extra):
        return masking_utils.create_sliding_window_causal_mask(
            config=config, inputs_embeds=embeddings, attention_mask=None, past_key_values=None, **extra
        )

    def own(batch, head, query, key):
        return key > 0

    embeddings = torch.zeros(1, 6, 64)
    assert torch.compile(mask, backend="eager", fullgraph=True)(embeddings) is None
    for fullgraph, error in ((True, torch._dynamo.exc.Unsupported), (False, ValueError)):
        with pytest.raises(error, match="flash_paged cannot express"):
            torch.compile(mask, backend="eager", fullgraph=fullgraph)(embeddings, and_mask_function=own)
    torch._dynamo.reset()
