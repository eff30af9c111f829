"""`generate()` on a CPU runs the native loop where it can, and says what transformers' loop says."""

import contextlib
import threading

import pytest
import torch
import transformers
from draft_models import Recorder
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from native_loop import NATIVE_LOOP, noted_answers, served_model, transformers_loop
from transformers import LogitsProcessor, MaxLengthCriteria, modeling_utils

from hf_efficient import PagedCache, TokenRecycling, enable_speculation
from hf_efficient.cache.over_pages import over_pages
from hf_efficient.generation.replay.captured_forward import CapturedForward
from hf_efficient.integrations.transformers_releases import cache_name


pytestmark = NATIVE_LOOP
OPTIONS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=1.4, top_k=20),
    "processors": dict(do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2),
    "many": dict(do_sample=True, num_return_sequences=2),
    "ends": dict(do_sample=False, eos_token_id=list(range(3, 20))),
}


def both(model, monkeypatch, **options):
    """What transformers' loop generates, and the native loop, which must have run."""
    with transformers_loop():
        torch.manual_seed(5)
        expected = model.generate(**options)
    with monkeypatch.context() as patch:
        answers = noted_answers(patch)
        torch.manual_seed(5)
        output = model.generate(**options)
    assert answers == [True]
    return expected, output


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_are_those_of_transformers(name, monkeypatch):
    model, batch = served_model(name), left_padded_batch()
    attention = model.config._attn_implementation
    for kind in OPTIONS if name in ("llama", "mistral", "gpt2") else ("sampled", "ends"):
        expected, output = both(model, monkeypatch, **batch, **OPTIONS[kind], max_new_tokens=12)
        assert torch.equal(expected, output), kind
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", ["llama", "mistral", "opt", "mixtral"])
@pytest.mark.parametrize("rows", [1, 3])
def test_dictionaries_are_those_of_transformers(name, rows, monkeypatch):
    """Scores, logits, keys and values, of rows that end one by one, and of their padding; and generation goes on from
    them."""
    model, batch = enable_speculation(tiny_model(name)), left_padded_batch((5, 11, 8)[-rows:])
    model.generation_config.eos_token_id = [2, *range(40, 50)]
    options = dict(do_sample=True, max_new_tokens=14, pad_token_id=0, repetition_penalty=1.2, temperature=1.3)
    options.update(return_dict_in_generate=True, output_scores=True, output_logits=True)
    both_outputs = expected, output = both(model, monkeypatch, **batch, **options)
    assert type(output) is type(expected) and output.keys() == expected.keys()
    assert torch.equal(output.sequences, expected.sequences)
    assert rows == 1 or (output.sequences[:, -1] == 0).any()  # some had ended before
    for ours, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):  # the same float32 sums in another order: logits here reach 10
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    mask = batch["attention_mask"]
    mask = torch.nn.functional.pad(mask, (0, output.sequences.shape[1] + 4 - mask.shape[1]), value=1)
    for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert type(ours) is type(theirs) and ours.get_seq_length() == theirs.get_seq_length()
        real = mask[:, -5 - ours.keys.shape[2] : -5, None].bool()
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            a, b = (torch.where(real[:, None], x, 0) for x in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    more = torch.randint(3, 128, (rows, 4))
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    first, second = (
        model.generate(torch.cat([x.sequences, more], 1), past_key_values=x.past_key_values, **options)
        for x in both_outputs
    )
    assert torch.equal(first, second)


def test_dictionaries_have_what_was_asked_for(monkeypatch):
    """Sequences alone, and with the caller's criterion, which sees padding behind what has ended."""
    model, batch = enable_speculation(tiny_model("llama", eos_token_id=list(range(3, 60)))), left_padded_batch()
    seen = []
    criteria = [lambda ids, scores: seen.append((ids.clone(), scores)) or ids[:, -1] % 7 == 1]
    options = dict(max_new_tokens=30, pad_token_id=0, return_dict_in_generate=True)
    for more in ({}, dict(stopping_criteria=criteria)):
        expected, output = both(model, monkeypatch, **batch, **options, **more)
        assert output.keys() == expected.keys() == {"sequences", cache_name()}
        assert torch.equal(output.sequences, expected.sequences)
    half = len(seen) // 2
    assert all(torch.equal(a, b) and s is t is None for (a, s), (b, t) in zip(seen[:half], seen[half:], strict=True))


def test_dictionaries_come_from_captured_forwards(monkeypatch):
    """Of a padded batch whose sequences end one by one, over a cache that the next call takes again."""
    model, calls = enable_speculation(tiny_model("llama", eos_token_id=list(range(3, 9)))), []
    captured = CapturedForward.__call__
    monkeypatch.setattr(CapturedForward, "__call__", lambda *args: calls.append(captured(*args)) or calls[-1])
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    for _ in range(2):
        model.generate(**left_padded_batch(), **options)
    assert calls[11:] and None not in calls[11:]


def test_streams():
    model, ids = enable_speculation(tiny_model("llama")), torch.randint(3, 128, (1, 7))
    streamers = Recorder(), Recorder()
    with transformers_loop():
        model.generate(ids, streamer=streamers[0], max_new_tokens=9, do_sample=False)
    model.generate(ids, streamer=streamers[1], max_new_tokens=9, do_sample=False)
    assert streamers[0].values == streamers[1].values and streamers[1].ended == 1


def test_forwards_are_replayed(monkeypatch):
    model, calls = enable_speculation(tiny_model("llama", eos_token_id=None)), []
    captured = CapturedForward.__call__
    monkeypatch.setattr(CapturedForward, "__call__", lambda *args: calls.append(captured(*args)) or calls[-1])
    model.generate(torch.randint(3, 128, (1, 7)), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert sum(call is not None for call in calls) >= 15


class Automaton(LogitsProcessor):
    """Goes on with the last token of each row at every call, as a grammar does."""

    def __init__(self):
        self.states = None

    def __call__(self, input_ids, scores):
        self.states = 0 * input_ids[:, -1] if self.states is None else (self.states * 3 + input_ids[:, -1] + 1) % 7
        allowed = torch.arange(scores.shape[1]) % 7 == self.states[:, None]
        return scores.masked_fill(~allowed, -torch.inf)


def test_processors_are_called_once_a_step():
    """Also after rows of the batch have ended."""
    model, outputs = enable_speculation(tiny_model("llama", eos_token_id=list(range(3, 40)))), []
    for loop in (transformers_loop(), contextlib.nullcontext()):
        with loop:
            options = dict(max_new_tokens=14, do_sample=False, pad_token_id=0, logits_processor=[Automaton()])
            outputs.append(model.generate(**left_padded_batch(), **options))
    assert torch.equal(*outputs) and (outputs[0][:, -1] == 0).any()


def test_masks_of_floats(monkeypatch):
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch((20, 3, 3))
    batch["attention_mask"] = batch["attention_mask"].float()
    for _ in range(2):  # the second prompts are captured
        assert torch.equal(*both(model, monkeypatch, **batch, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("length", [3, 7])
def test_a_limit_within_the_prompt_leaves_one_token(length, monkeypatch):
    model, options = enable_speculation(tiny_model("llama")), dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    ids, criteria = torch.randint(3, 128, (2, 7)), [MaxLengthCriteria(length)]
    expected, output = both(model, monkeypatch, input_ids=ids, stopping_criteria=criteria, **options)
    drafted = model.generate(ids, stopping_criteria=criteria, prompt_lookup_num_tokens=2, **options)
    assert expected.shape == (2, 8) and torch.equal(output, expected) and torch.equal(drafted, expected)


@pytest.mark.parametrize("length", [10**9, int(1e30)])
def test_no_limit_but_the_end(length, monkeypatch):
    """`max_length` as of a tokenizer without one: nothing is reserved for it."""
    model = enable_speculation(tiny_model("llama", eos_token_id=list(range(2, 64))))
    options = dict(max_length=length, do_sample=False, pad_token_id=0)
    expected, output = both(model, monkeypatch, **left_padded_batch(), **options)
    assert torch.equal(output, expected)
    for draft in (dict(prompt_lookup_num_tokens=2), dict(assistant_model=TokenRecycling())):
        assert torch.equal(model.generate(**left_padded_batch(), **options, **draft), expected)


def test_embeddings_beside_ids_of_another_length():
    model, ids = enable_speculation(tiny_model("llama")), torch.randint(3, 128, (1, 3))
    embeddings = dict(inputs_embeds=torch.randn(1, 10, 64), attention_mask=torch.ones(1, 10).long())
    options = dict(**embeddings, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with transformers_loop():
        expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=2), expected)


def test_other_options_stay_with_transformers():
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch()
    cache = PagedCache(model.config)
    model.generate(**batch, past_key_values=cache, max_new_tokens=3)
    assert cache.get_seq_length() == batch["input_ids"].shape[1] + 2
    wanted = dict(return_dict_in_generate=True, output_hidden_states=True)
    assert len(model.generate(**batch, max_new_tokens=3, **wanted).hidden_states) == 3
    assert model.generate(**batch, max_new_tokens=3, num_beams=2).shape[0] == 3
    eager = enable_speculation(tiny_model("llama"))
    eager.set_attn_implementation("eager")
    assert eager.generate(**batch, max_new_tokens=3).shape[0] == 3
    assert eager.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["DiffLlama", "JetMoe"])
def test_models_that_change_what_the_cache_gives_them_stay_with_transformers(name, monkeypatch):
    config = getattr(transformers, f"{name}Config")(
        **dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
        **dict(intermediate_size=96, head_dim=16, kv_channels=16, num_local_experts=2),
        **dict(pad_token_id=0, eos_token_id=None),
    )
    model = enable_speculation(transformers.AutoModelForCausalLM.from_config(config).eval())
    served = noted_answers(monkeypatch)
    for _ in range(2):
        assert model.generate(torch.randint(3, 128, (1, 7)), max_new_tokens=3, do_sample=False).shape == (1, 10)
    assert served == [False] * 2 and model.config._attn_implementation == "sdpa"


def test_a_forward_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model, ids = enable_speculation(tiny_model("llama")), torch.randint(3, 128, (1, 7))
    monkeypatch.setattr(model.model.norm, "forward", lambda x: (_ for _ in ()).throw(RuntimeError("failed")))
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(RuntimeError, match="failed"):
            model.generate(ids, max_new_tokens=3, **options)
        assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    assert model.generate(ids, max_new_tokens=3).shape == (1, 10)


def test_calls_at_the_same_time(monkeypatch):
    """Each gets its own text, and the attention is changed back after the last one only."""
    model = enable_speculation(tiny_model("llama", eos_token_id=None))
    prompts = [torch.randint(3, 128, (1, 6 + n)) for n in range(4)]
    options = dict(do_sample=False, pad_token_id=0)
    expected = [model.generate(ids, max_new_tokens=5 + 5 * n, **options) for n, ids in enumerate(prompts)]
    outputs = [None] * len(prompts)

    def generate(n):
        for _ in range(3):
            outputs[n] = model.generate(prompts[n], max_new_tokens=5 + 5 * n, **options)

    threads = [threading.Thread(target=generate, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(output, right) for output, right in zip(outputs, expected))
    assert model.config._attn_implementation == "sdpa"


def test_other_threads_and_contexts_see_no_pages():
    """Inside `over_pages` "sdpa" is ours in this thread alone, and a function that a user registered stays."""
    functions, seen = modeling_utils.ALL_ATTENTION_FUNCTIONS, []
    stock = functions["sdpa"]
    with over_pages():
        assert functions["sdpa"] is functions["flash_paged"]
        thread = threading.Thread(target=lambda: seen.append(functions["sdpa"]))
        thread.start()
        thread.join()
        with over_pages():
            pass
        assert functions["sdpa"] is functions["flash_paged"]
        functions["sdpa"] = own = lambda *args, **kwargs: stock(*args, **kwargs)
        try:
            assert functions["sdpa"] is own
        finally:
            del functions["sdpa"]
    assert seen == [stock] and functions["sdpa"] is stock
