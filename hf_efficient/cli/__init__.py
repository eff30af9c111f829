"""The command `hf-efficient`."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs `hf-efficient`.

    A command is a module with `add_arguments(parser)` and `run(options)`, which returns a `Result`, or something to
    call instead (the program of `exec`). Its optional `OPTION_OF` maps arguments of the Python interface to its
    options, for error messages.

    Returns the exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP,
    141 the reader of a pipe left.
    """
    options = argparse.Namespace(given=sys.argv[1:] if arguments is None else [*arguments])
    try:
        from hf_efficient.cli import signals

        with signals.raised():
            result = _run(options)
    except KeyboardInterrupt as interrupted:
        from hf_efficient.cli import output, signals

        return output.fail(options, 128 + signals.number(interrupted), "interrupted; no output is half written")
    if callable(result):
        return result() or 0  # the other program of `exec`: its signals and errors are its own
    return result


def _run(options: argparse.Namespace):
    """Reads the command line `options.given` into `options` and runs the command. Returns its exit status, or what is
    to be called instead."""
    from hf_efficient.cli import output, parser

    parser.make_parser().parse_args(options.given, options)
    module = parser.load(options.command)
    result, message = catch_errors(lambda: output.working(options, module.run))
    if message is not None:
        from hf_efficient.cli.error_messages import in_option_names

        return output.fail(options, result, in_option_names(message, options, getattr(module, "OPTION_OF", {})))
    return result if callable(result) else output.show(options, result)


def catch_errors(command) -> tuple:
    """Calls `command()`. Returns (its result or 0, None), or (1, message) after an expected error.

    Other exceptions are bugs of this package and propagate.
    """
    from safetensors import SafetensorError

    try:
        return command() or 0, None
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        return 1, str(error) or type(error).__name__
