"""Per-channel scales moved from the inputs of linears into what produces them.

Linears y = x W^T that read one tensor x can as well read x / s and hold W * s, which rounds better for some s (AWQ,
SmoothQuant). Where x comes from a norm, or is proportional to the output of a linear (up_proj -> down_proj, v_proj ->
o_proj, fc1 -> relu -> fc2), the weight of that module takes 1 / s. The model then computes the same, at no cost.

The producer of a tensor is found by running the block, never by names. Each candidate is tried with random powers of
two, which no dtype rounds. It is taken only if every module that ends at or after the first consumer returns what it
returned before. So a second reader of the norm (the residual of a post-norm block, a router), or a function in between
that is not homogeneous (GELU), rules a candidate out. Without a producer the linears keep an `input_scale`."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.observers.hooks import watching_outputs


# what attention modules call the width of a head
_HEAD_DIMS = ("head_dim", "v_head_dim", "attention_head_size", "head_size")


class Producer:
    """A norm or linear whose output channels can be divided by positive factors.

    Args:
        rows: int64 [K]; channel k of the tensor it produces is proportional to its output `rows[k]`. Several channels
            may share one (grouped key-value heads).
        offset: what a norm adds to its weight: 1.0 for norms that multiply by (1 + weight), as Gemma's.
    """

    def __init__(self, module: nn.Module, rows: torch.Tensor, offset: float = 0.0):
        self.module, self.rows, self.offset = module, rows, offset

    def pool(self, values: torch.Tensor, reduce: str) -> torch.Tensor:
        """values [K] -> [K]: channels that share a row get their "mean" or "amax"."""
        rows = self.rows.to(values.device)
        pooled = values.new_zeros(int(rows.max()) + 1)
        return pooled.scatter_reduce_(0, rows, values, reduce, include_self=False)[rows]

    def divide(self, scale: torch.Tensor) -> torch.Tensor:
        """Divides the output by `scale` [K] (pooled). Returns the exact divisors [K]: a norm's weight is rounded to its
        dtype, for which consumers can make up."""
        weight, bias = self.module.weight.data, getattr(self.module, "bias", None)
        exact = weight.new_ones(self._width(), dtype=torch.promote_types(weight.dtype, torch.float32))
        exact[self.rows.to(weight.device)] = scale.to(exact)
        if weight.ndim == 1:
            before = weight.to(exact.dtype) + self.offset
            weight.copy_(before / exact - self.offset)
            ratio = before / (weight.to(exact.dtype) + self.offset)
            exact = torch.where(ratio.isfinite() & (ratio > 0), ratio, exact)
        else:
            by_output = weight_of(self.module)
            by_output.copy_(by_output / exact[:, None])
        if bias is not None:
            bias.data.copy_(bias.data / exact)
        return exact[self.rows.to(weight.device)]

    def _width(self) -> int:
        return len(self.module.weight) if self.module.weight.ndim == 1 else len(weight_of(self.module))


class Folding:
    """Finds the producers of one dense `Block` and folds scales into them. The block's first batch is run twice or more
    for every tensor that linears read, with the outputs of all its modules kept."""

    def __init__(self, block):
        self.block = block
        self._names = {id(module): name for name, module in block.linears.items()}
        self._reference = self._run()

    def sites(self) -> list[list[str]]:
        """Names of linears that read one tensor (and so share statistics), in execution order; those never reached
        (an expert without tokens) are left out."""
        by_tensor: dict[int, list[str]] = {}
        for name in self.block.linears:
            if self.block.statistics[name].count:
                by_tensor.setdefault(id(self.block.statistics[name]), []).append(name)
        order = {call.name: index for index, call in reversed(list(enumerate(self._reference)))}
        sites = [names for names in by_tensor.values() if all(name in order for name in names)]
        return sorted(sites, key=lambda names: min(order[name] for name in names))

    def scale_inputs(self, chosen: set[str], search: Callable[[list[str], Producer | None], torch.Tensor]) -> None:
        """Scales the inputs of the linears `chosen`, and of those that read the same tensors. `search` gets the chosen
        linears that read one tensor and its producer, and returns the scale float [K] (pooled by the producer)."""
        for names in self.sites():
            if own := [name for name in names if name in chosen]:
                producer = self.producer(names)
                scale = search(own, producer)
                if not torch.all(scale == 1):
                    self.apply(names, producer, scale)

    def producer(self, names: list[str]) -> Producer | None:
        """What produces the tensor that the linears `names` read and can be scaled exactly; None where nothing can."""
        generator = torch.Generator().manual_seed(0)
        for candidate in self._candidates(names):
            powers = torch.randint(-1, 2, (candidate._width(),), generator=generator)
            scale = torch.exp2(powers.float())[candidate.rows]
            with _Restored([candidate.module, *self._modules(names)]):
                self._divide(candidate, scale, names)
                if self._agrees(self._run(), names, _exact):
                    return candidate
        return None

    def apply(self, names: list[str], producer: Producer | None, scale: torch.Tensor) -> bool:
        """Lets the linears `names` read their input divided by `scale` (float [K], positive, pooled by `producer`).

        Returns:
            True if folded: the weights of the producer and of the linears change, the statistics become those of the
            divided inputs, and running the block shows that it computes the same up to rounding in its dtype. False
            otherwise: weights and statistics stay, the formats of the linears ask for an input scale, and
            `block.transforms[name]` is {"input_scale": 1 / scale}.
        """
        if producer is not None:
            restored = _Restored([producer.module, *self._modules(names)])
            exact = self._divide(producer, scale, names)
            after = self._run()
            if self._agrees(after, names, _up_to_rounding):
                self._reference = after
                scaled = self.block.statistics[names[0]].scaled(1 / exact)
                self.block.statistics.update(dict.fromkeys(names, scaled))
                return True
            restored.__exit__()
        for name in names:
            format = self.block.formats[name]
            if isinstance(format, TransformedFormat):
                self.block.formats[name] = dataclasses.replace(format, input_scale=True)
            else:
                self.block.formats[name] = TransformedFormat(format, input_scale=True)
            self.block.transforms[name] = {"input_scale": 1 / scale}
        return False

    def divide_norm(self, experts: nn.Module, weights: torch.Tensor, scale: torch.Tensor) -> bool:
        """Lets fused `experts`, and all else that reads what a norm gives them, read it divided by powers of two.

        Args:
            weights: the first weights of the experts, a view [E, N, K].
            scale: float [K].

        Returns:
            True if the weights of the norm and of its readers changed, and all that the block computes behind it kept
            its bits, up to the order of sums; statistics of linears become those of the divided inputs. False
            otherwise, and nothing changed.
        """
        pointer = next((call.input_pointer for call in self._reference if call.module is experts), None)
        outputs = ((i, call.norm_output) for i, call in enumerate(self._reference) if call.norm_output is not None)
        at = next((i for i, output in outputs if output.data_ptr() == pointer), None)
        if at is None:
            return False
        norm = self._reference[at].module  # what was there before may have had the same address
        following = [call.module for call in self._reference[at + 1 :] if call.input_pointer == pointer]
        readers = [module for module in following if getattr(getattr(module, "weight", None), "ndim", 0) == 2]
        matrices = [weight_of(reader) for reader in readers]
        if any(matrix.shape[1] != len(scale) for matrix in matrices):
            return False
        scale = scale.to(weights.device, weights.dtype)
        if not all(torch.equal(matrix * scale / scale, matrix) for matrix in (*weights, *matrices)):
            return False  # beyond the range of the dtype
        restored = _Restored([norm, *readers])
        exact = Producer(norm, torch.arange(len(scale))).divide(scale.float())
        for matrix in (*weights, *matrices):
            matrix.mul_(scale)
        after = self._run() if torch.equal(exact.float(), scale.float()) else []
        first = next(i for i, call in enumerate(self._reference) if call.module in (experts, *readers))
        pairs = zip(self._reference[first:], after[first:])
        if len(after) != len(self._reference) or not all(
            _exact(old, new) for before, now in pairs for old, new in zip(before.outputs, now.outputs)
        ):
            restored.__exit__()
            for matrix in weights:
                matrix.div_(scale)
            return False
        self._reference, scaled = after, {}
        for name in filter(None, (self._names.get(id(reader)) for reader in readers)):
            inputs = self.block.statistics[name]
            self.block.statistics[name] = scaled.setdefault(id(inputs), inputs.scaled(1 / scale))
        return True

    def _modules(self, names: list[str]) -> list[nn.Module]:
        return [self.block.linears[name] for name in names]

    def _divide(self, producer: Producer, scale: torch.Tensor, names: list[str]) -> torch.Tensor:
        """Divides the tensor and multiplies the weights that read it. Returns the exact divisors [K]."""
        exact = producer.divide(scale)
        for module in self._modules(names):
            by_output = weight_of(module)
            by_output.copy_(by_output * exact.to(by_output.device))
        return exact

    def _candidates(self, names: list[str]) -> Iterator[Producer]:
        """The norm that returned this very tensor; otherwise the linears called before, the latest first."""
        first = self._first(self._reference, names)
        consumer = self._reference[first]
        channels = torch.arange(weight_of(self.block.linears[consumer.name]).shape[1])
        before = self._reference[:first]
        for norm in before:
            if norm.norm_output is not None and norm.norm_output.data_ptr() == consumer.input_pointer:
                rows = channels % len(norm.module.weight)  # of a head, where a norm is that of heads
                yield Producer(norm.module, rows)
                yield Producer(norm.module, rows, offset=1.0)  # (1 + weight)
                return
        head_dims = _head_dims(self.block.module)
        for module in {id(call.module): call.module for call in reversed(before)}.values():
            if isinstance(module, (nn.Linear, Conv1D)):
                for rows in _row_maps(len(weight_of(module)), len(channels), head_dims):
                    yield Producer(module, rows)

    def _first(self, calls: list["_ModuleCall"], names: list[str]) -> int:
        return next(index for index, call in enumerate(calls) if call.name in names)

    def _agrees(self, after: list["_ModuleCall"], names: list[str], error: Callable) -> bool:
        """Whether everything that ended at or after the first of the linears is the same."""
        before = self._reference
        if [call.module for call in before] != [call.module for call in after]:
            return False
        first = self._first(before, names)
        pairs = [pair for b, a in zip(before[first:], after[first:]) for pair in zip(b.outputs, a.outputs)]
        return all(error(old, new) for old, new in pairs)

    @torch.no_grad()
    def _run(self) -> list["_ModuleCall"]:
        """Calls of all modules on the first batch, in the order in which they end."""
        calls = []

        def record(module, args, kwargs, output) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            outputs = [o for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()]
            pointer = next((i.data_ptr() for i in (*args, *kwargs.values()) if isinstance(i, torch.Tensor)), 0)
            norm_output, copies = outputs[0] if is_norm(module) else None, [o.clone() for o in outputs]
            calls.append(_ModuleCall(module, self._names.get(id(module)), pointer, norm_output, copies))

        with watching_outputs({module: module for module in self.block.module.modules()}, record):
            self.block.run(0)
        return calls


def centred(scale: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """scale [K] over the geometric mean of its largest and smallest value, clamped to [1e-4, 1e4]; 1 where not
    `live`."""
    if not live.any():
        return torch.ones_like(scale)
    scale = scale / (scale[live].amax() * scale[live].amin()).sqrt()
    return torch.where(live, scale.clamp(1e-4, 1e4), 1.0)


def powers_of_two(scales: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """The powers of two nearest to each of `scales`, float [K], in the same order, none twice."""
    rounded = (torch.exp2(scale.log2().round()) for scale in scales)
    return list({tuple(scale.tolist()): scale for scale in rounded}.values())


def within_range(scales: Iterable[torch.Tensor], weights: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those of `scales`, float [K], that take none of the `weights` [N, K] beyond the range of its dtype."""
    largest = [(weight.abs().amax(0).float(), torch.finfo(weight.dtype).max) for weight in weights]
    return (scale for scale in scales if all((own * scale <= limit).all() for own, limit in largest))


