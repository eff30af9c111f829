"""The command `hf-efficient`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs `hf-efficient`.

    A command is a module with `add_arguments(parser)` and `run(options)`, which returns a `Result`, or something to
    call instead (the program of `exec`). Its optional `OPTION_OF` maps arguments of the Python interface to its
    options, for error messages.

    Returns the exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted by Ctrl-C, 141 the reader of a pipe left.
    """
    from hf_efficient.cli import output, parser

    given = sys.argv[1:] if arguments is None else [*arguments]
    options = parser.make_parser().parse_args(given)
    options.given = given
    module = parser.load(options.command)
    result, message = catch_errors(lambda: output.working(options, module.run))
    if message is not None:
        from hf_efficient.cli.error_messages import in_option_names

        return output.fail(options, result, in_option_names(message, options, getattr(module, "OPTION_OF", {})))
    if callable(result):
        return result() or 0  # the other program of `exec`: its errors are its own
    return output.show(options, result)


def catch_errors(command) -> tuple:
    """Calls `command()`. Returns (its result or 0, None), or (exit status, message) after an expected error or Ctrl-C.

    Other exceptions are bugs of this package and propagate.
    """
    try:
        from safetensors import SafetensorError

        try:
            return command() or 0, None
        except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
            return 1, str(error) or type(error).__name__
    except KeyboardInterrupt:
        return 130, "interrupted; the output is as it was"
