"""Recovery: a short training after pruning, against the model from before it, with the masks kept."""

import importlib.util
import tempfile
import time
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainingArguments

from hf_efficient.calibration.data import load_tokens, model_inputs
from hf_efficient.compression.recovery import masked_linear
from hf_efficient.compression.recovery.divergence import DIVERGENCES
from hf_efficient.compression.recovery.trainer import Budget, DistillationTrainer, optimizers
from hf_efficient.configs import CalibrationConfig


LEARNING_RATE, LORA_LEARNING_RATE = 2e-4, 1e-3
SAVE_EVERY = 50  # steps


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
    """Trains a pruned `model`, in place, to say what `teacher` says, with transformers' `Trainer`.

    All linear layers but the output embedding learn: sparse ones under their masks, which stay as they are, and in a model
    without sparse layers (made smaller by structured pruning, say) the ordinary ones. Embeddings, norms, biases, tied weights,
    quantized layers and fused experts stay. The weights are float32 while they learn, with AdamW and a cosine schedule, and
    computation is in the model's dtype; at the end they are rounded to their dtype and packed into the same formats.

    Args:
        model: a causal LM on one device, as `from_pretrained` gives it.
        teacher: the model before pruning, or another of the same vocabulary.
        texts: int64 tokens [windows, length], texts that are joined by blank lines and cut into windows of `sequence_length`,
            or a `CalibrationConfig`.
        tokenizer: for texts.
        minutes, steps: how long; one of them. Time ends training after the step in which it is over.
        batch_size: windows a step.
        learning_rate: the largest; by default 2e-4, with adapters 1e-3.
        divergence: "forward", "reverse" or "both", see `distillation_loss`.
        text_share: how much the text itself counts in the loss, beside the teacher; 0 to 1.
        lora_rank: learn adapters of this rank (package `peft`) under the masks instead, and merge them at the end.
        checkpoint_dir: where the state is kept every 50 steps, and from where an interrupted recovery with the same arguments
            goes on; deleted by the caller.
        seed: of the order of the windows.

    Returns "steps", "tokens" (that the teacher saw), "seconds", and "loss", the mean of the last tenth, nats a token.

    Raises:
        ValueError: before training, for arguments that are not allowed, nothing to train, too little text, another vocabulary
            or a longer window than the model has positions; after it, for weights that are not finite. The model then stays
            as it was, as it does when training is interrupted.
        ImportError: lora_rank without the package `peft`.
    """
    run = {"batch_size": batch_size, "learning_rate": learning_rate, "divergence": divergence, "text_share": text_share}
    run |= {"lora_rank": lora_rank, "seed": seed}
    check_arguments(minutes=minutes, steps=steps, sequence_length=sequence_length, **run)
    _check_models(model, teacher)
    windows = read_windows(texts, tokenizer, sequence_length)
    model_inputs(CalibrationConfig(tokens=windows), None, model)  # for its checks
    if len(windows) < batch_size:
        raise ValueError(f"batch_size={batch_size}: the texts have only {len(windows)} windows")
    run["learning_rate"] = learning_rate = learning_rate or (LORA_LEARNING_RATE if lora_rank else LEARNING_RATE)
    run["windows"] = [*windows.shape, windows.sum().item()]
    budget = Budget(None if minutes is None else 60 * minutes, steps, run)
    start = time.perf_counter()
    was_training, teacher_was_training = model.training, teacher.training
    masked_linear.unpack(model)
    adapted = None
    try:
        if lora_rank is not None:
            from hf_efficient.compression.recovery.lora import with_adapters

            adapted = with_adapters(model, lora_rank, seed)
        with tempfile.TemporaryDirectory() as scratch:
            training = DistillationTrainer(
                model if adapted is None else adapted,
                _arguments(checkpoint_dir or scratch, checkpoint_dir is not None, model, batch_size, steps, seed),
                train_dataset=[{"input_ids": window} for window in windows],
                optimizers=optimizers(adapted or model, learning_rate, budget),
                callbacks=[budget],
                teacher=teacher,
                divergence=divergence,
                text_share=text_share,
            )
            training.remove_callback(PrinterCallback)
            training.train(resume_from_checkpoint=_last_checkpoint(checkpoint_dir))
        if adapted is not None:
            adapted, _ = None, adapted.merge_and_unload()
        masked_linear.pack(model)
    except BaseException:
        if adapted is not None:
            adapted.unload()
        masked_linear.discard(model)
        raise
    finally:
        model.train(was_training)
        teacher.train(teacher_was_training)
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    last = losses[-max(1, len(losses) // 10) :]
    done = training.state.global_step
    return {
        "steps": done,
        "tokens": done * batch_size * windows.shape[1],
        "seconds": time.perf_counter() - start,
        "loss": sum(last) / len(last),
    }


def check_arguments(
    minutes=None,
    steps=None,
    sequence_length=512,
    batch_size=1,
    learning_rate=None,
    divergence="forward",
    text_share=0.0,
    lora_rank=None,
    checkpoint_dir=None,
    seed=0,
) -> None:
    """Raises what `recover` raises for arguments that no model can have."""
    if (minutes is None) == (steps is None):
        raise ValueError(f"minutes={minutes}, steps={steps}: give one of them")
    for name, value in (("minutes", minutes), ("learning_rate", learning_rate)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise ValueError(f"{name}={value!r}: expected a number above 0")
    counts = {"steps": steps, "batch_size": batch_size, "sequence_length": sequence_length, "lora_rank": lora_rank}
    for name, value in counts.items():
        least = 2 if name == "sequence_length" else 1
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence={divergence!r} is not supported: it must be one of {DIVERGENCES}")
    if not (isinstance(text_share, (int, float)) and 0 <= text_share <= 1):
        raise ValueError(f"text_share={text_share!r}: expected a number from 0 to 1")
    if lora_rank is not None and importlib.util.find_spec("peft") is None:
        raise ImportError("lora_rank needs the package 'peft': pip install peft")


def _check_models(model, teacher) -> None:
    if teacher is model:
        raise ValueError("teacher is the model itself: give the model from before pruning")
    heads = {"model": model.get_output_embeddings(), "teacher": teacher.get_output_embeddings()}
    for name, head in heads.items():
        if head is None:
            raise ValueError(
                f"{name} ({type({'model': model, 'teacher': teacher}[name]).__name__}) has no output embedding"
            )
    sizes = {name: head.out_features for name, head in heads.items()}
    if sizes["model"] != sizes["teacher"]:
        raise ValueError(
            f"the teacher has a vocabulary of {sizes['teacher']}, the model one of {sizes['model']}: they must be the same"
        )


def read_windows(texts, tokenizer, length: int) -> torch.Tensor:
    """int64 [windows, length] of what `recover` takes as texts. Raises ValueError where there is too little text."""
    if isinstance(texts, CalibrationConfig):
        return load_tokens(texts, tokenizer)
    if isinstance(texts, torch.Tensor):
        return CalibrationConfig(tokens=texts).tokens
    if isinstance(texts, str) or not texts:
        raise ValueError(f"texts={texts!r:.40} is not supported: it must be a list of texts, at least one")
    if tokenizer is None:
        raise ValueError("texts are given and no tokenizer: give one, or int64 tokens [windows, length]")
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < length:
        raise ValueError(f"the texts have {len(ids)} tokens: a window has sequence_length={length}")
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def _arguments(folder, keeps: bool, model, batch_size: int, steps: int | None, seed: int) -> TrainingArguments:
    on_cpu = model.device.type == "cpu"
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch_size,
        max_steps=steps or 10**9,  # the budget ends it
        logging_steps=1,
        save_strategy="steps" if keeps else "no",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )


def _last_checkpoint(folder) -> str | None:
    """The last one that is whole: its state is written at the end."""
    if folder is None:
        return None
    found = [path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))) if found else None
