"""`hf-efficient bench`: latency and throughput of a model, measured here."""

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path

from hf_efficient.cli.config_option import HELP, config_name, parse_config
from hf_efficient.cli.memory_plan import check_generation
from hf_efficient.cli.models import check_model, check_uncompressed, load_causal_lm
from hf_efficient.cli.options import add_dtype_argument, check_at_least
from hf_efficient.cli.path_checks import check_report
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


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient bench`."""
    command.add_argument("model", help="Hub id or local folder")
    command.add_argument("--config", default="none", help=f"none, {HELP} (default none)")
    command.add_argument("--kv-format", default="auto", help="of the cache: auto, int8, fp8, int4, int2 (default auto)")
    command.add_argument("--prompt-tokens", type=int, default=128, help="random tokens of a prompt (default 128)")
    command.add_argument("--new-tokens", type=int, default=64, help="tokens generated for each prompt (default 64)")
    command.add_argument("--batch", type=int, default=4, help="largest batch; 1, 2, 4, ... come before it (default 4)")
    command.add_argument("--repeats", type=int, default=5, help="timed runs of each batch (default 5)")
    command.add_argument(
        "--latency-bound", type=float, help="seconds of a request (95th percentile) within which queries/s are sought"
    )
    add_dtype_argument(command)
    command.add_argument("--output", default="bench", help="folder for bench.json and bench.png (default bench)")


def run(options: argparse.Namespace) -> Result:
    """Loads the model, measures every batch size and writes the result.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded.
    """
    config = _check(options)
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


def _check(options: argparse.Namespace):
    """The config of --config, after checks of all options."""
    check_at_least(options, prompt_tokens=1, new_tokens=2, batch=1, repeats=1)
    if options.latency_bound is not None and not 0 < options.latency_bound < float("inf"):
        raise ValueError(f"--latency-bound {options.latency_bound}: must be a positive number of seconds")
    check_report("--output", options.output, ("bench.json", "bench.png"), KEYS)
    config = parse_config(options.config)
    found = check_model("model", options.model, causal=True)
    if config is not None:
        check_uncompressed("model", options.model, found, f"--config {options.config}")

    import hf_efficient

    hf_efficient.PagedCache(found, kv_format=options.kv_format)  # can it hold them?
    check_generation(
        options.model, found, config, fewer="--prompt-tokens, --new-tokens or --batch", batch_size=options.batch,
        prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens, kv_format=options.kv_format,
        dtype=None if options.dtype == "auto" else options.dtype,
    )  # fmt: skip
    return config
