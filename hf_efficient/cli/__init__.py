"""The command `hf-efficient`."""

import argparse
import importlib
import sys


COMMANDS = {  # name -> what it does; the module has the name with underscores
    "demo": "quantize and measure a small real model beside stock transformers",
    "run": "the same for your own model and configs",
    "quantize": "compress a model and save it",
    "prune": "zero single weights of a model and save it",
    "prune-structure": "make a smaller model of the same class and save it",
    "export": "write a compressed model for vLLM, llama.cpp and others",
    "train-draft": "train draft heads for speculative generation",
    "recover": "train a pruned model against the one it was",
    "sparsify-context": "train which neurons each token calls for, for faster decoding",
    "estimate": "what a model takes in memory and time, from its config",
    "bench": "measure latency and throughput of a model",
    "doctor": "what this machine can do, and why something is off",
    "push": "upload a compressed model with a card",
    "exec": "run another package's command with this plugin",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs `hf-efficient`; returns the exit status (0 done, 1 failed, 2 bad arguments, 130 interrupted).

    A command is a module with `add_arguments(parser)` and `run(options)`. Its optional `OPTION_OF` maps arguments of
    the Python interface to its options, for error messages.
    """
    import hf_efficient

    parser = argparse.ArgumentParser(
        prog="hf-efficient", description="Makes Hugging Face models smaller and faster, and measures how much."
    )
    parser.add_argument("--version", action="version", version=f"hf-efficient {hf_efficient.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"hf_efficient.cli.{name.replace('-', '_')}") for name in COMMANDS}
    for name, module in modules.items():
        module.add_arguments(subparsers.add_parser(name, help=COMMANDS[name]))
    options = parser.parse_args(arguments)
    module = modules[options.command]
    result, message = catch_errors(lambda: module.run(options))
    if message is not None:
        from hf_efficient.cli.error_messages import in_option_names

        message = in_option_names(message, options, getattr(module, "OPTION_OF", {}))
        print(f"hf-efficient: {message}", file=sys.stderr)
    return (result() or 0) if callable(result) else result  # `exec` returns the other program: its errors are its own


def catch_errors(command) -> tuple:
    """Calls `command()`. Returns (its result or 0, None), or (exit status, message) after an expected error or Ctrl-C.

    Other exceptions are bugs of this package and propagate.
    """
    from safetensors import SafetensorError

    try:
        return command() or 0, None
    except KeyboardInterrupt:
        return 130, "interrupted; the output is as it was"
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        return 1, str(error) or type(error).__name__
