"""What does evicting tokens from the cache cost SmolLM2-135M-Instruct in perplexity and retrieval; what does it save?

    python benchmarks/kv_eviction.py --tokens FOLDER [--only perplexity|retrieval|stream|decode]
        [--scorers SnapKV TOVA ...] [--evicted 0.5 0.75] [--output FILE]

FOLDER has wiki_long.pt (int64 [16, 2048]) and wiki_eval.pt (int64 [64, 1024]): tokens of sample_text().

- perplexity: 8 prompts of 1,024 tokens that lose 50 or 75 % after the prefill, and the 511 tokens after each.
- retrieval: for each kind of kv_retrieval.py, 20 such prompts, asked after the eviction; the seed is one that no scorer
  was chosen with. "interval" is Wilson's at 95 %; "both" counts the prompts of both kinds.
- stream: perplexity of 20,480 tokens of text in chunks of 256, with a budget of 1,024 tokens and with none.
- decode: milliseconds of a decode step at 4,096 tokens, for every KV format and scorer: the mean over 128 steps with
  their evictions, and the least of three such means, taken in turns.

An existing output file keeps what is not measured again.
"""

import json
import math
import statistics
import time
from pathlib import Path

import harness
import torch
from kv_retrieval import KINDS, questions

import hf_efficient
from hf_efficient import AdaKV, EvictionPolicy, PagedCache, SinkWindow
from hf_efficient.cache.page_handle import PAGES, PageHandle
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.cache.stores.kv_formats import KV_FORMATS
from hf_efficient.cache.stores.quantized import QuantizedStore
from hf_efficient.evaluation import environment


SCORERS = {
    name: getattr(hf_efficient, name)
    for name in ("ExpectedAttention", "SnapKV", "TOVA", "HeavyHitter", "SinkWindow", "KeyNorm")
}
SCORERS["AdaKV(SnapKV)"] = lambda: AdaKV(hf_efficient.SnapKV())
SCORERS["AdaKV(Distinctive)"] = lambda: AdaKV(hf_efficient.Distinctive(), floor=0.5)
PEERS = {  # kvpress 0.5.5 at 50 %: perplexity, and retrieval by a task of its own
    "none": (18.926, 1.0),
    "ExpectedAttention": (19.196, 0.1),
    "SnapKV": (19.205, 0.1),
    "TOVA": (19.220, 0.1),
    "HeavyHitter": (19.325, 0.9),
    "SinkWindow": (19.403, 0.4),
    "KeyNorm": (20.086, 0.0),
}


@torch.no_grad()
def record(model, prompt: torch.Tensor) -> list[tuple[tuple, dict]]:
    """What every layer gives to its attention over the prompt [m]: the same whatever is evicted after it."""
    calls, attend = [], PageHandle.attend

    def listen(handle, *states, **options):
        calls.append((states, options))
        return attend(handle, *states, **options)

    PageHandle.attend = listen
    try:
        model(prompt[None], past_key_values=PagedCache(model.config), logits_to_keep=1)
    finally:
        PageHandle.attend = attend
    return calls


def write_only(store, step, tables_on, query, key, value, **options) -> torch.Tensor:
    """In place of `PageStore.attend`, where the output is known already."""
    store.write(step, key, value)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def fill(cache: PagedCache, calls: list) -> None:
    """Gives an empty cache the recorded prompt."""
    attends = {kind: kind.attend for kind in (PageStore, QuantizedStore)}
    for kind in attends:
        kind.attend = write_only
    try:
        for layer, ((query, key, value, mask), options) in enumerate(calls):
            marked, _ = cache.update(key, value, layer)
            getattr(marked, PAGES).attend(query, marked, value, mask, **options)
    finally:
        for kind, attend in attends.items():
            kind.attend = attend


@torch.no_grad()
def following_logits(model, calls: list, following: list[int], eviction: EvictionPolicy | None) -> torch.Tensor:
    """Logits [n - 1, vocabulary] of all tokens of `following` [n] but the first, after the recorded prompt."""
    cache = PagedCache(model.config, eviction=eviction)
    fill(cache, calls)
    return model(torch.tensor([following]), past_key_values=cache).logits[0, :-1].float()


def policies(scorers: list[str], evicted: list[float]) -> dict:
    """(scorer, share that is evicted) -> policy; first without any."""
    made = {(name, share): EvictionPolicy(SCORERS[name](), 1 - share) for share in evicted for name in scorers}
    return {("none", 0.0): None, **made}


def measure_perplexity(model, tokens: torch.Tensor, policies: dict) -> list[dict]:
    losses = {key: [] for key in policies}
    for row in tokens[:8]:
        calls = record(model, row[:1024])
        for key, policy in policies.items():
            logits = following_logits(model, calls, row[1024:1536].tolist(), policy)
            losses[key].append(torch.nn.functional.cross_entropy(logits, row[1025:1536]).double().item())
        print({key: round(math.exp(statistics.mean(nll)), 3) for key, nll in losses.items()}, flush=True)
    records, reference = [], torch.tensor(losses["none", 0.0], dtype=torch.float64)
    for (name, share), values in losses.items():
        found = harness.score(torch.tensor(values, dtype=torch.float64), reference)
        records.append({"scorer": name, "evicted": share, **found})
        if share <= 0.5 and name in PEERS:
            records[-1]["peer"] = PEERS[name][0]
    return records


