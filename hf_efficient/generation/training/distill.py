"""Trains draft heads on the text of their target, resumably, and measures how often their guesses are right."""

import json
import math
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.utils import logging

from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.generation.training.rows import Row, save_tensors
from hf_efficient.generation.training.target_states import hidden_of
from hf_efficient.observers.hooks import frozen
from hf_efficient.tensor_files import check_whole


DEPTH_DECAY = 0.8  # weight of a guess in the loss, relative to the guess before it
WARMUP = 0.05  # share of the steps in which the learning rate rises
RANKS = 10  # most probable guesses of a depth whose accuracies are measured
TEMPERATURES = [0.6 * 1.15**i for i in range(12)]  # that are tried: 0.6 to 2.8
BATCH_ROWS = 8  # answers a step
ACCELERATOR_ROWS = 128  # the most there: fewer take as long, as the time goes into launches
LEAST_STEPS = 256  # of an epoch, where a step could have more answers than `BATCH_ROWS`
CHECKPOINT_STEPS = 50  # between two checkpoints


def batch_rows(model, answers: int) -> int:
    """Answers a step, of so many in all."""
    most = BATCH_ROWS if model.device.type == "cpu" else ACCELERATOR_ROWS
    return min(most, max(BATCH_ROWS, answers // LEAST_STEPS))


def distill(
    heads: DraftHeads, model, rows: list[Row], folder: Path, steps: int, learning_rate: float, seed: int
) -> float:
    """Minimises the divergence KL(target || heads) over the draft tokens, at every token of the answers and for up to
    `heads.trained_depth` guesses in a row (Zhou et al. 2023, "DistillSpec", on text of the target).

    Matrices are trained by Muon (Jordan et al. 2024, with the step size of Liu et al. 2025, "Muon is Scalable for LLM
    Training"), stacks of them, norms and biases by AdamW, both with a cosine schedule. Norms and biases do not decay.
    Weights are float32; products run in bfloat16 where the model does. Every `CHECKPOINT_STEPS` steps the state goes to
    `folder`. A run with the same arguments continues from there, with the same result.

    Returns the mean loss of the last 50 steps, in nats a guess.
    """
    heads.float().requires_grad_(True).train()
    heads.bind(model)
    optimizers = _optimizers(heads, learning_rate)
    count = batch_rows(model, len(rows))
    run = {"steps": steps, "rows": count, "learning_rate": learning_rate, "seed": seed}
    run |= {
        "kind": heads.kind,
        "shape": [*heads.shape.values(), heads.max_tokens, len(heads.draft_tokens)],
        "target": heads.target,
        "lengths": [len(row.tokens) for row in rows],
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
    }
    run = json.dumps(run, sort_keys=True)
    done, losses = _resume(folder / f"{heads.kind}.safetensors", heads, optimizers, run)
    order = _order([len(row.tokens) for row in rows], steps, count, seed)
    with frozen(model), logging.tqdm(total=steps, initial=done, desc="training", unit="step") as bar:
        for step in range(done, steps):
            warm = min(1.0, (step + 1) / max(1, WARMUP * steps))
            rate = learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            depth = heads.trained_depth(step / steps)
            loss = _step(heads, model, [rows[i] for i in order[step]], optimizers, rate, depth)
            losses = [*losses[-49:], loss]
            bar.update()
            bar.set_postfix(loss=f"{sum(losses) / len(losses):.3f}")
            if (step + 1) % CHECKPOINT_STEPS == 0:
                _checkpoint(folder / f"{heads.kind}.safetensors", heads, optimizers, run, step + 1, losses)
    heads.requires_grad_(False).eval()
    return sum(losses) / len(losses)


def step_seconds(heads: DraftHeads, model, rows: list[Row]) -> float:
    """Seconds of a training step. Changes nothing."""
    heads.float().requires_grad_(True).bind(model)
    optimizers = _optimizers(heads, 0.0)
    with frozen(model):
        for _ in range(2):
            start = time.perf_counter()
            for progress in (0.0, 0.75):
                depth = heads.trained_depth(progress)
                _step(heads, model, rows[: batch_rows(model, len(rows))], optimizers, 0.0, depth)
            seconds = time.perf_counter() - start
    heads.zero_grad(set_to_none=True)
    return seconds / 2


def measure(heads: DraftHeads, model, rows: list[Row]) -> None:
    """Sets `heads.accuracies` and `heads.temperatures` from text that was not trained on.

    Accuracies compare the `RANKS` most probable guesses of each depth with the target's argmax at every token of the
    answers. Temperatures are those of `TEMPERATURES` with the smallest negative log-likelihood.
    """
    heads.check(model)
    output, device, size = model.get_output_embeddings(), heads.draft_tokens.device, heads.target["hidden_size"]
    index = torch.full((heads.target["vocab_size"],), -1, device=device)
    index[heads.draft_tokens] = torch.arange(len(heads.draft_tokens), device=device)
    ranks = min(RANKS, len(heads.draft_tokens))
    hits = torch.zeros(heads.max_tokens, ranks, dtype=torch.float64)
    surprise = torch.zeros(heads.max_tokens, len(TEMPERATURES), dtype=torch.float64)
    counts = torch.zeros(heads.max_tokens, dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(rows), BATCH_ROWS):
            tokens, hidden, since = _batch(rows[start : start + BATCH_ROWS], model)
            hidden = hidden.to(model.dtype)
            truth = torch.full(hidden.shape[:2], -1, device=device)
            truth[since >= 0] = index[output(hidden[since >= 0][:, :size]).argmax(-1)]
            for depth, guesses in enumerate(heads.unroll(tokens, hidden, heads.max_tokens)):
                wanted = truth[since >= depth]
                logits = heads.logits(guesses[since >= depth]).float()
                counts[depth] += len(wanted)
                hits[depth] += (logits.topk(ranks).indices == wanted[:, None]).sum(0).cpu()
                logits, wanted = logits[wanted >= 0], wanted[wanted >= 0]
                said = logits.gather(1, wanted[:, None]).sum()
                for i, temperature in enumerate(TEMPERATURES):
                    surprise[depth, i] += ((logits / temperature).logsumexp(-1).sum() - said / temperature).item()
    heads.accuracies = (hits / counts[:, None].clamp(min=1)).tolist()
    heads.temperatures = [TEMPERATURES[i] for i in surprise.argmin(1).tolist()]


def _optimizers(heads: DraftHeads, rate: float) -> list[torch.optim.Optimizer]:
    weights = [parameter for name, parameter in heads.named_parameters() if name != "bias" and parameter.dim() > 1]
    vectors = [parameter for name, parameter in heads.named_parameters() if name == "bias" or parameter.dim() == 1]
    matrices, stacks = [p for p in weights if p.dim() == 2], [p for p in weights if p.dim() > 2]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": stacks, "weight_decay": 0.01}]
    made = [torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.95))]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return made


