"""How fast is `generate()` on a GPU: transformers' loop, ours over CUDA graphs, and the compiled step of a paged cache?

    python benchmarks/gpu_generate.py [--only PATTERN] [--seconds N] [--output benchmarks/results/gpu_generate.json]

A model of Llama-3.1-8B's shape with random weights, greedy, in bfloat16 and with int4 weights in groups of 64. Each
case is two warm calls, then the median of three, of 129 tokens (transformers' loop, which is slow: 33).
`limit_tokens_s` is what reading all weights once a token allows at the bandwidth of a device copy in the same process.
A case is appended to a `.jsonl` file as it ends; `--seconds` begins none later, and the next run goes on there.
`--tiny` runs small sizes on a CPU, where a fake capture (tests) stands for CUDA's: it tests the script.
"""

import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch
from gpu_timing import Benchmark
from transformers import LlamaConfig, LlamaForCausalLM

import hf_efficient
from hf_efficient import methods
from hf_efficient.evaluation.latency import generation_speed
from hf_efficient.layers import compress_linear


sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import fake_graphs  # noqa: E402


SHAPE = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
SHAPE |= dict(num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, vocab_size=128, max_position_embeddings=256)
GOALS = {"int4": 660.0, "bf16": 243.0}  # tokens/s of one sequence on an H200
WAYS = ("graphs", "transformers", "prompt lookup", "compiled")  # the last compiles for a minute


def model_of(bench: Benchmark, weights: str):
    config = LlamaConfig(**(TINY if bench.tiny else SHAPE), eos_token_id=None, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32 if bench.tiny else torch.bfloat16)
    with torch.device(bench.device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    if weights == "int4":
        model = quantized(model)
    return model


@torch.no_grad()
def quantized(model):
    """With int4 weights in groups of 64 (32 in the tiny shape), quantized layer by layer on the device."""
    size = 64 if model.config.hidden_size > 64 else 32
    format = hf_efficient.WeightOnlyConfig(bits=4, group_size=size, method="rtn").format()
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = compress_linear(module, format, methods.quantize(module.weight, format, "rtn"))
            weight.derive_layouts(model.dtype)
            model.set_submodule(name, weight)
    return model


def generator(model, way: str, rows: int, prompt: int):
    """generate(n), by one of `WAYS`."""
    from hf_efficient.integrations.transformers_generation import disable_automatic

    ids = torch.randint(3, model.config.vocab_size, (rows, prompt), device=model.device)
    options = dict(do_sample=False, pad_token_id=0)
    if way in ("transformers", "compiled"):
        disable_automatic(model)
    else:
        hf_efficient.optimize(model)
    if way == "prompt lookup":
        options["prompt_lookup_num_tokens"] = 4

    def generate(tokens):
        cache = {}
        if way == "compiled":
            blocks = rows * (-(-(prompt + tokens) // 64) + 1)
            cache = dict(past_key_values=hf_efficient.PagedCache(model.config, 64, num_blocks=blocks))
        return model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, **options, **cache)

    model.set_attn_implementation("flash_paged" if way == "compiled" else "sdpa")
    return generate


def main(arguments: list[str] | None = None) -> int:
    bench = Benchmark("generate", __doc__, arguments)
    if bench.tiny:
        fake_graphs.use_fake_graphs(pytest.MonkeyPatch())
    prompt = 8 if bench.tiny else 128
    models = functools.cache(functools.partial(model_of, bench))
    for rows, way, weights in itertools.product((1, 2) if bench.tiny else (1, 8, 32), WAYS, ("bf16", "int4")):
        case = dict(kernel=way, ours=way != "transformers", weights=weights, rows=rows)
        if not bench.wants(case):
            continue
        with bench.attempt(f"{case}", ours=True):
            model = models(weights)
            size = sum(x.nbytes for x in {*model.parameters(), *model.buffers()})
            limit = bench.limits["copy_gb_s"] * 1e9 / size * rows
            generate = generator(model, way, rows, prompt)
            tokens = 6 if bench.tiny else 33 if way == "transformers" else 129
            speed = generation_speed(generate, rows, tokens, repeats=1 if bench.tiny else 3, progress=False)
            del speed["result"]
            bench.append({**case, **speed, "us": {}, "weight_bytes": size, "limit_tokens_s": limit})
            print(case, round(speed["tokens_per_second"]["median"], 1), "tokens/s", flush=True)
    return bench.finish(goals(bench))


def goals(bench: Benchmark) -> list[tuple]:
    rows = []
    for weights, least in GOALS.items():
        found = bench.find(kernel="graphs", weights=weights, rows=1)
        speed = found[0]["tokens_per_second"]["median"] if found else None
        rows.append((f"8B {weights}, one sequence, tokens/s over graphs", least, speed))
    return rows


if __name__ == "__main__":
    sys.exit(main())
