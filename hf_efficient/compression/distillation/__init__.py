"""Distillation: a student learns what a teacher says, on given text, on answers of the teacher, on text that the
teacher writes freely, or on text that the student writes itself.

`written` has models write, `student_trainer` is the loss and the `Trainer`; the rest is that of `recovery`."""

import math
import time

import torch
from torch import nn

from hf_efficient.cache.stores.kv_formats import GROUPED
from hf_efficient.calibration.data import model_inputs
from hf_efficient.compression.distillation.student_trainer import Projections, StudentTrainer
from hf_efficient.compression.distillation.written import answers, pad
from hf_efficient.compression.recovery import check_models
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.recovery.quantized_pages import check_attention
from hf_efficient.compression.recovery.texts import read_windows, split_windows
from hf_efficient.compression.recovery.training import train
from hf_efficient.compression.recovery.unpacking import trainable
from hf_efficient.compression.structured_pruning import prune_structure
from hf_efficient.configs import CalibrationConfig
from hf_efficient.configs.checks import check, is_collection_of, is_integer, is_number
from hf_efficient.observers.hooks import modes_kept


_PROJECTIONS = "distillation_projections"
_OF_PRUNING = ("method", "remove", "shape", "calibration", "repair")


def distill(
    student,
    teacher,
    texts=None,
    tokenizer=None,
    *,
    prompts: list[str] | None = None,
    max_new_tokens: int = 256,
    on_policy: float = 0.0,
    hidden_states: float = 0.0,
    relations: float = 0.0,
    sequence_length: int = 512,
    seed: int = 0,
    checkpoint_dir=None,
    **training,
) -> tuple[nn.Module, dict[str, float]]:
    """Trains `student` towards the next-token distributions of `teacher`, with transformers' `Trainer`, and returns it.

    A student may be any model that `recover` trains, also a compressed one. It is trained in place, and the same
    parameters are trained. With `prompts` the teacher answers them first, and the student learns the teacher's
    distributions on the answers (sequence-level distillation, https://arxiv.org/abs/1606.07947). Without texts and
    prompts the teacher writes freely (LLM-QAT, https://arxiv.org/abs/2305.17888).

    Args:
        student: a causal LM with the teacher's vocabulary; or a dict of arguments of `prune_structure`, for example
            `{"shape": {"num_hidden_layers": 15}}`, which makes the student from the teacher (Minitron,
            https://arxiv.org/abs/2407.14679). `method` is then "shape" by default.
        teacher: a causal LM.
        texts, tokenizer, sequence_length, seed, checkpoint_dir: as in `recover`.
        prompts: questions to the teacher, in its chat template. Needs a tokenizer. Of every 20 answers one is held out,
            at most 8.
        max_new_tokens: of an answer.
        on_policy: share of the steps, 0 to 1, in which the student continues the beginning of a text (an eighth of a
            window, or the prompt) and learns on its own text, by the divergence alone (GKD,
            https://arxiv.org/abs/2306.13649; MiniLLM, https://arxiv.org/abs/2306.08543). The native loop writes for ten
            steps at once, with the student packed as it will be. Several processes write other texts than one does.
        hidden_states: weight of the error of the hidden states of four layers, relative to their mean square. Linear
            maps from the student's width to the teacher's are trained for this and then dropped (TinyBERT,
            https://arxiv.org/abs/1909.10351).
        relations: weight of the divergence of attention relations of the last layers: queries, keys and values of any
            number of heads (MiniLM, https://arxiv.org/abs/2002.10957 and https://arxiv.org/abs/2012.15828). Both models
            need attn_implementation="sdpa".
        training: further arguments of `recover`: minutes or steps, batch_size, learning_rate, divergence, text_share,
            optimizer, memory_gb, gradient_checkpointing, warm_up, callbacks, kv_format, plot.

    Returns:
        the student, and what `recover` returns.

    Raises:
        ValueError: before training, for arguments that are not allowed; what `recover` raises.
    """
    if "lora_rank" in training:
        raise ValueError("lora_rank is not supported: recover trains adapters")
    options = RecoveryOptions(sequence_length=sequence_length, seed=seed, checkpoint_dir=checkpoint_dir, **training)
    _check(student, texts, tokenizer, prompts, max_new_tokens, on_policy)
    for name, weight in (("hidden_states", hidden_states), ("relations", relations)):
        check(is_number(weight) and 0 <= weight < math.inf, name, weight, "a number, 0 or more")
    if options.kv_format in GROUPED and prompts is not None:
        raise ValueError(
            f"kv_format={options.kv_format!r} with prompts: groups of tokens would hold padding; give texts"
        )
    start = time.perf_counter()
    if isinstance(student, dict):
        arguments = {"method": "shape" if "shape" in student else "llm_pruner", **student}
        student = prune_structure(teacher, tokenizer=tokenizer, **arguments)
    check_models(student, teacher)
    if relations:
        check_attention(student, "relations", relations)
        check_attention(teacher, "relations", relations)
    if prompts is None:
        windows = read_windows(texts, tokenizer, sequence_length, teacher, checkpoint_dir, seed)
        model_inputs(CalibrationConfig(tokens=windows), None, student)  # checks the tokens and the length of a window
        learned, held_out = split_windows(windows)
        rows = [{"input_ids": window} for window in learned]
    else:
        rows = answers(teacher, tokenizer, list(prompts), sequence_length, max_new_tokens, seed, checkpoint_dir)
        rows, held_out = split_windows(rows)
    losses = {"hidden_states": hidden_states, "relations": relations, "on_policy": on_policy}
    result = learn(student, teacher, rows, held_out, options, **losses)
    return student, {**result, "seconds": time.perf_counter() - start}


