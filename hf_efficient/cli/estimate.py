"""`hf-efficient estimate`: what a model takes in memory, time and money, from its config alone."""

import argparse

from hf_efficient.cli.config_option import HELP, config_name, parse_config
from hf_efficient.cli.option_types import at_least, positive
from hf_efficient.cli.path_checks import check_path
from hf_efficient.cli.result import Result


KEYS = {  # of each object in a list
    "architecture": "class of the model",
    "dtype": "of its weights",
    "quantization": "the config, null for none",
    "batch_size": "sequences",
    "prompt_tokens": "of a prompt",
    "new_tokens": "generated for each",
    "kv_format": "of the cache",
    "parameters": "all of them",
    "active_parameters": "that each token is multiplied with, or null",
    "checkpoint_bytes": "on disk",
    "weight_bytes": "in memory, of the device or else of this machine",
    "kv_cache_bytes": "at the end, or null",
    "kv_token_bytes": "of one token of one sequence, or null",
    "activation_bytes": "at once beside weights and cache, or null",
    "total_bytes": "of these three, or null",
    "prefill": "operations and bytes of the forward of the prompts, or null",
    "decode": "of one new token for each sequence, or null",
    "device": "its rates, or null",
    "prefill_bound": "the least seconds on the device, or null",
    "decode_bound": "of one new token, or null",
    "largest_batch": "that fits into nine tenths of the device's memory, or null",
    "price_per_hour": "as given, or null",
    "cost_per_million_prompt_tokens": "at that price and the least times, or null",
    "cost_per_million_new_tokens": "prompts included, or null",
    "notes": "what could not be told, and why",
}
OPTION_OF = {"batch_size": "--batch", "price_per_hour": "--price"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient estimate`."""
    command.add_argument("model", help="Hub id, folder or config.json; only the config is read")
    command.add_argument(
        "--config",
        action="append",
        help=f"none, {HELP}; may be repeated (default: none, int8 and int4, or the checkpoint's)",
    )
    command.add_argument("--batch", type=at_least(1), default=1, help="sequences (default 1)")
    command.add_argument("--prompt-tokens", type=at_least(1), default=512, help="tokens of a prompt (default 512)")
    command.add_argument("--new-tokens", type=at_least(1), default=128, help="tokens generated for each (default 128)")
    command.add_argument(
        "--kv-format", default="auto", help="of the PagedCache: auto, int8, fp8, int4, int2 (default auto)"
    )
    command.add_argument("--dtype", help="bfloat16, float16 or float32 (default: that of the config)")
    command.add_argument(
        "--device",
        help="h100, h200, a100, l4, rtx4090, mi300x, ryzen-7840u, core-ultra-155h, or measured: this machine",
    )
    command.add_argument("--memory", help="of the device, such as 24GB, in place of the table's")
    command.add_argument("--price", type=positive, help="of the device for an hour, in any currency")


def run(options: argparse.Namespace) -> Result:
    """The estimates side by side.

    Raises:
        ValueError: for arguments that are not allowed, or a config that cannot be read.
    """
    import hf_efficient
    from hf_efficient.evaluation.devices import find_device

    check_path("model", options.model)
    for name in ("memory", "price"):
        if getattr(options, name) is not None and options.device is None:
            raise ValueError(f"--{name} is of a device: give it with --device")
    configs = [parse_config(given) for given in options.config or ("none", "int8", "int4")]
    device = find_device(options.device) if options.device is not None else None
    chosen = dict(batch_size=options.batch, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
    chosen |= dict(kv_format=options.kv_format, dtype=options.dtype, device=device, memory=options.memory)
    if _is_compressed(options.model):
        if options.config:
            raise ValueError(f"model {options.model} is compressed already: leave --config out")
        configs = [None]
    found = [hf_efficient.estimate(options.model, c, price_per_hour=options.price, **chosen) for c in configs]
    names = [
        each.quantization if c is None and each.quantization else config_name(c) for each, c in zip(found, configs)
    ]
    return Result(table(found, names), [each.to_dict() for each in found])


def _is_compressed(model) -> bool:
    from hf_efficient.integrations.model_card import check_form
    from hf_efficient.planning.model_config import pop_quantization, read_config

    config = read_config(model)
    check_form(f"model {model}", config.architectures, getattr(config, "quantization_config", None))
    return pop_quantization(config) is not None


def table(estimates: list, names: list[str]) -> str:
    """The estimates in columns, in Markdown, with what is computed and what is measured below."""
    first = estimates[0]
    rows = [["", *names], ["---", *["---:"] * len(names)]]
    for label, value in _ROWS:
        cells = [value(each) for each in estimates]
        if any(cell is not None for cell in cells):
            rows.append([label, *("–" if cell is None else cell for cell in cells)])
    lines = [
        f"{first.architecture}, {first.dtype}: {first.parameters / 1e6:,.1f} million parameters; {first.batch_size} × "
        f"({first.prompt_tokens} + {first.new_tokens}) tokens, cache {first.kv_format}",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "Sizes and FLOPs are computed from the config; MB are 10^6 bytes.",
    ]
    if first.device is None:
        lines.append("Sizes in memory are those on this machine: give --device to see another's.")
    else:
        lines.append(
            f"Times are a roofline of {first.device.name} ({first.device.bandwidth / 1e9:,.0f} GB/s; "
            + ", ".join(f"{name} {rate / 1e12:,.4g}" for name, rate in first.device.operations.items())
            + f" TFLOP/s; {first.device.source}): no run is faster, none was measured."
        )
    lines += [f"Note: {note}." for note in dict.fromkeys(note for each in estimates for note in each.notes)]
    return "\n".join(lines)


def _megabytes(count) -> str | None:
    return None if count is None else f"{count / 1e6:,.1f}"


def _phase(name: str, show):
    """The cell of a column: `show(bound)` of the phase `name`; None where the phase or its bound is unknown."""

    def cell(estimate):
        work, limits = getattr(estimate, name), getattr(estimate, f"{name}_bound")
        return None if work is None or limits is None else show(limits)

    return cell


def _work(name: str, show):
    """The cell of a column: `show(work)` of the phase `name`."""
    return lambda estimate: None if getattr(estimate, name) is None else show(getattr(estimate, name))


def _money(name: str):
    return lambda estimate: None if getattr(estimate, name) is None else f"{getattr(estimate, name):,.4g}"


_ROWS = (
    ("weights on disk, MB", lambda e: _megabytes(e.checkpoint_bytes)),
    ("weights in memory, MB", lambda e: _megabytes(e.weight_bytes)),
    ("cache, MB", lambda e: _megabytes(e.kv_cache_bytes)),
    ("cache of a token, bytes", lambda e: None if e.kv_token_bytes is None else f"{e.kv_token_bytes:,.0f}"),
    ("activations, MB", lambda e: _megabytes(e.activation_bytes)),
    ("all of these, MB", lambda e: _megabytes(e.total_bytes)),
    ("prompt, GFLOP", _work("prefill", lambda work: f"{work.flops / 1e9:,.2f}")),
    ("prompt, FLOP per byte", _work("prefill", lambda work: f"{work.intensity:,.1f}")),
    ("new token, GFLOP", _work("decode", lambda work: f"{work.flops / 1e9:,.3f}")),
    ("new token, FLOP per byte", _work("decode", lambda work: f"{work.intensity:,.2f}")),
    ("prompt at least, ms", _phase("prefill", lambda b: f"{b.seconds * 1e3:,.3g} ({b.limit})")),
    ("new token at least, ms", _phase("decode", lambda b: f"{b.seconds * 1e3:,.3g} ({b.limit})")),
    ("new tokens/s at most", _phase("decode", lambda b: f"{b.tokens_per_second:,.0f}")),
    ("largest batch", lambda e: None if e.largest_batch is None else f"{e.largest_batch:,}"),
    ("a million prompt tokens", _money("cost_per_million_prompt_tokens")),
    ("a million new tokens, prompts included", _money("cost_per_million_new_tokens")),
)
