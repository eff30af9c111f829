"""Bytes that a PagedCache holds beside a DynamicCache: a ragged batch, beam search, layers with a window. Writes
benchmarks/results/cache_memory.json.

    python benchmarks/cache_memory.py [--quick] [--output FILE]

Bytes are those of the storages of all tensors that the cache object reaches (`held_bytes`): allocated, not just used.
They depend on lengths and number of heads alone, so the model is small and random. They are taken after every forward:
`mean`, `highest` and `last` of a generation. `ratio` is to the bytes of the keys and values of the live tokens alone,
without padding and copies. `saving` is the share of DynamicCache's bytes that PagedCache does not take.
"""

import json
import statistics

import harness
import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig, StoppingCriteria, StoppingCriteriaList
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from hf_efficient import PagedCache
from hf_efficient.evaluation import environment


SIZES = dict(vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=1 << 16)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def held_bytes(cache) -> int:
    """Bytes of the storages of all tensors that `cache` reaches."""
    seen, storages, todo = set(), {}, [cache]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            todo.extend(thing.values())
        elif isinstance(thing, (list, tuple, set)):
            todo.extend(thing)
        elif type(thing).__module__.split(".")[0] in ("hf_efficient", "transformers") and hasattr(thing, "__dict__"):
            todo.extend(vars(thing).values())
        elif hasattr(thing, "__slots__"):
            todo.extend(getattr(thing, name) for name in thing.__slots__ if hasattr(thing, name))
    return sum(storages.values())


def live_bytes(model, tokens: int) -> int:
    """Bytes of the keys and values of `tokens` tokens in every layer."""
    config = model.config
    return tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


class Sampler(StoppingCriteria):
    """Keeps what `measure` returns after every forward, and stops nothing."""

    def __init__(self, measure):
        self.measure, self.samples = measure, []

    def __call__(self, input_ids, scores, **kwargs):
        self.samples.append(self.measure())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate(model, cache, measure, inputs, **kwargs):
    """Tokens of `generate()`, and what `measure` gave after every forward."""
    sampler = Sampler(measure)
    model.set_attn_implementation("flash_paged" if isinstance(cache, PagedCache) else "eager")
    tokens = model.generate(
        **inputs, **kwargs, do_sample=False, eos_token_id=256, past_key_values=cache,
        stopping_criteria=StoppingCriteriaList([sampler]),
    )  # fmt: skip
    return tokens, sampler.samples


def summary(samples: list[float]) -> dict:
    return {"mean": statistics.mean(samples), "highest": max(samples), "last": samples[-1]}


def ragged(model, rows: int, shortest: int, longest: int, new_tokens: int) -> dict:
    """A batch of lengths spread evenly from `shortest` to `longest`, prefilled in chunks and continued."""
    lengths = torch.linspace(shortest, longest, rows).long()
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    inputs = {"input_ids": torch.randint(3, 256, (rows, longest)) * mask, "attention_mask": mask}
    options = dict(max_new_tokens=new_tokens, prefill_chunk_size=256)
    paged, padded = PagedCache(model.config), DynamicCache(config=model.config)
    tokens, samples = generate(
        model, paged, lambda: (held_bytes(paged), live_bytes(model, sum(paged.cache_seqlens))), inputs, **options
    )
    expected, beside = generate(model, padded, lambda: held_bytes(padded), inputs, **options)
    return {
        "tokens of the prompts": int(lengths.sum()),
        "PagedCache, ratio": summary([held / live for held, live in samples]),
        "DynamicCache, ratio": summary([held / live for held, (_, live) in zip(beside, samples)]),
        "PagedCache, bytes": summary([held for held, _ in samples]),
        "DynamicCache, bytes": summary(beside),
        "same tokens": (tokens == expected).float().mean().item(),
    }


def prompt_of(tokens: int) -> dict:
    return {"input_ids": torch.randint(3, 256, (1, tokens)), "attention_mask": torch.ones(1, tokens).long()}


def beams(model, number: int, prompt: int, new_tokens: int) -> dict:
    """Beam search: by `generate()` alone, which runs and stores the prompt once for every beam before they fork, and
    with the prompt run once by the caller and `batch_repeat_interleave`."""
    inputs = prompt_of(prompt)
    options = dict(max_new_tokens=new_tokens, num_beams=number)
    padded = DynamicCache(config=model.config)
    expected, beside = generate(model, padded, lambda: held_bytes(padded), inputs, **options)
    record = {"DynamicCache, bytes": summary(beside)}
    for name, run_once in (("generate() alone", False), ("prompt run once", True)):
        paged = PagedCache(model.config)
        before = []
        if run_once:
            model.set_attn_implementation("flash_paged")
            with torch.no_grad():
                model(inputs["input_ids"][:, :-1], past_key_values=paged)
            before.append(held_bytes(paged))
            paged.batch_repeat_interleave(number)
        tokens, samples = generate(model, paged, lambda: held_bytes(paged), inputs, **options)  # noqa: B023
        bytes_ = summary(before + samples)
        record[name] = {
            "PagedCache, bytes": bytes_,
            "saving": {key: 1 - bytes_[key] / record["DynamicCache, bytes"][key] for key in bytes_},
            "same tokens": (tokens == expected).float().mean().item(),
        }
    return record


def windows(model, prompt: int, new_tokens: int) -> dict:
    """Every other layer sees `sliding_window` tokens."""
    inputs = prompt_of(prompt)
    options = dict(max_new_tokens=new_tokens, prefill_chunk_size=512)
    paged, padded = PagedCache(model.config), DynamicCache(config=model.config)
    tokens, samples = generate(model, paged, lambda: held_bytes(paged), inputs, **options)
    expected, beside = generate(model, padded, lambda: held_bytes(padded), inputs, **options)
    everything = live_bytes(model, paged.cache_seqlens[0])
    return {
        "PagedCache, bytes": summary(samples),
        "DynamicCache, bytes": summary(beside),
        "all tokens in all layers": everything,
        "tokens that a layer with a window has room for": paged.layers[0].store.capacity * paged.block_size,
        "same tokens": (tokens == expected).float().mean().item(),
    }


def main() -> None:
    parser = harness.parser(__doc__, "cache_memory.json")
    parser.add_argument("--quick", action="store_true", help="small sizes: tests the script")
    options = parser.parse_args()
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).eval()
    gemma2 = Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=512)).to(torch.bfloat16).eval()
    small = 8 if options.quick else 1
    sizes = {
        "ragged batch": (ragged, llama, 32, 16, 2048 // small, 64 // small),
        "beam search": (beams, llama, 4, 1024 // small, 128 // small),
        "layers with a window": (windows, gemma2, 8192 // small, 64 // small),
    }
    record = {"environment": environment.describe(), "arguments of the cases": {}}
    for name, (measure, model, *numbers) in sizes.items():
        record["arguments of the cases"][name] = numbers
        record[name] = measure(model, *numbers)
        print(name, json.dumps(record[name], indent=1), flush=True)
    harness.write(options.output, record)


if __name__ == "__main__":
    main()
