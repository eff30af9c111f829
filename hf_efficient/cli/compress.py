"""From a model and a config of this package to a saved compressed model: `quantize` and `prune`."""

import argparse
import time

from hf_efficient.cli.calibration_options import check_calibration, check_used
from hf_efficient.cli.models import check_model, check_uncompressed, find_tokenizer, save, saved_quantization
from hf_efficient.cli.path_checks import check_output, check_outside
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = {
    "output": "the folder",
    "weight_bytes": "of the weights in memory",
    "seconds": "of loading and compressing",
    "config": "arguments of the config",
}


def compress_and_save(options: argparse.Namespace, config, asked: str, describe=None) -> Result:
    """Loads the model of the command with `config`, and writes it with its tokenizer and a card to the folder
    `options.output`.

    Args:
        asked: what the command does, for the error where the model is compressed already.
        describe: called with (model, the folder that is being written).

    Raises:
        ValueError: the output cannot be written, the model is not there or compressed already, or its calibration text
            cannot serve; before weights are loaded.
    """
    name, output = options.model, options.output
    check_used(options, config)
    folder = check_output("--output", output)
    check_outside(options, "checkpoint_dir")
    found = check_model("model", name)

    import transformers

    from hf_efficient.evaluation import memory

    is_bitnet = (saved_quantization(found) or {}).get("quant_method") == "bitnet"
    if not (config.name == "efficient_bitnet" and is_bitnet):  # BitNet's own checkpoints are read as they are
        check_uncompressed("model", name, found, asked)
    architecture = (found.architectures or ["AutoModelForCausalLM"])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ValueError(f"{name}: transformers {transformers.__version__} has no {architecture}")
    check_calibration(config.calibration, found, name)
    start = time.perf_counter()
    if getattr(options, "memory", None) is not None:
        return _on_disk(options, config, folder, start)
    model = model_class.from_pretrained(name, dtype=options.dtype, quantization_config=config)
    seconds = time.perf_counter() - start

    def describe_all(model, partial):
        write_record(partial, options, "compressed", name, made_from=name)
        if describe is not None:
            describe(model, partial)

    save(folder, model, find_tokenizer(name), name, describe_all)
    size = memory.weight_bytes(model)
    text = f"{output}: {size / 1e6:.1f} MB of weights, made in {seconds:.0f} s"
    document = {"output": output, "weight_bytes": size, "seconds": seconds, "config": config.to_dict()}
    return Result(text, document)


def _on_disk(options: argparse.Namespace, config, folder, start: float) -> Result:
    """As `compress_and_save`, with one block of the model in memory at a time."""
    from hf_efficient.compression.disk_to_disk import compress_on_disk
    from hf_efficient.integrations import hub

    def describe(model, partial):
        write_record(partial, options, "compressed", options.model, made_from=options.model)
        hub.record_base_model(partial, folder.name, options.model)

    compress_on_disk(options.model, folder, config, options.memory, dtype=options.dtype, describe=describe)
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    text = f"{options.output}: {size / 1e6:.1f} MB of weights, made in {seconds:.0f} s"
    document = {"output": options.output, "weight_bytes": size, "seconds": seconds, "config": config.to_dict()}
    return Result(text, document)
