"""What the tests share: error measures with a reason, and tiny random models of many architectures."""

import importlib.metadata
import os
import threading
import time

import pytest
import torch
from packaging.version import Version


def is_installed(distribution: str) -> bool:
    """Whether a distribution of that name is installed, wherever its packages are."""
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def needs_transformers(release: str, what: str) -> pytest.MarkDecorator:
    """Skips a test, by name, where the installed transformers is older than the `release` that `what` needs."""
    is_older = Version(importlib.metadata.version("transformers")) < Version(release)
    return pytest.mark.skipif(is_older, reason=f"{what} needs transformers {release}")


def needs_adapters(test):
    """Skips a test of a model's own `add_adapter` where the installed PEFT is older than transformers takes there."""
    from transformers.integrations.peft import MIN_PEFT_VERSION as least

    is_older = not is_installed("peft") or Version(importlib.metadata.version("peft")) < Version(least)
    return pytest.mark.skipif(is_older, reason=f"transformers' own adapter methods want peft {least}")(test)


def enable_checkpointing(model, options: dict | None = None) -> None:
    """Activation checkpointing, under the name that it has as of transformers 5.23 or its old one."""
    name = "activation_checkpointing_enable"
    (getattr(model, name) if hasattr(model, name) else model.gradient_checkpointing_enable)(options)


def rms_error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of the expected values (both any shape, computed in float64)."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-30)).item()


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and under each the same bytes."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        pair = [each.contiguous().flatten().view(torch.uint8) for each in (tensor, expected[name])]
        assert tensor.dtype == expected[name].dtype and torch.equal(*pair), name


def assert_close(actual: torch.Tensor, expected: torch.Tensor, rms: float, maximum: float, reason: str) -> None:
    """Fails unless shapes agree, everything is finite, the RMS error ratio is at most `rms` and the largest absolute
    error at most `maximum`. `reason` says why these tolerances are the right ones."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{(~torch.isfinite(actual)).sum().item()} values are not finite"
    ratio = rms_error_ratio(actual, expected)
    largest = (actual.detach().double() - expected.detach().double()).abs().max().item()
    assert ratio <= rms and largest <= maximum, (
        f"rms error ratio {ratio:.3g} (allowed {rms:.3g}), max error {largest:.3g} (allowed {maximum:.3g}): {reason}"
    )


_SMALL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
_TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)

# name -> (config class, arguments). Every head dim is 16 or 32; grouped-query attention where the architecture has it.
TINY_MODELS = {
    "llama": ("LlamaConfig", dict(intermediate_size=96, num_key_value_heads=2)),
    "llama_tied": ("LlamaConfig", dict(intermediate_size=96, num_key_value_heads=1, tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(intermediate_size=96, num_key_value_heads=2, head_dim=32)),
    "mistral": ("MistralConfig", dict(intermediate_size=96, num_key_value_heads=2, sliding_window=8)),
    "gemma2": (
        "Gemma2Config",
        dict(tie_word_embeddings=False, intermediate_size=96, num_key_value_heads=2, head_dim=16, sliding_window=8),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(tie_word_embeddings=False, intermediate_size=96, num_key_value_heads=1, head_dim=16, sliding_window=8),
    ),
    "gpt2": ("GPT2Config", dict(n_positions=256)),
    "opt": ("OPTConfig", dict(tie_word_embeddings=False, ffn_dim=96, word_embed_proj_dim=64)),
    "mixtral": (
        "MixtralConfig",
        dict(intermediate_size=96, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(
            intermediate_size=96,
            moe_intermediate_size=48,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(
            intermediate_size=64,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
        ),
    ),
}


def tiny_config(name: str, **overrides):
    """The config of architecture `name` (a key of `TINY_MODELS`): 2 layers, hidden size 64, vocabulary 128."""
    import transformers

    class_name, arguments = TINY_MODELS[name]
    small = dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4) if name == "gpt2" else _SMALL
    return getattr(transformers, class_name)(**{**small, **_TOKENS, **arguments, **overrides})


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides):
    """A random causal LM with `tiny_config`. Weights are scaled up so that attention is far from uniform and greedy
    decoding does not settle on one token."""
    import transformers

    config = tiny_config(name, **overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                fan_in = parameter.shape[-1]
                scale = 1.0 if "embed" in parameter_name or "wte" in parameter_name else 1.5 / fan_in**0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.to(dtype).eval()


def left_padded_batch(lengths=(5, 11, 8), vocab_size: int = 128, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts padded on the left: `input_ids` and `attention_mask`, both int64 [len(lengths), max(lengths)]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    attention_mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


TEXT = "The river runs past the old mill, past the bridge and into the sea. "  # for `tiny_tokenizer`: 68 tokens


def save_tiny(folder, name: str = "llama", dtype: torch.dtype = torch.float32, **overrides):
    """Writes `tiny_model` and `tiny_tokenizer` to `folder`; returns it."""
    tiny_model(name, dtype, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer():
    """One token a printable ASCII character, for the vocabulary of 128 of the tiny models."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(code): code - 29 for code in range(32, 127)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def byte_level_tokenizer():
    """For the same vocabulary, as most tokenizers are today: some tokens have several characters, others spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # a space and a line's end
    longer = ["th", "the", "er", "\u0120a", "\u0120the", "\u010a\u010a", ".\u010a", "..", "ab", "ba", "aba", "qu"]
    tokens = ["<pad>", "<s>", "</s>", *characters, *longer]
    tokens += [f"{first}{second}" for first in "xyz!" for second in "XYZ?:"][: 128 - len(tokens)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def threads(count: int):
    """The body of a fixture: torch computes with so many threads until the test is over."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def openmp_threads_before_and_after(call, times: int = 1) -> list[tuple[int, int]]:
    """How many threads a product of three starts beside its own, in a new thread of Python, and how many of them are
    still there after `call()`. The rest of the process, where threads of other tests may end meanwhile, is not
    counted; the kernel lists a thread for a moment after it was joined, which is waited for."""

    def listed():
        return set(os.listdir("/proc/self/task"))

    def run():
        for _ in range(times):
            before = listed()
            torch.set_num_threads(3)
            torch.ones(1 << 20).add_(1)
            started = listed() - before
            call()
            deadline = time.monotonic() + 30
            while started & listed() and time.monotonic() < deadline:
                time.sleep(0.01)
            counts.append((len(started), len(started & listed())))

    counts = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return counts
