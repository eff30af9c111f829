"""BitNet b1.58 (https://arxiv.org/abs/2402.17764) of a model that was trained in full precision."""

import tempfile
import time
from collections.abc import Sequence

import torch
from torch import nn

from hf_efficient.calibration.data import model_inputs
from hf_efficient.compression.recovery import recover
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.recovery.texts import read_windows
from hf_efficient.configs import BitNetConfig, CalibrationConfig
from hf_efficient.configs.checks import check, check_flags, is_number
from hf_efficient.integrations.transformers_compat import copy_attention
from hf_efficient.layers import CompressedModule, EfficientLinear
from hf_efficient.observers.hooks import modes_kept


NORM_EPSILON = 1e-6
WINDOWS_OF_NORMS = 4  # windows of text on which the sizes of inputs are measured


def to_bitnet(
    model,
    texts=None,
    tokenizer=None,
    *,
    norms: bool = True,
    dense: bool = False,
    modules_to_not_convert: Sequence[str] | None = None,
    warm_up: float = 0.5,
    sequence_length: int = 512,
    seed: int = 0,
    checkpoint_dir=None,
    **training,
) -> tuple[nn.Module, dict[str, float]]:
    """Trains a ternary student of `model`. `model` does not change and is the teacher.

    `recover` trains the weights -1, 0 and 1, their scales and the norms, with inputs in 8 bits. The student has the
    format of `BitNetConfig`: `save_pretrained` writes that, and `export(student, folder, "bitnet")` writes what
    transformers reads with its own `BitNetQuantConfig`.

    Args:
        model: a causal LM, not compressed.
        texts, tokenizer, sequence_length, seed, checkpoint_dir: as in `recover`; None: text that `model` writes itself.
        norms: normalise the input of every ternary layer (SubLN of BitDistill, https://arxiv.org/abs/2510.13998). The
            weights of the norms start at the size of the inputs, measured on some of the text.
        dense: store five weights in a byte instead of four.
        modules_to_not_convert: globs of layers to leave as they are, in addition to the output embedding.
        warm_up: share of the training in which rounding is introduced
            (https://huggingface.co/blog/1_58_llm_extreme_quantization); training then starts at `model`'s weights.
        training: further arguments of `recover`: minutes or steps, batch_size, learning_rate, divergence, ...

    Returns:
        the student, and what `recover` returns.

    Raises:
        ValueError: before training, for arguments that are not allowed, or a compressed model; what `recover` raises.
    """
    check_flags({"norms": norms, "dense": dense}, "norms", "dense")
    check(is_number(warm_up) and 0 <= warm_up <= 1, "warm_up", warm_up, "a number from 0 to 1")
    if "lora_rank" in training:
        raise ValueError("lora_rank is not supported: adapters cannot be merged into codes")
    formats = {"dense": dense, "modules_to_not_convert": modules_to_not_convert}
    plain, normalised = BitNetConfig(**formats), BitNetConfig(**formats, rms_norm_eps=NORM_EPSILON)
    own = {"sequence_length": sequence_length, "seed": seed, "checkpoint_dir": checkpoint_dir, "warm_up": warm_up}
    RecoveryOptions(**own, **training)  # checks them
    if any(isinstance(module, CompressedModule) for module in model.modules()):
        raise ValueError("model is compressed already: give the model in full precision")
    start = time.perf_counter()
    windows = read_windows(texts, tokenizer, sequence_length, model, checkpoint_dir, seed)
    model_inputs(CalibrationConfig(tokens=windows), None, model)  # checks the tokens
    student = _converted(model, plain, windows)
    if norms:
        student = _converted(model, normalised, windows, [n for n, m in student.named_modules() if _is_ternary(m)])
    result = recover(student, model, windows, **own, **training)
    return student, {**result, "seconds": time.perf_counter() - start}


def _is_ternary(module: nn.Module) -> bool:
    return isinstance(module, EfficientLinear)


def _converted(model, config: BitNetConfig, windows: torch.Tensor, normalised: Sequence[str] = ()) -> nn.Module:
    """`model` in the format of `config`. normalised: layers that get a norm."""
    state = dict(model.state_dict())
    for name, size in _input_sizes(model, normalised, windows).items():
        columns = model.get_submodule(name).weight.shape[1]
        state[f"{name}.rms_norm.weight"] = torch.full((columns,), size, dtype=model.dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=state)
        made = type(model).from_pretrained(folder, dtype=model.dtype, quantization_config=config)
    copy_attention(model.config, made.config)
    return made.to(model.device)


@torch.no_grad()
def _input_sizes(model, names: Sequence[str], windows: torch.Tensor) -> dict[str, float]:
    """The median over tokens of the root mean square of what each layer reads."""
    sizes, handles = {name: [] for name in names}, []
    for name in names:
        hook = lambda module, args, name=name: sizes[name].append(  # noqa: E731
            args[0].float().square().mean(-1).sqrt().flatten()
        )
        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
    try:
        with modes_kept(model):
            model.eval()
            for window in windows[: WINDOWS_OF_NORMS if names else 0]:
                model(input_ids=window[None].to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(found).median().item() for name, found in sizes.items()}
