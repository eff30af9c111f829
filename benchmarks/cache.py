"""How fast does a model decode over each kind of cache on a GPU, and how many bytes does the cache take? Writes
benchmarks/results/gpu_cache.json.

    [PYTHONPATH=.] python benchmarks/cache.py [--quick] [--output FILE]

A random model of the sizes of Llama-3.2-1B in bf16 reads a random context in chunks, then decodes greedily. Each cache
runs as its users would run it: DynamicCache in a plain loop, the others with a compiled forward whose CUDA graph is
replayed (`mode="reduce-overhead"`), PagedCache with `num_blocks` and `decode_step()`, and also in a plain loop.
Tokens/s are of all sequences: median, smallest and largest of `REPEATS` stretches of `TOKENS` steps, by CUDA events,
after a stretch that warms up and compiles. Bytes are those of all tensors that the cache reaches after the last step.
What a build does not have, or fails, is in the record with the reason.

`--tiny` runs the same code on small sizes without a GPU: it tests the script, its times mean nothing, and the record
says so.
"""

import sys
import time

import harness
import torch
from cache_memory import held_bytes
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import hf_efficient
from hf_efficient import PagedCache
from hf_efficient.evaluation import environment


CONTEXTS = [(8, 4096), (1, 32768), (8, 32768)]  # batch, tokens
TOKENS, REPEATS, CHUNK = 64, 5, 2048
KV_FORMATS = ("auto", "int8", "fp8", "int4", "int2")
SCORERS = ("SinkWindow", "HeavyHitter", "TOVA", "SnapKV", "ExpectedAttention", "KeyNorm")
BUDGET = 0.5  # of the context, kept by eviction


def caches(model, batch: int, length: int) -> dict:
    """name -> (attention implementation, whether the forward is compiled, function that makes the cache)."""
    config, room = model.config, length + TOKENS * (REPEATS + 1) + 1

    def paged(fixed: bool = True, **options):
        cache = PagedCache(config, **options)
        blocks = batch * -(-room // cache.block_size)
        return PagedCache(config, **options, num_blocks=blocks) if fixed else cache

    found = {
        "DynamicCache": ("sdpa", False, lambda: DynamicCache(config=config)),
        "StaticCache": ("sdpa", True, lambda: StaticCache(config, max_cache_len=room)),
        "PagedCache, growing": ("flash_paged", False, lambda: paged(fixed=False)),
    }
    for kv_format in KV_FORMATS:
        found[f"PagedCache {kv_format}"] = ("flash_paged", True, lambda f=kv_format: paged(kv_format=f))
    for name in SCORERS:  # what they keep grows with the context, so nothing is compiled

        def evicting(name=name):
            policy = hf_efficient.EvictionPolicy(getattr(hf_efficient, name)(), int(BUDGET * length), when="always")
            return paged(fixed=False, eviction=policy)

        found[f"PagedCache, {name} to {BUDGET:.0%}"] = ("flash_paged", False, evicting)
    return found


def stretch(steps: int, step) -> float:
    """Seconds of `steps` calls of `step`."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@torch.no_grad()
def measure(model, ids: torch.Tensor, implementation: str, compiled: bool, make_cache) -> dict:
    model.set_attn_implementation(implementation)
    torch._dynamo.reset()
    cache = make_cache()
    for chunk in ids.split(CHUNK, 1):
        logits = model(chunk, past_key_values=cache, logits_to_keep=1).logits
    token = logits[:, -1:].argmax(-1)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if compiled else model.forward
    planned = compiled and isinstance(cache, PagedCache)

    def step():
        if planned:
            with cache.decode_step() as position_ids:
                logits = forward(token, position_ids=position_ids, past_key_values=cache).logits
        else:
            logits = forward(token, past_key_values=cache).logits
        token.copy_(logits[:, -1:].argmax(-1))

    times = [stretch(TOKENS, step) for _ in range(REPEATS + 1)][1:]
    speeds, bytes_ = [len(ids) * TOKENS / seconds for seconds in times], held_bytes(cache)
    return {"tokens_per_s": harness.spread(speeds), "bytes": bytes_, "bytes_per_token": bytes_ / ids.numel()}


def main() -> int:
    global TOKENS, CHUNK
    parser = harness.parser(__doc__, "gpu_cache.json")
    parser.add_argument("--quick", action="store_true", help="the smallest context only")
    parser.add_argument("--tiny", action="store_true", help="small sizes without a GPU: tests the script")
    options = parser.parse_args()
    if not options.tiny:
        harness.need_gpu("cache")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=1 << 16,
    )  # fmt: skip
    contexts, device = CONTEXTS[: 1 if options.quick else None], "cuda"
    if options.tiny:
        sizes |= dict(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        sizes |= dict(num_key_value_heads=2, head_dim=64)
        contexts, device, TOKENS, CHUNK = [(2, 300)], "cpu", 3, 100
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).eval()
    results, failed = [], 0
    for batch, length in contexts:
        ids = torch.randint(3, sizes["vocab_size"], (batch, length), device=device)
        for name, (implementation, compiled, make_cache) in caches(model, batch, length).items():
            line = {"cache": name, "batch": batch, "context": length, "compiled": compiled}
            try:
                line |= measure(model, ids, implementation, compiled and not options.tiny, make_cache)
                text = f"{line['tokens_per_s']['median']:9.0f} tokens/s {line['bytes'] / 1e6:9.1f} MB"
            except Exception as reason:  # a format or policy this build lacks, too little memory, a peer that fails
                line["failed"] = text = f"{type(reason).__name__}: {str(reason)[:200]}"
                failed += name.startswith("PagedCache")
            results.append(line)
            print(f"{batch} x {length:6d} {name:40s} {text}", flush=True)
    report = {"environment": environment.describe(), "results": results}
    if options.tiny:
        report["warning"] = "tiny sizes without a GPU: no time here means anything"
    harness.write(options.output, report)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
