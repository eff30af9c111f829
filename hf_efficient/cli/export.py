"""`hf-efficient export`: writes a compressed model for another engine."""

import argparse
import json
import os

from hf_efficient.cli.models import check_model
from hf_efficient.cli.path_checks import check_output, check_path
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = {
    "output": "the folder or file",
    "format": "as asked",
    "bytes": "of its files",
    "quantized_layers": "how many layers are compressed",
    "rounding": "largest change of a weight, as a part of the largest of its layer; 0: none",
    "engines": "what reads it",
}
FORMATS = ("compressed-tensors", "gptq", "awq", "bitnet", "gguf")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient export`."""
    command.add_argument("model", help="folder that `hf-efficient quantize` or save_pretrained wrote")
    command.add_argument(
        "--format",
        choices=FORMATS,
        required=True,
        help="gguf: llama.cpp, Ollama; others: vLLM (gptq only of symmetric 4 and 8 bits), SGLang, TGI",
    )
    command.add_argument("--output", required=True, help="new folder, or for gguf a new file name in .gguf")


def run(options: argparse.Namespace) -> Result:
    """Exports, and says whether the weights are still the same numbers.

    Raises:
        ValueError: the output exists, or the target cannot hold the model; nothing is written.
    """
    from hf_efficient.checkpoints.export import export
    from hf_efficient.integrations import hub

    if options.format != "gguf":
        check_output("--output", options.output)
    elif os.path.lexists(check_path("--output", options.output)):
        raise ValueError(f"--output {options.output} exists already: give a new file name")
    if not check_path("model", options.model).is_dir():
        raise ValueError(f"model {options.model}: there is no such folder")
    check_model("model", options.model)

    base_model = hub.recorded_base_model(options.model) or options.model

    def describe(output, engines):
        write_record(output, options, "exported", base_model, made_from=options.model, engines=[*engines])

    report = export(options.model, options.output, options.format, describe=describe)
    exact = "unchanged" if report.rounding == 0 else f"changed by at most {report.rounding:.1e} of the largest"
    engines = _engines(report)
    text = (
        f"{report.path}: {report.nbytes / 1e6:.1f} MB, {report.quantized_layers} compressed layers, weights {exact}; "
        f"read by {', '.join(engines)}"
    )
    values = (str(report.path), report.format, report.nbytes, report.quantized_layers, report.rounding, engines)
    return Result(text, dict(zip(KEYS, values)))


def _engines(report) -> list[str]:
    """Of transformers with what it needs: compressed-tensors 0.20 does not load packed zero points otherwise."""
    if report.format == "compressed-tensors":
        config = json.loads((report.path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        schemes = config["config_groups"].values()
        if any(not each["weights"]["symmetric"] and each["input_activations"] is None for each in schemes):
            return [f"{name} (dequantize=True)" if name == "transformers" else name for name in report.engines]
    return [*report.engines]