def measure_retrieval(model, tokenizer, tokens: torch.Tensor, policies: dict) -> list[dict]:
    records, both = [], {key: [] for key in policies}
    for kind in KINDS:
        hits, losses = {key: [] for key in policies}, {key: [] for key in policies}
        for prompt, question, answer in questions(tokenizer, tokens, 20, kind, seed=12):
            calls = record(model, prompt)
            for key, policy in policies.items():
                logits = following_logits(model, calls, question + answer, policy)[-len(answer) :]
                hits[key].append(logits.argmax(-1).tolist() == answer)
                losses[key].append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item())
            print(kind, {key: sum(hit) for key, hit in hits.items()}, flush=True)
        for (name, share), hit in hits.items():
            both[name, share] += hit
            measured = {**found(hit), "answer_nll": statistics.mean(losses[name, share])}
            records.append({"scorer": name, "evicted": share, "kind": kind, **measured})
    for (name, share), hit in both.items():
        records.append({"scorer": name, "evicted": share, "kind": "both", **found(hit)})
        if share <= 0.5 and name in PEERS:
            records[-1]["peer_in_its_own_task"] = PEERS[name][1]
    return records


def found(hit: list[bool]) -> dict:
    """The share of hits, with Wilson's interval at 95 %."""
    number, share, z = len(hit), statistics.mean(hit), statistics.NormalDist().inv_cdf(0.975)
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + (z / (2 * number)) ** 2)
    return {"retrieval": share, "prompts": number, "interval": [middle - half, middle + half]}


@torch.no_grad()
def stream(model, tokens: torch.Tensor, budget: int | None, total: int = 20480, chunk: int = 256) -> dict:
    eviction = budget and EvictionPolicy(SinkWindow(), budget, when="always")
    cache, losses, last = PagedCache(model.config, eviction=eviction), [], None
    text, stored = tokens.flatten()[:total], 0
    for start in range(0, total, chunk):
        part = text[start : start + chunk]
        logits = model(part[None], past_key_values=cache).logits[0].float()
        known = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        losses.append(torch.nn.functional.cross_entropy(known, part[-len(known) :], reduction="none"))
        last = logits[-1:]
        # an evicting layer keeps its own tokens for each head
        heads = model.config.num_key_value_heads if budget else 1
        stored = max(stored, cache.layers[0].store.capacity * cache.block_size // heads)
    losses = torch.cat(losses).double()
    record = {
        "budget": budget,
        "perplexity_per_2048_tokens": [math.exp(part.mean()) for part in losses.split(2048)],
        "perplexity": math.exp(losses.mean()),
        "most_tokens_stored": stored,
    }
    print(json.dumps(record), flush=True)
    return record


@torch.no_grad()
def decode(model, tokens, scorers: list[str], context: int = 4096, steps: int = 128, repeats: int = 3) -> list[dict]:
    calls, token = record(model, tokens.flatten()[:context]), tokens[:1, :1]
    caches = {kv_format: PagedCache(model.config, kv_format=kv_format) for kv_format in KV_FORMATS}
    for name in scorers:
        for budget, when in ((0.5, "prefill"), (1024, "always")):
            policy = EvictionPolicy(SCORERS[name](), budget, when)
            caches[f"{name}, {when} {budget}"] = PagedCache(model.config, eviction=policy)
    policy = EvictionPolicy(SCORERS["SnapKV"](), 2 * context, "always")
    caches["SnapKV, always, nothing to evict"] = PagedCache(model.config, eviction=policy)
    policy = EvictionPolicy(SCORERS["SnapKV"](), 0.5)
    caches["int8, SnapKV, prefill 0.5"] = PagedCache(model.config, kv_format="int8", eviction=policy)
    for cache in caches.values():
        fill(cache, calls)
    means, slowest = {name: [] for name in caches}, dict.fromkeys(caches, 0.0)
    for _ in range(repeats):
        for name, cache in caches.items():
            times = [time.perf_counter()]
            for _ in range(steps):
                model(token, past_key_values=cache)
                times.append(time.perf_counter())
            means[name].append((times[-1] - times[0]) / steps * 1e3)
            slowest[name] = max(slowest[name], 1e3 * max(b - a for a, b in zip(times, times[1:])))
    records = [
        {
            "cache": name,
            "milliseconds": min(runs),
            "of_full_precision": min(runs) / min(means["auto"]),
            "slowest_step": slowest[name],
            "runs": runs,
        }
        for name, runs in means.items()
    ]
    print(json.dumps(records, indent=1), flush=True)
    return records


def main() -> None:
    parser = harness.parser(__doc__, "kv_eviction.json")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--only", choices=("perplexity", "retrieval", "stream", "decode"))
    parser.add_argument("--scorers", nargs="+", choices=SCORERS, default=list(SCORERS))
    parser.add_argument("--evicted", nargs="+", type=float, default=[0.5, 0.75])
    options = parser.parse_args()
    long, text = (
        torch.load(Path(options.tokens) / f"{name}.pt", weights_only=True) for name in ("wiki_long", "wiki_eval")
    )
    model = harness.load(attn_implementation="flash_paged")
    content = harness.read(options.output, {})
    chosen = policies(options.scorers, options.evicted)
    measure = {
        "perplexity": lambda: measure_perplexity(model, long, chosen),
        "retrieval": lambda: measure_retrieval(model, harness.tokenizer(), long, chosen),
        "stream": lambda: [stream(model, text, budget) for budget in (1024, None)],
        "decode": lambda: decode(model, text, options.scorers),
    }
    for name in [options.only] if options.only else measure:
        content[name] = {"environment": environment.describe(), "records": measure[name]()}
        harness.write(options.output, content)


if __name__ == "__main__":
    main()
