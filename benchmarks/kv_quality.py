"""What does each format of `PagedCache` cost in perplexity, and how many bytes does a token take?

    python benchmarks/kv_quality.py [--formats int8 int4 ...] [--outliers] [--tokens FILE] [--windows 4] [--output FILE]
    python benchmarks/kv_quality.py --table        # the table of what has been measured, beside the peers

SmolLM2-135M-Instruct in bfloat16 under attn_implementation="flash_paged": windows of 1,280 tokens of Wikipedia
articles, fed in chunks of 256 through the cache, scored on the predictions made after the first chunk. Every format
sees the same windows as kv_format="auto", whose next-token distributions are what KL and top-1 agreement are taken
against. Bytes of a token are those of its slots in all layers, scales included; what a row keeps beside its blocks
(int4 and int2) stands apart. With --outliers the keys of each head have two channels 32 times as large as they were,
and the queries these channels so much smaller: the same function, but keys as models with outliers have them. FILE:
int64 [rows, length], .safetensors or .pt; without it the windows come from `sample_text()`.
"""

import json
import math
from pathlib import Path

import harness
import torch


LENGTH, CHUNK = 1280, 256
WITH_OUTLIERS = ", keys with outliers"  # in names of results
OUTLIERS = 32.0  # times as large as before
FORMATS = ("auto", "int8", "fp8", "int4", "int2")

# measured earlier with the peers' own packages: name -> (bits, perplexity, KL, top-1 %)
PEERS = {
    "hqq int8 g64, residual 128": (8, 19.036, 0.0017, 97.9),
    "transformers fp8 per tensor": (8, 19.177, 0.0106, 93.7),
    "quanto int4 g64, residual 128, keys per channel": (4, 19.122, 0.0081, 94.8),
    "hqq int4 g64, residual 128": (4, 19.267, 0.013, 93.3),
    "quanto int2 g64, residual 128, keys per channel": (2, 25.42, 0.301, 72.1),
    "hqq int2 g64, residual 128": (2, 124.4, 1.9, 37.0),
}


@torch.no_grad()
def add_outliers(model) -> None:
    """Keys of each head get two large channels, a pair that RoPE turns, and the queries the inverse."""
    dim = model.config.head_dim
    for layer in model.model.layers:
        attention = layer.self_attn
        for linear, factor in ((attention.k_proj, OUTLIERS), (attention.q_proj, 1 / OUTLIERS)):
            heads = linear.weight.unflatten(0, (-1, dim))
            heads[:, [1, 1 + dim // 2]] *= factor  # a power of two: nothing is rounded


def page_bytes(cache) -> float:
    """Bytes that a token's slots take in all layers."""
    stores = [layer.store for layer in cache.layers]
    return sum(pages.nbytes / pages.shape[0] for store in stores for pages in store.pages.values()) / cache.block_size


@torch.no_grad()
def run(model, window: torch.Tensor, kv_format: str):
    """Logits [LENGTH - CHUNK, vocabulary] of the predictions from the last of the first chunk on, and the cache."""
    from hf_efficient import PagedCache

    cache, logits = PagedCache(model.config, kv_format=kv_format), []
    for start in range(0, LENGTH, CHUNK):
        logits.append(model(window[None, start : start + CHUNK], past_key_values=cache).logits[0])
    return torch.cat(logits)[CHUNK - 1 : -1], cache


def measure(model, windows: torch.Tensor, kv_formats: list[str]) -> dict[str, dict]:
    """Every format on every window."""
    nll = {kv_format: [] for kv_format in kv_formats}
    divergence, agreement, sizes = ({kv_format: [] for kv_format in kv_formats} for _ in range(3))
    for window in windows:
        reference = run(model, window, "auto")[0]
        for kv_format in kv_formats:
            logits, cache = run(model, window, kv_format)
            logs, base = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
            nll[kv_format].append(-logs.gather(-1, window[CHUNK:, None]).double().mean().item())
            divergence[kv_format].append((base.exp() * (base - logs)).sum(-1).mean().item())
            agreement[kv_format].append((base.argmax(-1) == logs.argmax(-1)).double().mean().item())
            rows = sum(tensor.nbytes for layer in cache.layers for tensor in layer.store.rows.values())
            sizes[kv_format] = page_bytes(cache), rows
            print(kv_format, f"window {len(nll[kv_format])}: {math.exp(nll[kv_format][-1]):.3f}", flush=True)
    return {
        kv_format: {
            "perplexity": math.exp(sum(values) / len(values)),
            "nll": values,
            "kl_to_bf16": sum(divergence[kv_format]) / len(values),
            "top1_agreement": sum(agreement[kv_format]) / len(values),
            "bytes_per_token": sizes[kv_format][0],
            "bytes_per_row": sizes[kv_format][1],
        }
        for kv_format, values in nll.items()
    }


def main() -> None:
    parser = harness.parser(__doc__, "kv_quality.json")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--outliers", action="store_true")
    parser.add_argument("--tokens")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        return write_table(options.output)

    import hf_efficient
    from hf_efficient.evaluation import environment

    hf_efficient.register()
    windows = harness.windows(options.tokens, "evaluation", options.windows, LENGTH)
    model = harness.load(attn_implementation="flash_paged")
    if options.outliers:
        add_outliers(model)
    done = harness.read(options.output, {})
    for name, row in measure(model, windows, options.formats).items():
        done[name + WITH_OUTLIERS * options.outliers] = {**row, "environment": environment.describe()}
    harness.write(options.output, done)
    return write_table(options.output)


def write_table(path: Path) -> None:
    """kv_quality.md beside the results."""
    done = json.loads(path.read_text())
    lines = [
        "| cache | bytes of a token | of bf16 | perplexity | to bf16 | KL to bf16 | top-1 agreement |",
        "|---|" + "---:|" * 6,
    ]
    base = done["auto"]
    for name in (*FORMATS, *(f"{name}{WITH_OUTLIERS}" for name in FORMATS)):
        if name in done:
            row = done[name]
            change = f"{100 * (row['perplexity'] / base['perplexity'] - 1):+.2f} %"
            size = f"{row['bytes_per_token']:.0f} | {row['bytes_per_token'] / base['bytes_per_token']:.3f}"
            quality = f"{row['kl_to_bf16']:.4f} | {100 * row['top1_agreement']:.1f} %"
            lines.append(f"| {name} | {size} | {row['perplexity']:.3f} | {change} | {quality} |")
    lines += [
        "",
        "Peers on the windows of `shared/quality/wiki_long.pt` (bf16 `DynamicCache` 19.017), with their own packages:",
        "",
    ]
    lines += ["| peer | bits | perplexity | KL to bf16 | top-1 agreement |", "|---|" + "---:|" * 4]
    lines += [f"| {name} | {bits} | {value:.3f} | {kl} | {top} % |" for name, (bits, value, kl, top) in PEERS.items()]
    harness.write_table(path, lines)


if __name__ == "__main__":
    main()
