"""`hf-efficient serve`: `transformers serve` with this plugin, which is told beforehand what it may take."""

import argparse
import json
import shlex
from collections.abc import Callable


PAGE = 256  # tokens of a block, unless transformers is told otherwise
OPTION_OF = {"batch_size": "--sequences", "prompt_tokens": "--context"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient serve`."""
    command.add_argument("model", help="Hub id or folder, compressed or not")
    command.add_argument("--host", default="localhost", help="address to listen at (default localhost)")
    command.add_argument("--port", type=int, default=8000, help="port to listen at (default 8000)")
    command.add_argument("--sequences", type=int, default=16, help="sequences that are in memory at once (default 16)")
    command.add_argument(
        "--context", type=int, default=2048, help="tokens of each, prompt and answer together (default 2048)"
    )
    command.add_argument(
        "--kv-format",
        choices=("auto", "int8", "fp8", "int4", "int2"),
        default="auto",
        help="how keys and values are stored; int4 and int2 on a CPU (default auto: in the model's dtype)",
    )


def run(options: argparse.Namespace) -> Callable[[], int | None]:
    """The server, to be called in this process. Prints its address, what it will take, and how to ask it.

    Raises:
        ValueError: for a model that does not fit into memory, with the plan; for arguments that are not allowed; with
            transformers 5.16, and with a `--kv-format` before 5.19.
        ImportError: without what `transformers serve` needs.
    """
    import hf_efficient
    from hf_efficient.cli import exec as program
    from hf_efficient.cli.path_checks import check_path
    from hf_efficient.integrations import transformers_paged_formats

    check_path("model", options.model)
    for name in ("sequences", "context"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    if not 0 < options.port < 1 << 16:
        raise ValueError(f"--port {options.port}: must be 1 to 65535")
    _check_installed()
    _check_format(options.kv_format)
    blocks = options.sequences * -(-options.context // PAGE)
    plan = hf_efficient.estimate(
        options.model, batch_size=options.sequences, prompt_tokens=max(1, options.context - 1), new_tokens=1,
        kv_format=options.kv_format,
    )  # fmt: skip
    cache = None if plan.kv_token_bytes is None else int(plan.kv_token_bytes * blocks * PAGE)
    print(_checked_plan(options, plan.weight_bytes, cache), flush=True)
    transformers_paged_formats.use_by_default(options.kv_format)
    words = ["transformers", "serve", options.model, "--host", options.host, "--port", str(options.port)]
    words += ["--attn-implementation", "hf-efficient/flash_paged_2", "--continuous-batching"]
    words += ["--cb-num-blocks", str(blocks)]
    return program.run(argparse.Namespace(program=words[0], arguments=words[1:]))


def _check_installed() -> None:
    from transformers.utils.import_utils import is_serve_available

    from hf_efficient.integrations.transformers_releases import needs

    needs("5.17", "serve")  # whose server takes the attention of others
    if not is_serve_available():
        raise ImportError("serve needs what `transformers serve` does: pip install 'transformers[serving]'")


def _check_format(kv_format: str) -> None:
    import torch

    from hf_efficient.integrations.transformers_releases import needs

    if kv_format != "auto":
        needs("5.19", f"--kv-format {kv_format}")
    if kv_format in ("int4", "int2") and torch.cuda.is_available():
        raise ValueError(f"--kv-format {kv_format}: continuous batching has it on a CPU; use int8 or fp8 on a GPU")


def _checked_plan(options: argparse.Namespace, weights: int, cache: int | None) -> str:
    import torch

    from hf_efficient.evaluation.devices import free_memory

    where = "cuda" if torch.cuda.is_available() else "cpu"
    free = free_memory(torch.device(where))
    url = f"http://{options.host}:{options.port}"
    total = weights + (cache or 0)
    pages = "unknown" if cache is None else _gigabytes(cache)
    plan = (
        f"weights {_gigabytes(weights)}, pages for {options.sequences} sequences of {options.context} tokens {pages}; "
        f"{_gigabytes(free)} are free on the {where}"
    )
    if total > free:
        raise ValueError(
            f"{options.model} does not fit: {plan}. Compress it (hf-efficient quantize), or ask for fewer --sequences "
            "or a shorter --context"
        )
    body = json.dumps({"model": options.model, "messages": [{"role": "user", "content": "Hello"}]})
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    return f"{url}  {plan}\n{shlex.join(words)}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
