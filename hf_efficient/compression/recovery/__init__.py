"""Recovery: a training of a compressed or pruned model against the model from before, under its codes and masks.

`options` checks the arguments, `texts` reads the text. `unpacking` makes the layers learn and packs them again:
`coded_linear` those under codes (`coded_weights`, `grids`), `coded_experts` those of mixtures, `masked_linear` those
under a mask and plain ones. `lora` puts adapters under the masks. `calibration.divergence` is the loss, `trainer`,
`optimizers`, `progress` and `memory` the rest of a `training`, of which `graphed_step` replays the steps on a CUDA
device."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from hf_efficient.calibration.data import model_inputs
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.recovery.texts import read_windows, split_windows
from hf_efficient.compression.recovery.training import train
from hf_efficient.compression.recovery.unpacking import trainable
from hf_efficient.configs import CalibrationConfig
from hf_efficient.observers.hooks import modes_kept


def recover(
    model,
    teacher,
    texts=None,
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
    optimizer: str = "adamw",
    memory_gb: float | None = None,
    gradient_checkpointing: bool = False,
    warm_up: float = 0.0,
    callbacks: Sequence = (),
    kv_format: str = "auto",
    plot=None,
) -> dict[str, float]:
    """Trains a compressed or pruned `model`, in place, towards the next-token distributions of `teacher`, with
    transformers' `Trainer`.

    All linear layers are trained, except an uncompressed output embedding. Layers with codes (of any number of bits,
    codebooks, ternary, int8 and float8, under a mask or not) are trained by quantization-aware training (LLM-QAT,
    https://arxiv.org/abs/2305.17888). A float32 weight is rounded in every forward as it will be stored, the gradient
    passes straight through the rounding, and the scales are trained too (LSQ, https://arxiv.org/abs/1902.08153), but
    not those of NVFP4. Training starts at the teacher's weight if the codes were made of it, moved to where it rounds
    to these codes. Of trellis codes only the factors of rows and inputs are trained. Sparse layers keep their masks.
    Dense layers (after structured pruning, for example) are trained as they are. Inputs that are rounded to 8 bits are
    rounded in training too.

    Compressed experts of mixtures are trained as linear layers are, and so are the weights of norms. Embeddings,
    biases, tied weights and uncompressed fused experts do not change. Trained weights are float32, with a cosine
    schedule; products are computed in the model's dtype. At the end the model is packed into the formats that it had,
    and is saved as before.

    Args:
        model: a causal LM on one device, as `from_pretrained` returns it.
        teacher: the original model, or another one with the same vocabulary.
        texts: int64 tokens [windows, length]; texts, which are joined by blank lines and cut into windows of
            `sequence_length`; or a `CalibrationConfig`. None: 128 windows that the teacher writes itself, or as many as
            a `CalibrationConfig` without a source says. Its `device`, `checkpoint_dir` and `minutes` are refused. Of
            every 20 windows one is held out, at most 8.
        tokenizer: for texts.
        minutes, steps: how long to train; give exactly one. Training ends with the step in which the minutes run out.
        sequence_length: tokens of a window, at least 2.
        batch_size: windows of a step, of all processes together.
        learning_rate: the peak of the schedule; by default 2e-4, with adapters 1e-3. For a weight with codes it is 10
            times that, relative to the root mean square of its layer.
        divergence: "forward" (KL(p || q), https://arxiv.org/abs/1503.02531), "reverse" (KL(q || p),
            https://arxiv.org/abs/2306.08543), "both", "skewed_forward", "skewed_reverse" or "jensen_shannon"; see
            `distillation_loss`. p is the teacher's distribution.
        text_share: weight of the next-token loss on the text itself, from 0 to 1; the divergence has the rest.
        lora_rank: train adapters of this rank (https://arxiv.org/abs/2106.09685; package `peft`) under the masks
            instead, and merge them at the end.
        checkpoint_dir: folder for the state every 50 steps and at the end, and for the text that the teacher wrote. An
            interrupted recovery of the same models with the same arguments resumes there, with the same bits where
            torch has as many threads, and a finished one returns the same model again. Another recovery, and one that
            another process works on, is refused. Delete the folder yourself.
        seed: of the order of the windows.
        optimizer: "adamw"; "adamw_8bit", whose state takes a quarter (package `bitsandbytes`); or "muon" for the
            matrices (https://arxiv.org/abs/2502.16982).
        memory_gb: limit on the activations that are computed at once; a step is split until they fit. None: no split.
        gradient_checkpointing: compute the activations of a layer again in the backward pass instead of keeping them.
        warm_up: share of the training in which rounding is introduced, linearly. Above 0 training starts at the
            teacher's weights themselves.
        callbacks: `TrainerCallback`s. The held-out perplexity is logged ten times as "held_out_perplexity". On a CUDA
            device steps are replayed from the third on, so callbacks cannot change how the model computes after that.
        kv_format: of the `PagedCache` that the model will use: "int8", "fp8", "int4" or "int2". Attention is then
            trained with keys and values rounded as the pages round them; attn_implementation must be "sdpa".
        plot: path of a .png file for the loss and the held-out perplexity over the steps (package `matplotlib`).

    Several processes (`accelerate launch`, `torchrun`) train together with DDP; all of them return the same model. FSDP
    and FSDP2 are refused.

    Returns:
        "steps"; "tokens" that the teacher read; "seconds"; "loss", the mean of the last tenth of the steps in nats per
        token; and "perplexity" of the held-out windows, if any.

    Raises:
        ValueError: before training, for arguments that are not allowed, nothing to train, too little text, another
            vocabulary or a longer window than the model has positions; after it, for weights that are not finite. After
            an error or an interruption the model is as it was.
        ImportError: lora_rank without the package `peft`, optimizer="adamw_8bit" without `bitsandbytes`, plot without
            `matplotlib`.
    """
    length = minutes, steps, sequence_length, batch_size
    how = learning_rate, divergence, text_share, lora_rank, checkpoint_dir, seed
    machine = optimizer, memory_gb, gradient_checkpointing, warm_up, callbacks, kv_format, plot
    options = RecoveryOptions(*length, *how, *machine)
    check_models(model, teacher)
    start = time.perf_counter()
    windows = read_windows(texts, tokenizer, sequence_length, teacher, checkpoint_dir, seed)
    model_inputs(CalibrationConfig(tokens=windows), None, model)  # checks the tokens and the length of a window
    learned, held_out = split_windows(windows)
    if len(learned) < batch_size:
        raise ValueError(f"batch_size={batch_size}: the texts have only {len(learned)} windows")
    run = options.described(model, teacher, windows)
    with modes_kept(model, teacher), _trainable(model, teacher, options) as trained:
        rows = [{"input_ids": window} for window in learned]
        result = train(trained, teacher, rows, held_out, options, run)
    tokens = result["steps"] * batch_size * windows.shape[1]
    return {**result, "tokens": tokens, "seconds": time.perf_counter() - start}


@contextmanager
def _trainable(model, teacher, options: RecoveryOptions) -> Iterator[nn.Module]:
    """The model to train: `model` with its linears unpacked, under adapters where asked for."""
    with trainable(model, teacher, keeps_codes=options.warm_up == 0):
        if options.lora_rank is None:
            yield model
            return
        from hf_efficient.compression.recovery.lora import with_adapters

        adapted = with_adapters(model, options.lora_rank, options.seed)
        try:
            yield adapted
        except BaseException:
            adapted.unload()
            raise
        adapted.merge_and_unload()


def check_models(model, teacher) -> None:
    """Raises ValueError for models that cannot be student and teacher."""
    if teacher is model:
        raise ValueError("teacher is the model itself: give the model from before compression or pruning")
    sizes = []
    for name, owner in (("model", model), ("teacher", teacher)):
        head = owner.get_output_embeddings()
        if head is None or not owner.can_generate() or owner.config.is_encoder_decoder:
            raise ValueError(f"{name} ({type(owner).__name__}) is no causal language model")
        sizes.append(head.out_features)
    if sizes[0] != sizes[1]:
        given = f"the teacher has a vocabulary of {sizes[1]}, the model one of {sizes[0]}"
        raise ValueError(f"{given}: they must be the same")
