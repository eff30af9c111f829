"""`hf-efficient prune`: zeroes single weights of a model and saves it for `from_pretrained`."""

import argparse
import dataclasses
import json
from pathlib import Path

from hf_efficient.cli import calibration_options
from hf_efficient.cli.compress import KEYS as COMPRESS_KEYS
from hf_efficient.cli.compress import compress_and_save
from hf_efficient.cli.options import add_loading_arguments, add_output_argument, given_options
from hf_efficient.cli.result import Result


KEYS = COMPRESS_KEYS | {"sparsity": "the share of zeros of each layer"}
OPTION_OF = calibration_options.OPTION_OF
REPORT = "sparsity.json"
SCHEME = ("sparsity", "pattern", "method", "group", "allocation", "refine")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient prune`."""
    command.add_argument("model", help="Hub id or local folder")
    add_output_argument(command)
    command.add_argument("--sparsity", type=float, help="fraction of zeros, 0 to 1 (1 not allowed)")
    command.add_argument("--pattern", help="instead: n:m, as 2:4, n kept of every m neighbours")
    command.add_argument(
        "--method", help="how the zeros are chosen: magnitude, wanda, sparsegpt, alps, ... (default wanda)"
    )
    command.add_argument(
        "--group", help="which weights compete without a pattern: row or layer (default: the method's)"
    )
    command.add_argument("--allocation", help="uniform, or owl: layers with more outliers keep more (default uniform)")
    command.add_argument("--refine", action="store_true", default=None, help="tune the kept weights on block outputs")
    command.add_argument("--weights", help='arguments of WeightOnlyConfig for the kept weights as JSON: {"bits": 4}')
    add_loading_arguments(command)
    calibration_options.add_calibration_arguments(command)


def run(options: argparse.Namespace) -> Result:
    """Loads, prunes and saves, with the sparsity of each layer in `sparsity.json`.

    Raises:
        ValueError: for arguments that are not allowed, or a model that is compressed already, before it is loaded.
    """
    import hf_efficient

    given = given_options(options, SCHEME)
    if options.weights is not None:
        try:
            given["weights"] = json.loads(options.weights)
        except json.JSONDecodeError as error:
            raise ValueError(f"--weights {options.weights!r} is not JSON: {error}") from None
    if given.get("weights") is not None and not isinstance(given["weights"], dict):
        raise ValueError(f"--weights {options.weights!r}: expected a JSON object of arguments")
    if options.sparsity is None and options.pattern is None:
        raise ValueError("give exactly one of --sparsity FRACTION and --pattern N:M")
    given["modules_to_not_convert"] = options.modules_to_not_convert
    config = hf_efficient.SparseConfig(**given, **calibration_options.calibration_arguments(options))
    found: dict[str, float] = {}

    def report(model, folder: Path) -> None:
        from hf_efficient.evaluation.sparsity import weight_sparsity

        found.update(weight_sparsity(model))
        (folder / REPORT).write_text(json.dumps(found, indent=1) + "\n")

    done = compress_and_save(options, config, "prune", report)
    return dataclasses.replace(
        done, text="\n".join([*_of_kinds(found), done.text]), document={**done.document, "sparsity": found}
    )


def _of_kinds(found: dict[str, float]) -> list[str]:
    """The least and the largest share of zeros of each kind of layer, a line each."""
    kinds: dict[str, list[float]] = {}
    lines = []
    for name, share in found.items():
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        kinds.setdefault(kind, []).append(share)
    for kind, shares in kinds.items():
        low, high = f"{min(shares):.1%}", f"{max(shares):.1%}"
        lines.append(f"{kind}: {low if low == high else f'{low} to {high}'} zeros")
    return lines
