"""From a model and a config of this package to a saved compressed model: `quantize` and `prune`."""

import time

from hf_efficient.cli.calibration_options import check_calibration
from hf_efficient.cli.models import check_model, check_uncompressed, find_tokenizer, save, saved_quantization
from hf_efficient.cli.path_checks import check_output


def compress_and_save(name: str, config, output: str, asked: str, dtype: str = "auto", describe=None) -> None:
    """Loads the model `name` with `config`, writes it with its tokenizer and a card to the folder `output`, and prints
    its size.

    Args:
        asked: what the command does, for the error where the model is compressed already.
        dtype: one of `options.DTYPES`.
        describe: called with (model, the folder that is being written).

    Raises:
        ValueError: the output cannot be written, the model is not there or compressed already, or its calibration text
            cannot serve; before weights are loaded.
    """
    folder, found = check_output("--output", output), check_model("model", name)

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
    model = model_class.from_pretrained(name, dtype=dtype, quantization_config=config)
    seconds = time.perf_counter() - start
    save(folder, model, find_tokenizer(name), name, describe)
    print(f"{output}: {memory.weight_bytes(model) / 1e6:.1f} MB of weights, made in {seconds:.0f} s")
