"""Compresses a checkpoint that is larger than memory: from its files to those of the compressed one."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import transformers
from transformers import AutoConfig, AutoTokenizer

from hf_efficient.byte_sizes import parse_bytes
from hf_efficient.calibration.on_disk import OnDisk
from hf_efficient.compression.disk_plan import DiskPlan, plan
from hf_efficient.configs import CompressionConfig
from hf_efficient.files import alone_in, why_not_new
from hf_efficient.integrations import transformers_loading
from hf_efficient.integrations.transformers_block_files import load_in_files
from hf_efficient.kernels.native.heap import map_large_blocks


logger = logging.getLogger(__name__)


def compress_on_disk(
    model: str | os.PathLike,
    output: str | os.PathLike,
    quantization_config: CompressionConfig,
    memory: int | str,
    *,
    dtype="auto",
    say: Callable[[str], None] = print,
    describe: Callable[[object, Path], None] | None = None,
    **hub_options,
) -> DiskPlan:
    """Compresses the checkpoint `model` block by block into the new folder `output`, which `from_pretrained` loads.

    One block of weights is in memory at a time. The hidden states of the calibration text are in mapped files.
    Compressed blocks are written at once. The result has the same bits as `from_pretrained(model,
    quantization_config=...)` followed by `save_pretrained`.

    The hidden folder `.<output>.compressing` beside `output` holds the progress. After an interruption, `kill -9`
    included, the same call resumes there and ends with the same bits.

    Args:
        model: Hub id or folder, with safetensors files.
        output: a folder that does not exist, or is empty.
        quantization_config: methods that read a text need `calibration` with texts, a dataset or tokens.
        memory: what the process may take: bytes, or a string such as "8GB". The plan must fit.
        dtype: of the weights that are read, as in `from_pretrained`.
        say: called with the plan, in words, before the start.
        describe: called with (the model, without weights, the folder that is being written) to add files.
        hub_options: revision, token, ... as in `from_pretrained`, for all files of `model`.

    Returns:
        the plan of the run, in bytes of memory and of disk.

    Raises:
        ValueError: the plan does not fit into `memory`, or its files on the disk; `output` cannot be written; an option
            that needs the whole model in memory (mixed precision, OWL, methods that read gradients, text that the model
            writes itself); what `from_pretrained` raises.
        TypeError: another option.
    """
    transformers_loading.check(hub_options)
    allowed, output = parse_bytes("memory", memory), Path(output)
    if reason := why_not_new(output):
        raise ValueError(f"output={str(output)!r} {reason}")
    output = output.resolve()
    calibration = quantization_config.calibration
    if calibration is not None and calibration.checkpoint_dir is not None:
        raise ValueError(
            f"checkpoint_dir={calibration.checkpoint_dir!r} and memory={memory!r} exclude each other: the progress is "
            "kept beside the output"
        )
    model_class, plans = _class_of(model, hub_options), []
    folder = output.with_name(f".{output.name}.compressing")

    def residence(files) -> OnDisk:
        plans.append(plan(files, folder))
        say(plans[0].text(allowed))
        plans[0].check(allowed)
        return OnDisk(files, folder)

    map_large_blocks()
    options = {"quantization_config": quantization_config, "dtype": dtype, **hub_options}
    with alone_in(folder):
        loaded, disk = load_in_files(model_class, model, residence, **options)
        disk.finish()
        try:
            AutoTokenizer.from_pretrained(model, **hub_options).save_pretrained(disk.checkpoint)
        except (OSError, ValueError):
            logger.warning("no tokenizer was found beside the model")
        if describe is not None:
            describe(loaded, disk.checkpoint)
        if output.is_dir():
            output.rmdir()
        disk.checkpoint.rename(output)
        disk.remove()
    return plans[0]


def _class_of(model, hub_options: dict) -> type:
    """The class that the config of `model` names."""
    config = AutoConfig.from_pretrained(model, **hub_options)
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    found = getattr(transformers, name, None)
    if found is None or not hasattr(found, "_load_pretrained_model"):
        raise ValueError(f"{model}: transformers {transformers.__version__} has no {name} that can be read by blocks")
    return found
