"""Gradients of the language modelling loss: one backward pass per window, and what methods read from it."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_efficient.calibration.blocks import weight_of, without_cache
from hf_efficient.experts import expert_weight_names
from hf_efficient.integrations.transformers_compat import expert_activation
from hf_efficient.integrations.transformers_releases import post_expert_norm
from hf_efficient.kernels.widened_products import widened_products
from hf_efficient.observers.hooks import replaced_forwards, watching_outputs
from hf_efficient.observers.linear_inputs import bfloat16_products


@dataclass
class LinearGradients:
    """Gradients of the summed loss for the weight [N, K] of one linear; a field is None where it was not asked for.

    Attributes:
        gradient: float32 [N, K], the absolute value of the gradient of a window, summed over windows.
        fisher: float32 [N, K], the square of the gradient of a token, summed over tokens.
        output_hessian: float32 [N, N], the sum over tokens of g g^T, g being the gradient for the outputs.
        token_weights: float32 [windows, length], |g|^2 of each token, relative to their mean.

    The last two are the factors of YAQA (https://arxiv.org/abs/2505.22988): with the sum of token_weights * x x^T over
    inputs x, `output_hessian` makes the Hessian of the model's divergence from itself, if tokens are independent. Their
    loss is that of tokens drawn from what the model predicts.
    """

    gradient: torch.Tensor | None = None
    fisher: torch.Tensor | None = None
    output_hessian: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None


OF_THE_DIVERGENCE = ("output_hessian", "token_weights")


def gradients(
    model: nn.Module,
    asked: Mapping[str, Collection[str]],
    tokens: torch.Tensor,
    blocks: Iterable[nn.Module] = (),
    seed: int = 0,
) -> dict[str, LinearGradients]:
    """Name of a linear -> its `LinearGradients`, from one backward pass over `tokens` int64 [windows, length]. asked:
    name of a linear -> names of the fields to compute. model, blocks, memory and errors: see `language_loss_gradients`.
    seed: of the tokens that are drawn for `OF_THE_DIVERGENCE`.

    Raises:
        ValueError: gradients that are not finite; fields of the text's loss beside those of the divergence.
    """
    modules = {name: model.get_submodule(name) for name in asked}
    drawn = {field in OF_THE_DIVERGENCE for fields in asked.values() for field in fields}
    if len(drawn) > 1:
        raise ValueError(f"asked={dict(asked)} is not supported: {OF_THE_DIVERGENCE} are of another loss than the rest")
    found = {name: LinearGradients(**{f: _empty(modules[name], f) for f in asked[name]}) for name in asked}
    squares: dict[str, list[torch.Tensor]] = {name: [] for name in asked}

    def add(name: str, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        own, is_exact = found[name], gradient.dtype is torch.bfloat16 and gradient.device.type == "cpu"
        rows, deltas = (x.detach().float().flatten(0, -2) for x in (inputs, gradient))
        if own.gradient is not None:
            own.gradient += (deltas.t() @ rows).abs_()
        if own.fisher is not None:
            own.fisher.addmm_(deltas.square().t(), rows.square())
        if own.output_hessian is not None:
            with bfloat16_products(is_exact):
                own.output_hessian.addmm_(deltas.t(), deltas)
        if own.token_weights is not None:
            squares[name].append(deltas.square().sum(1))

    generator = torch.Generator().manual_seed(seed) if True in drawn else None
    language_loss_gradients(model, modules, tokens, blocks, add, drawn=generator)
    for name, own in found.items():
        if own.token_weights is not None:
            if [len(window) for window in squares[name]] != [tokens.shape[1]] * len(tokens):
                raise ValueError(
                    f"{name} is not called once for each token of a window, as gradients of tokens need it"
                )
            weights = torch.stack(squares[name])
            own.token_weights = weights / weights.mean().clamp_min(torch.finfo(weights.dtype).tiny)
        check_finite(name, *(getattr(own, field) for field in asked[name]))
    return found


def language_loss_gradients(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    tokens: torch.Tensor,
    blocks: Iterable[nn.Module],
    add: Callable[[str, torch.Tensor, torch.Tensor], None],
    drawn: torch.Generator | None = None,
    experts: Mapping[str, nn.Module] | None = None,
) -> None:
    """Runs the backward pass of the loss over `tokens` int64 [windows, length], window by window, where the model's
    weights are. For every call of each of `modules` it calls `add(name, inputs [..., K], gradient of the summed loss
    for the outputs [..., N])`. For `experts` it calls it with the name of each expert's weight (see
    `name_of_expert`).

    No gradients of weights are kept. Activations are kept of one of the `blocks` at a time, plus the hidden states
    between them, [length, hidden] per block, and three times the logits [length, vocabulary].

    Args:
        model: a causal language model in evaluation mode.
        modules: name -> `nn.Linear` or `Conv1D`.
        blocks: modules that are computed again in the backward pass.
        drawn: where given, the loss is that of next tokens drawn by it from what the model predicts, at all positions.
        experts: name -> fused experts, which then run one by one.

    Raises:
        ValueError: the model gives no logits for `input_ids` alone.
    """

    def watched(name: str, args, kwargs, output: torch.Tensor) -> torch.Tensor | None:
        return _GradientHook.apply(output, args[0].detach(), name, add) if output.requires_grad else None

    experts = experts or {}
    one_by_one = [functools.partial(_run_experts, *item, add) for item in experts.items()]
    blocks, embedding = list(blocks), {"": model.get_input_embeddings()}
    trained, forwards = [p for p in model.parameters() if p.requires_grad], [block.forward for block in blocks]

    device = model.get_input_embeddings().weight.device
    contexts = lambda: (nullcontext(), widened_products(device))  # noqa: E731  torch leaves modes in a backward pass

    def recomputed(index: int):
        options = dict(use_reentrant=False, context_fn=contexts)
        return lambda *args, **kwargs: checkpoint(forwards[index], *args, **options, **kwargs)

    with (
        watching_outputs(modules, watched),
        watching_outputs(embedding, lambda _, args, kwargs, output: output.requires_grad_()),
        torch.enable_grad(),
        widened_products(device),
        without_cache(model),
        replaced_forwards(blocks, recomputed),
        replaced_forwards(list(experts.values()), one_by_one.__getitem__),
    ):
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            for window in tokens.to(device):
                _language_loss(model, window[None], drawn).backward()
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


def check_finite(name: str, *tensors: torch.Tensor) -> None:
    """Raises ValueError, naming the linear, unless all values are finite."""
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ValueError(f"{name}: the gradients of the calibration loss are not finite")


def name_of_expert(experts: str, weight: str, expert: int) -> str:
    """The name of a weight of one expert."""
    return f"{experts}.{weight}[{expert}]"


def _run_experts(name: str, module: nn.Module, add, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
    """The forward of fused experts, with the inputs and gradients of each product handed to `add`."""
    output, norm = torch.zeros_like(hidden_states), post_expert_norm(module)

    def product(weight: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        matrix, bias = getattr(module, weight)[expert], getattr(module, weight + "_bias", None)
        y = x @ (matrix if module.is_transposed else matrix.t())
        y = y if bias is None else y + bias[expert]
        return _GradientHook.apply(y, x.detach(), name_of_expert(name, weight, expert), add) if y.requires_grad else y

    up, down = expert_weight_names(module)
    for expert in top_k_index.unique().tolist():
        rows, places = (top_k_index == expert).nonzero(as_tuple=True)
        y = product(down, expert, expert_activation(module, product(up, expert, hidden_states[rows])))
        y = y if norm is None else norm(y)
        output = output.index_add(0, rows, (y * top_k_weights[rows, places, None]).to(output.dtype))
    return output


class _GradientHook(torch.autograd.Function):
    """Hands on a copy of `output` (some models change it in place), and its gradient to `add`. The inputs are saved
    tensors, which `checkpoint` computes again."""

    @staticmethod
    def forward(ctx, output, inputs, name, add):
        ctx.save_for_backward(inputs)
        ctx.name, ctx.add = name, add
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.add(ctx.name, *ctx.saved_tensors, gradient)
        return gradient, None, None, None


def _language_loss(model: nn.Module, window: torch.Tensor, drawn: torch.Generator | None) -> torch.Tensor:
    """Summed cross entropy of the next tokens of `window` int64 [1, length], or of those that are drawn."""
    logits = getattr(model(input_ids=window), "logits", None)
    if logits is None or logits.shape[:2] != window.shape:
        raise ValueError(f"gradients of the loss need a causal language model, not {type(model).__name__}")
    if drawn is None:
        logits, labels = logits[0, :-1].float(), window[0, 1:].to(logits.device)
    else:
        logits = logits[0].float()
        labels = torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=drawn)[:, 0].to(logits.device)
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def _empty(module: nn.Module, field: str) -> torch.Tensor:
    weight = weight_of(module)
    shape = {"output_hessian": (len(weight), len(weight)), "token_weights": (0, 0)}.get(field, weight.shape)
    return torch.zeros(shape, device=weight.device, dtype=torch.float32)
