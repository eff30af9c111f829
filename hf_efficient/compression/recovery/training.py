"""One training of a model whose linear layers were unpacked: arguments, optimizer, callbacks and checkpoints of
transformers' `Trainer`."""

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback, TrainingArguments
from transformers.utils import logging

from hf_efficient.compression.recovery.memory import micro_batch
from hf_efficient.compression.recovery.optimizers import make_optimizer
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.recovery.plot import plot_training
from hf_efficient.compression.recovery.progress import (
    PERPLEXITY,
    Budget,
    HeldOut,
    UsedUp,
    WarmUpQuantization,
    last_checkpoint,
)
from hf_efficient.compression.recovery.quantized_pages import QuantizedPages, check_attention
from hf_efficient.compression.recovery.trainer import DistillationTrainer
from hf_efficient.kernels.attention.products import fast_training
from hf_efficient.kernels.native.heap import freed_memory_kept


logger = logging.get_logger(__name__)
SAVE_EVERY = 50  # steps between two checkpoints
# attributes in which transformers keeps that activations are computed again
_CHECKPOINTING = (
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hooks",
    "_require_grads_hook",
)


def train(
    trained: nn.Module,
    teacher,
    rows: Sequence[dict],
    held_out: torch.Tensor | Sequence[dict],
    options: RecoveryOptions,
    run: dict,
    trainer: type[DistillationTrainer] | None = None,
    **more,
) -> dict[str, float]:
    """Trains on `rows` with "input_ids" int64 [length], and measures on texts `held_out` (see `HeldOut`).

    Args:
        run: JSON-able description of the training, which an interrupted one must share to be resumed.
        trainer: a subclass of `DistillationTrainer`, whose further arguments are `more`.

    Returns:
        "steps", "loss", the mean of the last tenth of the steps in nats a token, and "perplexity" where windows are
        held out.
    """
    trainer = trainer or DistillationTrainer
    budget = Budget(options.minutes and 60 * options.minutes, options.steps, run)
    callbacks = [budget, HeldOut(held_out, budget), WarmUpQuantization(budget, options.warm_up), *options.callbacks]
    optimizer = make_optimizer(trained, options.optimizer, options.largest_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, budget.rate)
    last = last_checkpoint(options.checkpoint_dir, budget)
    length, pages = max(len(row["input_ids"]) for row in rows), QuantizedPages(options.kv_format)
    if pages.is_active:
        check_attention(trained, "kv_format", options.kv_format)
    with options.alone(), tempfile.TemporaryDirectory() as scratch, _randomness_kept():
        training = trainer(
            trained,
            _arguments(trained, options.checkpoint_dir or scratch, length, options),
            train_dataset=rows,
            optimizers=(optimizer, schedule),
            callbacks=callbacks,
            teacher=teacher,
            divergence=options.divergence,
            text_share=options.text_share,
            pages=pages,
            replays=not options.gradient_checkpointing,
            **more,
        )
        training.remove_callback(PrinterCallback)
        modes = fast_training(trained.device) + ([pages] if pages.is_active else [])
        with _checkpointing(trained, options.gradient_checkpointing, modes), freed_memory_kept(), _inside(modes):
            with suppress(UsedUp):  # the model and the state are those of the end
                training.train(resume_from_checkpoint=last)
    state = training.state
    if options.plot is not None and state.is_world_process_zero:
        try:
            plot_training(state.log_history, options.plot)
        except OSError as error:  # what was learned is worth more
            logger.warning(f"plot={str(options.plot)!r} could not be written: {error}")
    losses, perplexities = ([log[key] for log in state.log_history if key in log] for key in ("loss", PERPLEXITY))
    last = losses[-max(1, len(losses) // 10) :]
    result = {"steps": state.global_step, "loss": sum(last) / len(last)}
    return {**result, "perplexity": perplexities[-1]} if perplexities else result


def _arguments(model, folder, length: int, options: RecoveryOptions) -> TrainingArguments:
    """transformers' arguments: `batch_size` in parts that fit into memory, on all processes."""
    on_cpu, processes = model.device.type == "cpu", int(os.environ.get("WORLD_SIZE", 1))
    own = options.batch_size // processes
    micro = micro_batch(model, own, length, options.memory_gb, options.gradient_checkpointing)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=own // micro,
        max_steps=options.steps or 10**9,  # `Budget` ends it
        logging_steps=1,
        save_strategy="no" if options.checkpoint_dir is None else "steps",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and processes > 1 else None,
        ddp_find_unused_parameters=processes > 1,  # an expert may get no token
        dataloader_pin_memory=not on_cpu,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )
    if arguments.n_gpu > 1:  # of one process: copies by nn.DataParallel lack what layers keep beside tensors
        arguments._n_gpu = 1  # as Trainer does for models that lie on several
    return arguments


@contextmanager
def _inside(modes) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextmanager
def _checkpointing(model, is_asked: bool, modes) -> Iterator[None]:
    """Inside, the layers compute their activations again in the backward pass, inside `modes`: torch leaves modes for
    the time of `backward`."""
    if not is_asked:
        yield
        return
    before = [
        (each, {name: vars(each)[name] for name in _CHECKPOINTING if name in vars(each)}) for each in model.modules()
    ]
    new = hasattr(model, "activation_checkpointing_enable")  # transformers 5.23 renamed it
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    contexts = lambda: (nullcontext(), _inside(modes))  # noqa: E731  of the forward, and of what is computed again
    getattr(model, f"{name}_enable")({"use_reentrant": False, "context_fn": contexts})
    try:
        yield
    finally:
        getattr(model, f"{name}_disable")()
        model.disable_input_require_grads()
        for module, own in before:
            for name in _CHECKPOINTING:
                vars(module).pop(name, None)
            vars(module).update(own)


@contextmanager
def _randomness_kept() -> Iterator[None]:
    """Afterwards the global generators are as before: `Trainer` seeds them."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