def learn(
    student,
    teacher,
    rows: list[dict],
    held_out,
    options: RecoveryOptions,
    hidden_states: float = 0.0,
    relations: float = 0.0,
    on_policy: float = 0.0,
) -> dict[str, float]:
    """Trains `student` on rows with "input_ids" and perhaps "answer", int64 [length]; `distill` documents the rest.

    Raises:
        ValueError: fewer rows than a batch has; what `recover` raises.
    """
    if len(rows) < options.batch_size:
        raise ValueError(f"batch_size={options.batch_size}: there are only {len(rows)} texts to learn from")
    tokens = torch.cat([tensor for row in rows for tensor in row.values()])
    run = {**options.described(student, teacher, tokens), "rows": len(rows), "on_policy": on_policy}
    run |= {"hidden_states": hidden_states, "relations": relations}
    hook = None
    try:
        with modes_kept(student, teacher), trainable(student, teacher, keeps_codes=options.warm_up == 0):
            projections = Projections(student, teacher).to(student.device) if hidden_states else None
            if projections is not None:  # the student's, so that optimizer, checkpoints and DDP take them
                student.add_module(_PROJECTIONS, projections)
                hook = student.register_forward_hook(projections.replace_states)
            own = dict(hidden_states=hidden_states, relations=relations, on_policy=on_policy, projections=projections)
            own |= {"seed": options.seed, "data_collator": pad}
            result = train(student, teacher, rows, held_out, options, run, StudentTrainer, **own)
    finally:
        if hook is not None:
            hook.remove()
        student._modules.pop(_PROJECTIONS, None)
    mean = sum(len(row["input_ids"]) for row in rows) / len(rows)
    return {**result, "tokens": round(result["steps"] * options.batch_size * mean)}


def _check(student, texts, tokenizer, prompts, max_new_tokens, on_policy) -> None:
    if isinstance(student, dict):
        unknown = sorted(set(student) - set(_OF_PRUNING))
        check(not unknown, "student", student, f"a model, or arguments of prune_structure: {_OF_PRUNING}")
    if prompts is not None:
        check(is_collection_of(prompts, str), "prompts", prompts, "a list of strings, at least one")
        if texts is not None:
            raise ValueError("texts and prompts are given: give one of them")
        if tokenizer is None:
            raise ValueError("prompts are given and no tokenizer: give one")
    check(is_integer(max_new_tokens, 1), "max_new_tokens", max_new_tokens, "an integer of at least 1")
    check(is_number(on_policy) and 0 <= on_policy <= 1, "on_policy", on_policy, "a number from 0 to 1")
