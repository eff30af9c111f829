"""A forward as the list of its operators, which can be rewritten and run again: how captures on a GPU get fewer
kernels."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hf_efficient.kernels.replay.host_reads import HostReads, NotReplayable


MAX_BYTES = 1 << 30  # of the results of a traced forward, all of which stay until it is rewritten
_UNREPEATABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_RENAMES = ("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::alias", "aten::detach")


@dataclass(eq=False)
class Operator:
    """One call of a torch operator.

    results: the tensors that it returned. place: (number in the forward, number among those put there later).
    """

    func: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    results: list[torch.Tensor]
    place: tuple[int, int]

    @property
    def name(self) -> str:
        return self.func.name()

    @property
    def inputs(self) -> list[torch.Tensor]:
        return _tensors((self.args, self.kwargs))

    @property
    def arguments(self) -> dict:
        """All of them by name."""
        schema = self.func._schema.arguments
        defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        return defaults | dict(zip((argument.name for argument in schema), self.args)) | self.kwargs

    @property
    def result(self) -> torch.Tensor:
        """The only result."""
        (tensor,) = self.results
        return tensor


class Operators(TorchDispatchMode):
    """Runs `forward()` without gradients and notes its operators. Calling the object runs them again, as they are by
    then, on what the tensors hold that were not made among them; it returns what `forward` returned, in new tensors.

    A pattern finds operators by `list`, `made_by` and `readers`, and puts one in the place of several by `replace`.

    Raises NotReplayable where the forward reads numbers of tensors on the host, draws random ones, or makes more than
    MAX_BYTES.
    """

    def __init__(self, forward: Callable):
        super().__init__()
        self.list: list[Operator] = []
        self._maker: dict[int, Operator] = {}  # by id of the tensor
        self._readers: dict[int, list[Operator]] = defaultdict(list)
        self._written: set[int] = set()  # addresses of storages that the forward changes
        self._bytes = 0
        self._gone: list[Operator] = []  # kept while tensors are known by their ids
        self._program = None
        with torch.no_grad(), HostReads(), self:
            self.output = forward()
        self._outputs = {id(x) for x in _tensors(self.output)}
        for operator in reversed(self.list):
            if operator.func.is_view and not any(
                self._readers[id(x)] or id(x) in self._outputs for x in operator.results
            ):
                self._remove([operator])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_gather = func is torch.ops.aten.index.Tensor and all(
            x is None or x.dtype in (torch.int64, torch.int32) for x in args[1]
        )  # by integers: of a known size
        if _UNREPEATABLE & set(func.tags) and not is_gather:
            raise NotReplayable(f"the forward calls {func}")
        with torch._C.DisableTorchFunction():  # what an operator does inside is its own
            result = func(*args, **kwargs)
        operator = Operator(func, args, kwargs, _tensors(result), (len(self.list), 0))
        given = {id(x) for x in operator.inputs}
        if not func.is_view:
            self._bytes += sum(x.nbytes for x in operator.results if id(x) not in given)
        if self._bytes > MAX_BYTES:
            raise NotReplayable(f"the forward makes more than {MAX_BYTES >> 20} MB")
        self._add(operator)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._written.update(address(x) for x in _tensors(value))
        return result

    def _add(self, operator: Operator) -> None:
        self.list.append(operator)
        for x in operator.inputs:
            self._readers[id(x)].append(operator)
        given = {id(x) for x in operator.inputs}
        self._maker |= {id(x): operator for x in operator.results if id(x) not in given}

    def made_by(self, x, *names: str) -> Operator | None:
        """The operator, of one of `names` where those are given, that made tensor `x`; None for any other value."""
        maker = self._maker.get(id(x)) if isinstance(x, torch.Tensor) else None
        return maker if maker is not None and (not names or maker.name in names) else None

    def origin(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that `x` is another shape of: the same numbers in the same order."""
        while (maker := self.made_by(x, *_RENAMES)) is not None:
            x = maker.args[0]
        return x

    def readers(self, x: torch.Tensor) -> list[Operator]:
        """The operators that read `x` itself."""
        return self._readers[id(x)]

    def users(self, x: torch.Tensor) -> list[Operator]:
        """The operators that read `x` in any shape."""
        found = []
        for reader in self._readers[id(x)]:
            found += self.users(reader.result) if reader.name in _RENAMES else [reader]
        return found

    def is_output(self, x: torch.Tensor) -> bool:
        """Whether the forward returns `x`, or a tensor of another shape with its numbers."""
        shapes = [reader.result for reader in self._readers[id(x)] if reader.name in _RENAMES]
        return id(x) in self._outputs or any(map(self.is_output, shapes))

    def is_constant(self, x) -> bool:
        """Whether `x` is a tensor that was there before the forward, which does not change it."""
        return isinstance(x, torch.Tensor) and id(x) not in self._maker and address(x) not in self._written

    def are_private(self, operators: list[Operator], *kept: torch.Tensor, readers: list[Operator] = ()) -> bool:
        """Whether nothing but these operators and `readers` uses their results, except for those that are `kept`, and
        no operator changes what they read or make."""
        own, kept = set(map(id, [*operators, *readers])), set(map(id, kept))
        for operator in operators:
            if not self._written.isdisjoint(map(address, [*operator.inputs, *operator.results])):
                return False
            for x in operator.results:
                if id(x) in kept:
                    continue
                if self.is_output(x) or any(id(user) not in own for user in self.users(x)):
                    return False
        return True

    def replace(self, old: list[Operator], func, args: tuple, results: list[torch.Tensor], at=None) -> Operator:
        """Puts one call of `func` in the place of operators whose other results nobody uses; it makes `results`. It
        stands right behind the last of the operators that make its inputs, or at the place of the operator `at`."""
        self._remove(old)
        places = [self._maker[id(x)].place for x in _tensors(args) if id(x) in self._maker]
        before = max(places, default=(-1, 0)) if at is None else at.place
        operator = Operator(func, args, {}, results, (before[0], before[1] + 1))
        self._add(operator)
        return operator

    def view(self, func, x: torch.Tensor, *args) -> torch.Tensor:
        """`func(x, *args)`, a view, as a value of the forward."""
        result = func(x, *args)
        self.replace([], func, (x, *args), [result])
        return result

    def _remove(self, operators: list[Operator]) -> None:
        gone = set(map(id, operators))
        self._gone += operators
        self.list = [operator for operator in self.list if id(operator) not in gone]
        for x in (x for operator in operators for x in operator.inputs):
            self._readers[id(x)] = [reader for reader in self._readers[id(x)] if id(reader) not in gone]

    def _ordered(self) -> list[Operator]:
        """In their order, without those whose results nobody uses."""
        needed, kept = set(self._outputs), []
        for operator in sorted(self.list, key=lambda operator: operator.place, reverse=True):
            if operator.func._schema.is_mutable or any(id(x) in needed for x in operator.results):
                needed.update(map(id, operator.inputs))
                kept.append(operator)
        return kept[::-1]

    def finish(self) -> None:
        """Ends rewriting: no result of the forward stays in memory."""
        operators, numbers, constants = self._ordered(), {}, []

        def number(x):
            """Of the place of a tensor among the values; anything else as it is."""
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in numbers:
                numbers[id(x)] = len(numbers)
                constants.append((numbers[id(x)], x))
            return _Place(numbers[id(x)])

        steps = []
        for operator in operators:
            leaves, spec = tree_flatten((operator.args, operator.kwargs))
            inputs = [number(x) for x in leaves]
            results = []
            for x in operator.results:
                numbers.setdefault(id(x), len(numbers))
                results.append(numbers[id(x)])
            steps.append((operator.func, inputs, spec, results))
        leaves, spec = tree_flatten(self.output)
        output = [number(x) for x in leaves], spec
        last = {}
        for index, (_, inputs, _, results) in enumerate(steps):
            last |= dict.fromkeys([x.number for x in inputs if isinstance(x, _Place)] + results, index)
        keep = {x.number for x in output[0] if isinstance(x, _Place)} | {place for place, _ in constants}
        dead = defaultdict(list)
        for place, index in last.items():
            if place not in keep:
                dead[index].append(place)
        self._program = steps, dead, dict(constants), output
        self.list, self._gone, self.output = [], [], None
        self._maker, self._readers = {}, defaultdict(list)

    @torch.no_grad()
    def __call__(self):
        if self._program is None:
            self.finish()
        steps, dead, constants, (leaves, spec) = self._program
        values = dict(constants)
        for index, (func, inputs, arguments, places) in enumerate(steps):
            args, kwargs = tree_unflatten(_values(inputs, values), arguments)
            values.update(zip(places, _tensors(func(*args, **kwargs))))
            for place in dead[index]:
                del values[place]
        return tree_unflatten(_values(leaves, values), spec)


@dataclass(frozen=True)
class _Place:
    number: int


def _values(leaves: list, values: dict[int, torch.Tensor]) -> list:
    return [values[x.number] if isinstance(x, _Place) else x for x in leaves]


def _tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def address(x: torch.Tensor) -> int:
    """Of the storage of a tensor; its own where it has none (oneDNN's)."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)
