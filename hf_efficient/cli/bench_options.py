"""The options of `hf-efficient bench`, and their checks before a model is loaded."""

import argparse
from collections.abc import Iterable

from hf_efficient.cli.config_option import HELP, parse_config
from hf_efficient.cli.memory_plan import check_generation
from hf_efficient.cli.models import check_model, check_uncompressed
from hf_efficient.cli.option_types import at_least, positive
from hf_efficient.cli.options import add_dtype_argument
from hf_efficient.cli.path_checks import check_report


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient bench`."""
    command.add_argument("model", help="Hub id or local folder")
    command.add_argument("--config", default="none", help=f"none, {HELP} (default none)")
    command.add_argument("--kv-format", default="auto", help="of the cache: auto, int8, fp8, int4, int2 (default auto)")
    command.add_argument(
        "--prompt-tokens", type=at_least(1), default=128, help="random tokens of a prompt (default 128)"
    )
    command.add_argument(
        "--new-tokens", type=at_least(2), default=64, help="tokens generated for each prompt (default 64)"
    )
    command.add_argument(
        "--batch", type=at_least(1), default=4, help="largest batch; 1, 2, 4, ... come before it (default 4)"
    )
    command.add_argument("--repeats", type=at_least(1), default=5, help="timed runs of each batch (default 5)")
    command.add_argument(
        "--latency-bound",
        type=positive,
        help="seconds of a request (95th percentile) within which queries/s are sought",
    )
    add_dtype_argument(command)
    command.add_argument("--output", default="bench", help="folder for bench.json and bench.png (default bench)")


def check(options: argparse.Namespace, keys: Iterable[str]):
    """The config of --config, after checks of all options. keys: of a result. Raises ValueError."""
    check_report("--output", options.output, ("bench.json", "bench.png"), keys)
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
