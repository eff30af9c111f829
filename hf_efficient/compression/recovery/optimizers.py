"""Optimizers that fit small machines, as one object for `Trainer`."""

import importlib.util
import math

import torch

from hf_efficient.compression.recovery.learned_norm import LearnedNorm
from hf_efficient.compression.recovery.serving import trained_linears


OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
CODED_RATE = 10.0  # learning rate of weights under codes: so many times that of others, times their root mean square
_BETAS = (0.9, 0.95)


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, for schedules, `Trainer` and its checkpoints."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self):
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"optimizers": states, "param_groups": [], "state": {}}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"]):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]


def check_optimizer(name: str) -> None:
    """Raises ImportError where `name` needs a package that is not installed."""
    if name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("optimizer='adamw_8bit' needs the package 'bitsandbytes': pip install bitsandbytes")


def make_optimizer(model, name: str, rate: float) -> torch.optim.Optimizer:
    """The optimizer `name` without weight decay for what `model` learns, at the learning rate `rate`. "muon" (Jordan et
    al. 2024) takes weights, adapters and projections, with the step size of https://arxiv.org/abs/2502.16982, and
    leaves the rest to AdamW."""
    groups = parameter_groups(model, rate)
    if name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(_joined(groups), rate, betas=_BETAS, weight_decay=0.0)
    if name == "adamw":
        return torch.optim.AdamW(_joined(groups), rate, betas=_BETAS, weight_decay=0.0, fused=True)
    coded = [module.coded for module in trained_linears(model).values() if hasattr(module, "coded")]
    scales = {id(p) for layer in coded for p in layer.parameters() if p is not getattr(layer, "weight", None)}
    first, rest = [], []
    for group in groups:
        is_matrix = all(parameter.dim() == 2 and id(parameter) not in scales for parameter in group["params"])
        (first if is_matrix else rest).append(group)
    made = []
    if first:
        made.append(torch.optim.Muon(_joined(first), rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    if rest:
        made.append(torch.optim.AdamW(_joined(rest), rate, betas=_BETAS, weight_decay=0.0, fused=True))
    return Together(*made)


def parameter_groups(model, rate: float) -> list[dict]:
    """What `model` learns, with learning rates. Those that follow from the size of weights are powers of 2^(1/8), so
    that layers share them."""
    groups, coded_rate = [], rate * CODED_RATE
    norms = [module for module in model.modules() if isinstance(module, LearnedNorm)]
    for module in (*trained_linears(model).values(), *norms):
        if hasattr(module, "groups"):
            own = module.groups(coded_rate)
            groups += [{**group, "lr": coded_rate * _shared(group["lr"] / coded_rate)} for group in own]
    own = {id(parameter) for group in groups for parameter in group["params"]}
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in own]
    matrices, others = [p for p in rest if p.dim() == 2], [p for p in rest if p.dim() != 2]
    return groups + [{"params": parameters, "lr": rate} for parameters in (matrices, others) if parameters]


def _shared(factor: float) -> float:
    """The nearest power of 2^(1/8)."""
    return 2 ** (round(8 * math.log2(factor)) / 8) if factor > 0 else 0.0


def _joined(groups: list[dict]) -> list[dict]:
    """`groups` with those of one learning rate joined: an optimizer takes a pass, on a GPU a launch, for each group."""
    joined = {}
    for group in groups:
        joined.setdefault(group["lr"], []).extend(group["params"])
    return [{"params": parameters, "lr": rate} for rate, parameters in joined.items()]