@dataclasses.dataclass
class _ModuleCall:
    """One call of a module during a run of the block."""

    module: nn.Module
    name: str | None  # full name, if the module is a linear to quantize
    input_pointer: int  # address of its first tensor argument
    norm_output: torch.Tensor | None  # kept alive, so that no other tensor gets its address
    outputs: list[torch.Tensor]


class _Restored:
    """At the end of a with block the parameters of `modules` are what they were at its start."""

    def __init__(self, modules: list[nn.Module]):
        self.saved = [(p.data, p.data.clone()) for module in modules for p in module.parameters(recurse=False)]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for data, saved in self.saved:
            data.copy_(saved)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` multiplies by a vector, as norms do."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 1 and next(module.children(), None) is None


def _head_dims(module: nn.Module) -> list[int]:
    found = (getattr(m, name, None) for m in module.modules() for name in _HEAD_DIMS)
    return sorted({value for value in found if isinstance(value, int)})


def _row_maps(rows: int, channels: int, head_dims: list[int]) -> Iterator[torch.Tensor]:
    """Candidates for `Producer.rows`, int64 [channels], of a linear with `rows` outputs: one for each known layout."""
    channel = torch.arange(channels)
    if rows == channels:
        yield channel
    if rows == 2 * channels:  # gate and up in one
        yield channel + channels
        yield channel
    for head_dim in head_dims:
        head, within = channel // head_dim, channel % head_dim
        if channels % head_dim:
            continue
        heads = channels // head_dim
        if rows % heads == 0 and rows > channels:  # values last in what a head makes
            yield (head + 1) * (rows // heads) - head_dim + within
        for fused in (False, True):  # with queries and keys in one
            values = (rows - channels) // 2 if fused else rows
            if values <= 0 or values % head_dim or channels % values or rows != values + fused * (values + channels):
                continue
            repeat = channels // values
            if fused:
                yield rows - values + head // repeat * head_dim + within
            if repeat > 1:
                yield (head // repeat + 1) * (rows * head_dim // values) - head_dim + within


def _row_errors(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(norms of the differences, norms of the old values), one per row."""
    if old.shape != new.shape:
        return old.new_full((1,), torch.inf), old.new_ones(1)
    old, new = (t.float().reshape(-1, t.shape[-1] if t.ndim else 1) for t in (old, new))
    difference = torch.where(old == new, 0.0, new - old)  # infinities that agree are no error
    return difference.norm(dim=-1), old.nan_to_num(0, 0, 0).norm(dim=-1)


def _exact(old: torch.Tensor, new: torch.Tensor) -> bool:
    """The tolerance after scaling by powers of two: 1e-5 for another order of sums, eps for rounding (1 + weight) in a
    16-bit dtype. A wrong fold changes outputs by order 1."""
    difference, size = _row_errors(old, new)
    return (difference.norm() <= max(1e-5, torch.finfo(old.dtype).eps) * size.norm()).item()


def _up_to_rounding(old: torch.Tensor, new: torch.Tensor) -> bool:
    """The tolerance after real scales, which round two weights by at most eps / 2 each. Attention and routing amplify
    that: 16 eps (in float32 1e-4) in 19 of 20 rows. Overflow is beyond it."""
    difference, size = _row_errors(old, new)
    small = difference <= max(1e-4, 16 * torch.finfo(old.dtype).eps) * size
    return difference.isfinite().all().item() and small.float().mean().item() >= 0.95 if len(small) else True
