"""`hf-efficient serve`: `transformers serve` with this plugin, and with memory limits that are checked beforehand."""

import argparse
import json
import shlex
import socket
from collections.abc import Callable

from hf_efficient.cli.memory_plan import gigabytes, planned
from hf_efficient.cli.option_types import at_least, positive


PAGE = 256  # tokens of a block, unless transformers is told otherwise
OPTION_OF = {"prompt_lookup_num_tokens": "--prompt-lookup"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient serve`."""
    command.add_argument("model", help="Hub id or folder, compressed or not")
    command.add_argument("--host", default="localhost", help="address to listen at (default localhost)")
    command.add_argument("--port", type=at_least(1, 65535), default=8000, help="port to listen at (default 8000)")
    command.add_argument("--sequences", type=at_least(1), default=16, help="sequences in memory at once (default 16)")
    command.add_argument(
        "--context", type=at_least(1), default=2048, help="tokens of each, prompt and answer together (default 2048)"
    )
    command.add_argument(
        "--kv-format",
        choices=("auto", "int8", "fp8", "int4", "int2"),
        default="auto",
        help="how keys and values are stored; int4 and int2 on a CPU (default auto: in the model's dtype)",
    )
    drafters = command.add_mutually_exclusive_group()
    drafters.add_argument(
        "--prompt-lookup",
        type=at_least(1),
        metavar="N",
        help="draft at most N tokens of a sequence from its own text, on a CPU",
    )
    drafters.add_argument("--draft-model", help="Hub id or folder of a smaller model that drafts, on a CPU")
    command.add_argument(
        "--max-ms-between-tokens",
        type=positive,
        metavar="MS",
        help="read prompts in parts, so that decoding sequences get tokens this often, on a CPU (default: no limit)",
    )


def run(options: argparse.Namespace) -> Callable[[], int | None]:
    """The server, to be called in this process. Prints its address, what it will take, and how to ask it.

    Raises:
        ValueError: for a model that does not fit into memory, with the plan, or that is not whole or has no tokenizer;
            for a port in use; for arguments that are not allowed; with transformers 5.16, and before 5.19 with any
            option from `--kv-format` on.
        ImportError: without what `transformers serve` needs.
    """
    from hf_efficient.cli import exec as program
    from hf_efficient.cli.models import check_model, check_tokenizer
    from hf_efficient.integrations import transformers_paged_formats

    models = [(options.model, check_model("model", options.model), options.kv_format)]
    if options.draft_model is not None:
        models.append((options.draft_model, check_model("--draft-model", options.draft_model), "auto"))
    _check_installed()
    check_tokenizer("model", options.model)
    _check_address(options.host, options.port)
    served_with = _checked_options(options)
    blocks = options.sequences * -(-options.context // PAGE)
    weights, pages = zip(*(_sizes(*each) for each in models))
    cache = None if None in pages else int(sum(pages) * blocks * PAGE)
    print(_checked_plan(options, None if None in weights else sum(weights), cache), flush=True)
    if options.draft_model is not None:
        served_with["assistant_model"] = _draft_model(options)
    transformers_paged_formats.served_with = served_with
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


def _check_address(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            tried.bind(address)
        except OSError as error:
            raise ValueError(f"--port {port} of {host}: {error.strerror}; give another --port") from None


def _sizes(model: str, config, kv_format: str) -> tuple[int | None, float | None]:
    """(bytes of the weights of `model`, of a token in its pages); None where nobody knows."""
    weights, plan = planned(model, config, kv_format=kv_format, prompt_tokens=1, new_tokens=1)
    return weights, plan.kv_token_bytes


def _checked_options(options: argparse.Namespace) -> dict:
    """The arguments of our `ContinuousBatchingConfig`, without the draft model."""
    import torch

    from hf_efficient.integrations.transformers_releases import needs

    given = {
        "kv_format": None if options.kv_format == "auto" else options.kv_format,
        "prompt_lookup_num_tokens": options.prompt_lookup,
        "max_ms_between_tokens": options.max_ms_between_tokens,
    }
    given = {name: value for name, value in given.items() if value is not None}
    on_cpu = [OPTION_OF.get(name, f"--{name.replace('_', '-')}") for name in given if name != "kv_format"]
    on_cpu += ["--draft-model"] if options.draft_model is not None else []
    if options.kv_format in ("int4", "int2"):
        on_cpu.append(f"--kv-format {options.kv_format}")
    if on_cpu and torch.cuda.is_available():
        raise ValueError(f"{on_cpu[0]}: continuous batching has it on a CPU, and this machine has a GPU")
    if given or on_cpu:
        needs("5.19", " ".join(on_cpu) or f"--kv-format {options.kv_format}")
        from hf_efficient import ContinuousBatchingConfig

        ContinuousBatchingConfig(**given)  # raises for what is not allowed
    return given


def _draft_model(options: argparse.Namespace):
    """Raises ValueError where the vocabularies differ, before the model is loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    configs = (AutoConfig.from_pretrained(name) for name in (options.model, options.draft_model))
    ours, theirs = (config.get_text_config(decoder=True).vocab_size for config in configs)
    if ours != theirs:
        raise ValueError(
            f"--draft-model {options.draft_model} knows {theirs} tokens, and {options.model} {ours}: "
            "they need one tokenizer"
        )
    return AutoModelForCausalLM.from_pretrained(options.draft_model, attn_implementation="flash_paged", dtype="auto")


def _checked_plan(options: argparse.Namespace, weights: int | None, cache: int | None) -> str:
    import torch

    from hf_efficient.evaluation.devices import free_memory

    where = "cuda" if torch.cuda.is_available() else "cpu"
    free = free_memory(torch.device(where))
    url = f"http://{options.host}:{options.port}"
    total = (weights or 0) + (cache or 0)
    drafts = "" if options.draft_model is None else ", both with the draft model's"
    plan = (
        f"weights {gigabytes(weights)}, pages for {options.sequences} sequences of {options.context} tokens "
        f"{gigabytes(cache)}{drafts}; {gigabytes(free)} are free on the {where}"
    )
    if total > free:
        raise ValueError(
            f"{options.model} does not fit: {plan}. Compress it (hf-efficient quantize), or ask for fewer --sequences "
            "or a shorter --context"
        )
    body = json.dumps({"model": options.model, "messages": [{"role": "user", "content": "Hello"}]})
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    return f"{url}  {plan}\n{shlex.join(words)}"
