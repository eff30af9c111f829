"""What the commands that compress a model share: what is tried first, and the way from a model to a saved one."""

import argparse
import time

from hf_efficient.cli.calibration_text import check_calibration
from hf_efficient.cli.paths import check_model, check_output


DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_loading_arguments(command: argparse.ArgumentParser) -> None:
    """Which modules are compressed, and from weights of which dtype."""
    command.add_argument(
        "--modules-to-not-convert",
        nargs="+",
        metavar="MODULE",
        help="names or globs of modules to leave as they are, beside the output embedding",
    )
    add_dtype_argument(command)


def add_dtype_argument(command: argparse.ArgumentParser) -> None:
    """The dtype of the weights that are loaded."""
    command.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the loaded weights (default auto: as saved)"
    )


def check_dense(option: str, name: str, config, asked: str) -> None:
    """Raises ValueError where the model `name`, whose transformers config is `config`, is compressed already, so that what is
    `asked` of it would come to nothing, or be refused after it is loaded."""
    from hf_efficient.integrations import hub, model_card

    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return
    saved = saved if isinstance(saved, dict) else saved.to_dict()
    method, bits = saved.get("quant_method"), saved.get("bits")
    if method in model_card.CONFIGS:
        kind = model_card.recipe(model_card.read_config(saved))
    else:
        kind = f"{method}, {bits} bits" if bits else str(method)
    base = hub.recorded_base_model(name)
    raise ValueError(
        f"{option} {name} is compressed already ({kind}): {asked} needs plain weights, give the model it was made from"
        + (f", {base}" if base else "")
    )


def compress_and_save(name: str, config, output: str, asked: str, dtype: str = "auto", describe=None) -> None:
    """Loads the model `name` with `config`, writes it, its tokenizer and a card that names `name` to the folder `output`, and
    prints what came of it.

    Args:
        asked: what the command is to do, for the error where the model is compressed already.
        dtype: one of `DTYPES`.
        describe: called with (model, the folder that is being written).

    Raises:
        ValueError: the output cannot be written, the model is not there or compressed already, or its calibration text
            cannot serve; before weights are loaded.
    """
    folder, found = check_output("--output", output), check_model("model", name)

    import transformers
    from transformers import AutoTokenizer

    from hf_efficient.calibration.loading import MissingText
    from hf_efficient.evaluation import memory
    from hf_efficient.files import new_folder
    from hf_efficient.integrations import hub

    ternary = config.name == "efficient_bitnet" and _quant_method(found) == "bitnet"  # read as it is
    if not ternary:
        check_dense("model", name, found, asked)
    architecture = (found.architectures or ["AutoModelForCausalLM"])[0]
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ValueError(f"{name}: transformers {transformers.__version__} has no {architecture}")
    check_calibration(config.calibration, found, name)
    start = time.perf_counter()
    try:
        model = kind.from_pretrained(name, dtype=dtype, quantization_config=config)
    except MissingText as error:
        raise ValueError(f"{error.reason} needs calibration text: give it with --calibration FILE") from None
    seconds = time.perf_counter() - start
    with new_folder(folder) as aside:
        model.save_pretrained(aside)
        try:
            AutoTokenizer.from_pretrained(name).save_pretrained(aside)
        except (OSError, ValueError):  # a model without a tokenizer
            print("no tokenizer was found beside the model")
        if describe is not None:
            describe(model, aside)
        hub.record_base_model(aside, folder.name, name)
    print(f"{output}: {memory.weight_bytes(model) / 1e6:.1f} MB of weights, made in {seconds:.0f} s")


def _quant_method(config) -> str | None:
    saved = getattr(config, "quantization_config", None)
    return saved.get("quant_method") if isinstance(saved, dict) else getattr(saved, "quant_method", None)