def _step(heads: DraftHeads, model, rows: list[Row], optimizers: list, rate: float, depth: int) -> float:
    """One step of the optimizers. Returns the loss before it."""
    loss = _loss(heads, model, rows, depth)
    heads.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return loss.item()


def _loss(heads: DraftHeads, model, rows: list[Row], depth: int) -> torch.Tensor:
    """The weighted mean divergence of the first `depth` guesses in a row."""
    tokens, hidden, since = _batch(rows, model)
    hidden = hidden.float()
    total, weight = 0.0, 0.0
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
        with torch.no_grad():
            target = hidden.new_zeros(*since.shape, len(heads.draft_tokens))
            known = hidden[since >= 0][:, : heads.target["hidden_size"]]
            target[since >= 0] = heads.logits(known).float().log_softmax(-1)
        for level, guesses in enumerate(heads.unroll(tokens, hidden, depth)):
            said = heads.logits(guesses[since >= level]).float().log_softmax(-1)
            divergence = torch.nn.functional.kl_div(said, target[since >= level], reduction="sum", log_target=True)
            total = total + DEPTH_DECAY**level * divergence / max(len(said), 1)
            weight += DEPTH_DECAY**level
    return total / weight


def _batch(rows: list[Row], model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64 [rows, length + 1] and hidden states [rows, length, hidden_size * (1 + layers)], padded on the
    right, and `since` int64 [rows, length]: the index in the answer of the token at a position, below 0 in the prompt
    and in padding. A guess of depth d (from 0) starts from an answer's token where since >= d."""
    lengths = torch.tensor([len(row.tokens) - 1 for row in rows])
    prompts = torch.tensor([row.prompt for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([row.tokens for row in rows], batch_first=True)
    hidden = torch.nn.utils.rnn.pad_sequence(hidden_of(model, rows), batch_first=True)
    column = torch.arange(hidden.shape[1])
    since = torch.where(column < lengths[:, None], column - prompts[:, None], -1)
    return tokens.to(model.device), hidden.to(model.device), since.to(model.device)


def _order(lengths: list[int], steps: int, count: int, seed: int) -> list[list[int]]:
    """The `count` rows of each step, by index: all rows once before any comes again, those of a step about equally
    long."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    while len(batches) < steps:
        shuffled, epoch = torch.randperm(len(lengths), generator=generator).tolist(), []
        for start in range(0, len(shuffled), 16 * count):
            near = sorted(shuffled[start : start + 16 * count], key=lambda row: lengths[row])
            epoch += [near[i : i + count] for i in range(0, len(near), count)]
        batches += [epoch[i] for i in torch.randperm(len(epoch), generator=generator).tolist()]
    return batches[:steps]


def _checkpoint(path: Path, heads, optimizers: list, run: str, done: int, losses: list[float]) -> None:
    tensors = {}
    for name, parameter in heads.named_parameters():
        tensors[name] = parameter.detach()
        for optimizer in optimizers:
            tensors |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    save_tensors(path, tensors, {"run": run, "done": str(done), "losses": json.dumps(losses)})


def _resume(path: Path, heads, optimizers: list, run: str) -> tuple[int, list[float]]:
    """Sets heads and optimizers to a checkpoint. Returns its number of steps and their last losses, or 0 and none."""
    if not path.exists():
        return 0, []
    check_whole(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if metadata["run"] != run:
        raise ValueError(
            f"{path} holds another training (other text, target, device or arguments): delete it, or give another cache"
        )
    tensors = load_file(path)
    done = int(metadata["done"])
    owner = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            parameter.copy_(tensors.pop(name))
            own = [key for key in tensors if key.startswith(f"{name}.")]
            owner[parameter].state[parameter] = {
                key.removeprefix(f"{name}."): value if value.dim() == 0 else value.to(parameter.device)
                for key, value in ((key, tensors.pop(key)) for key in own)
            }
    return done, json.loads(metadata["losses"])
