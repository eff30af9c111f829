"""Recovery: a short training after pruning, against the model from before pruning, with the masks kept.

`options` checks the arguments and reads the text, `masked_linear` makes the pruned layers trainable and packs them
again, `lora` puts adapters under the masks, `calibration.divergence` is the loss, and `trainer` the rest of the
training."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from transformers import PrinterCallback, TrainingArguments

from hf_efficient.calibration.data import model_inputs
from hf_efficient.compression.recovery import masked_linear
from hf_efficient.compression.recovery.options import RecoveryOptions, check_arguments, read_windows  # noqa: F401
from hf_efficient.compression.recovery.trainer import Budget, DistillationTrainer, optimizers
from hf_efficient.configs import CalibrationConfig


SAVE_EVERY = 50  # steps between two checkpoints


def recover(
    model,
    teacher,
    texts,
    tokenizer=None,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    sequence_length: int = 512,
    batch_size: int = 1,
    learning_rate: float | None = None,
    divergence: str = "forward",
    text_share: float = 0.0,
    lora_rank: int | None = None,
    checkpoint_dir=None,
    seed: int = 0,
) -> dict[str, float]:
    """Trains a pruned `model`, in place, towards the next-token distributions of `teacher`, with transformers'
    `Trainer`.

    All linear layers but the output embedding learn: sparse ones under their masks, which do not change, and in a model
    without sparse layers (after structured pruning, for example) the ordinary ones. Embeddings, norms, biases, tied
    weights, quantized layers and fused experts do not change. The weights are float32 while they learn, with AdamW and
    a cosine schedule; products are computed in the model's dtype. At the end the weights are rounded to their dtype and
    packed into the same formats.

    Args:
        model: a causal LM on one device, as `from_pretrained` gives it.
        teacher: the model before pruning, or another one of the same vocabulary.
        texts: int64 tokens [windows, length]; texts, which are joined by blank lines and cut into windows of
            `sequence_length`; or a `CalibrationConfig`.
        tokenizer: for texts.
        minutes, steps: how long to train; exactly one is given. Training ends after the step in which the time is over.
        sequence_length: tokens of a window, at least 2.
        batch_size: windows of a step.
        learning_rate: the largest of the schedule; by default 2e-4, with adapters 1e-3.
        divergence: "forward" (KL(p || q), https://arxiv.org/abs/1503.02531), "reverse" (KL(q || p),
            https://arxiv.org/abs/2306.08543) or "both"; see `distillation_loss`.
        text_share: weight of the text itself in the loss, from 0 to 1; the divergence has the rest.
        lora_rank: train adapters of this rank (https://arxiv.org/abs/2106.09685; package `peft`) under the masks
            instead, and merge them at the end.
        checkpoint_dir: folder that keeps the state every 50 steps. An interrupted recovery with the same arguments
            resumes there. The caller deletes it.
        seed: seed of the order of the windows.

    Returns:
        "steps", "tokens" (that the teacher read), "seconds", and "loss", the mean of the last tenth of the steps in
        nats per token.

    Raises:
        ValueError: before training, for arguments that are not allowed, nothing to train, too little text, another
            vocabulary or a longer window than the model has positions; after it, for weights that are not finite. The
            model is then as it was, as it is when training is interrupted.
        ImportError: lora_rank without the package `peft`.
    """
    length = minutes, steps, sequence_length, batch_size
    options = RecoveryOptions(*length, learning_rate, divergence, text_share, lora_rank, checkpoint_dir, seed)
    _check_models(model, teacher)
    windows = read_windows(texts, tokenizer, sequence_length)
    model_inputs(CalibrationConfig(tokens=windows), None, model)  # checks the tokens and the length of a window
    if len(windows) < batch_size:
        raise ValueError(f"batch_size={batch_size}: the texts have only {len(windows)} windows")
    start, was_training = time.perf_counter(), (model.training, teacher.training)
    try:
        with _trainable(model, options) as trained:
            state = _train(trained, teacher, windows, options)
    finally:
        model.train(was_training[0])
        teacher.train(was_training[1])
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "steps": state.global_step,
        "tokens": state.global_step * batch_size * windows.shape[1],
        "seconds": time.perf_counter() - start,
        "loss": sum(last) / len(last),
    }


@contextmanager
def _trainable(model, options: RecoveryOptions) -> Iterator[nn.Module]:
    """The model to train: `model` with its linears unpacked, under adapters where asked for. Afterwards what was
    trained is packed again; after an error the model is as it was."""
    masked_linear.unpack(model)
    adapted = None
    try:
        if options.lora_rank is not None:
            from hf_efficient.compression.recovery.lora import with_adapters

            adapted = with_adapters(model, options.lora_rank, options.seed)
        yield adapted or model
        if adapted is not None:
            adapted, _ = None, adapted.merge_and_unload()
        masked_linear.pack(model)
    except BaseException:
        if adapted is not None:
            adapted.unload()
        masked_linear.discard(model)
        raise


def _train(trained: nn.Module, teacher, windows, options: RecoveryOptions):
    """Trains on windows int64 [windows, length]; returns the state of the trainer."""
    budget = Budget(options.minutes and 60 * options.minutes, options.steps, options.described(windows))
    with tempfile.TemporaryDirectory() as scratch:
        training = DistillationTrainer(
            trained,
            _training_arguments(options.checkpoint_dir or scratch, trained.device.type == "cpu", options),
            train_dataset=[{"input_ids": window} for window in windows],
            optimizers=optimizers(trained, options.largest_rate, budget),
            callbacks=[budget],
            teacher=teacher,
            divergence=options.divergence,
            text_share=options.text_share,
        )
        training.remove_callback(PrinterCallback)
        training.train(resume_from_checkpoint=_last_checkpoint(options.checkpoint_dir))
    return training.state


def _training_arguments(folder, on_cpu: bool, options: RecoveryOptions) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=options.batch_size,
        max_steps=options.steps or 10**9,  # `Budget` ends it
        logging_steps=1,
        save_strategy="no" if options.checkpoint_dir is None else "steps",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )


def _last_checkpoint(folder) -> str | None:
    """The last complete checkpoint: Trainer writes its state file last."""
    if folder is None:
        return None
    found = [path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))) if found else None


def _check_models(model, teacher) -> None:
    if teacher is model:
        raise ValueError("teacher is the model itself: give the model from before pruning")
    sizes = []
    for name, owner in (("model", model), ("teacher", teacher)):
        head = owner.get_output_embeddings()
        if head is None:
            raise ValueError(f"{name} ({type(owner).__name__}) has no output embedding")
        sizes.append(head.out_features)
    if sizes[0] != sizes[1]:
        given = f"the teacher has a vocabulary of {sizes[1]}, the model one of {sizes[0]}"
        raise ValueError(f"{given}: they must be the same")
