"""`hf-efficient bench`: latency and throughput of a model, measured here."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from hf_efficient.cli.compression import add_dtype_argument, check_dense
from hf_efficient.cli.config_argument import HELP, check_text_given, config_name, parse_config
from hf_efficient.cli.paths import check_folder, check_model


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient bench`."""
    command.add_argument("model", help="Hub id or local folder")
    command.add_argument("--config", default="none", help=f"{HELP} (default none)")
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
    command.add_argument("--json", action="store_true", help="print only the result as JSON")


def run(options: argparse.Namespace) -> None:
    """Loads the model, measures every batch size, writes the result and prints its table.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded.
    """
    config = _check(options)
    plotted = importlib.util.find_spec("matplotlib") is not None
    if not plotted:
        print("no plot: it needs the package 'matplotlib': pip install 'hf_efficient[demo]'", file=sys.stderr)

    import torch
    from transformers import AutoModelForCausalLM

    import hf_efficient
    from hf_efficient.evaluation import bench, environment, memory

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loading = {"dtype": options.dtype, "attn_implementation": "flash_paged", "quantization_config": config}
    if device.type != "cpu":
        loading["device_map"] = device.type
    model = AutoModelForCausalLM.from_pretrained(options.model, **loading).eval()
    model.generation_config.eos_token_id = None  # every row gets all its tokens
    hf_efficient.enable_speculation(model)  # one loop for all configs, which drafts nothing without a drafter
    generator = torch.Generator().manual_seed(0)
    length = options.prompt_tokens
    prompts = torch.randint(model.config.get_text_config().vocab_size, (options.batch, length), generator=generator)
    prompts = prompts.to(device)

    def generate(rows: int, clock):
        given = {"input_ids": prompts[:rows], "attention_mask": torch.ones_like(prompts[:rows])}
        if options.kv_format != "auto" or device.type != "cpu":  # else the loop makes a PagedCache by itself
            given["past_key_values"] = hf_efficient.PagedCache(model.config, kv_format=options.kv_format)
        given |= {"max_new_tokens": options.new_tokens, "do_sample": False}
        return model.generate(**given, pad_token_id=0, stopping_criteria=[clock])

    batches = [
        bench.measure_batch(
            lambda clock, rows=rows: generate(rows, clock), rows, options.new_tokens, options.repeats, not options.json
        )
        for rows in bench.batch_sizes(options.batch)
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
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        hardware = content["environment"]["hardware"]
        print(
            f"{content['config_name']}, {content['dtype']}, {options.prompt_tokens} + {options.new_tokens} tokens, measured "
            f"on {hardware['gpu'] or hardware['cpu']}, {hardware['threads']} threads\n"
        )
        print(bench.table(content))
        print("\nwritten: " + ", ".join(map(str, paths)))


def _check(options: argparse.Namespace):
    for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("batch", 1), ("repeats", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} is too small: at least {least}")
    if options.latency_bound is not None and not 0 < options.latency_bound < float("inf"):
        raise ValueError(f"--latency-bound {options.latency_bound}: must be a positive number of seconds")
    check_folder("--output", options.output)
    config = parse_config(options.config)
    check_text_given(config)
    found = check_model("model", options.model, causal=True)
    if config is not None:
        check_dense("model", options.model, found, f"--config {options.config}")

    import hf_efficient

    hf_efficient.PagedCache(found, kv_format=options.kv_format)  # can it hold them?
    return config
