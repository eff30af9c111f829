"""`hf-efficient bench`: latency and throughput of a model, measured here."""

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path

from hf_efficient.cli.bench_options import add_arguments, check
from hf_efficient.cli.config_option import config_name
from hf_efficient.cli.models import load_causal_lm
from hf_efficient.cli.result import Result
from hf_efficient.integrations.transformers_compat import cache_name


OPTION_OF = {"batch_size": "--batch"}
KEYS = {
    "model": "as it was given",
    "config": "arguments of the quantization config, null for none",
    "config_name": "its name in tables",
    "dtype": "of the model",
    "kv_format": "of the cache",
    "prompt_tokens": "of a prompt",
    "new_tokens": "generated for each",
    "latency_bound": "seconds, or null",
    "weight_bytes": "of the weights in memory",
    "peak_memory_bytes": "of the process, on a GPU of its memory",
    "batches": "latencies in seconds, tokens and requests a second of each batch size",
    "at_latency_bound": "the batch with most requests a second within the bound, or null",
    "environment": "hardware, versions, commit, command and time",
}
__all__ = ["KEYS", "OPTION_OF", "add_arguments", "run"]


def run(options: argparse.Namespace) -> Result:
    """Loads the model, measures every batch size and writes the result.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded.
    """
    config = check(options, KEYS)
    plotted = importlib.util.find_spec("matplotlib") is not None
    if not plotted:
        print("no plot: it needs the package 'matplotlib': pip install 'hf_efficient[demo]'", file=sys.stderr)

    import torch

    import hf_efficient
    from hf_efficient.evaluation import bench, environment, memory

    loading = {"dtype": options.dtype, "attn_implementation": "flash_paged", "quantization_config": config}
    model = load_causal_lm(options.model, **loading).eval()
    device = model.device
    model.generation_config.eos_token_id = None  # every sequence gets all its tokens
    hf_efficient.enable_speculation(model)  # the native loop for all configs; without a drafter it drafts nothing
    generator = torch.Generator().manual_seed(0)
    shape = options.batch, options.prompt_tokens
    prompts = torch.randint(model.config.get_text_config().vocab_size, shape, generator=generator).to(device)

    def generate(batch_size: int, clock):
        ids = prompts[:batch_size]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        if options.kv_format != "auto" or device.type != "cpu":  # else the native loop makes a PagedCache by itself
            inputs[cache_name()] = hf_efficient.PagedCache(model.config, kv_format=options.kv_format)
        return model.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False, stopping_criteria=[clock])

    batches = [
        bench.measure_batch(partial(generate, size), size, options.new_tokens, options.repeats)
        for size in bench.batch_sizes(options.batch)
    ]
    bound = options.latency_bound
    content = {
        "model": options.model,
        "config": None if config is None else config.to_dict(),
        "config_name": config_name(config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_format": options.kv_format,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "latency_bound": bound,
        "weight_bytes": memory.weight_bytes(model),
        "peak_memory_bytes": memory.peak_memory_bytes(device),
        "batches": batches,
        "at_latency_bound": None if bound is None else bench.at_latency_bound(batches, bound),
        "environment": environment.describe(),
    }
    paths = bench.write(content, Path(options.output), plotted)
    hardware = content["environment"]["hardware"]
    text = (
        f"{content['config_name']}, {content['dtype']}, {options.prompt_tokens} + {options.new_tokens} tokens, "
        f"measured on {hardware['gpu'] or hardware['cpu']}, {hardware['threads']} threads\n\n"
        f"{bench.table(content)}\n\nwritten: {', '.join(map(str, paths))}"
    )
    return Result(text, content)
