"""A forward captured once and replayed on the same tensors, as a CUDA graph does on a GPU: no Python and no dispatcher
runs between two matrix products.

An op in the table of `registry.py` becomes instructions of the C++ interpreter, which work on addresses. Any other op
is called again with the same arguments, and its result copied to where it lay.
"""

import ctypes
import functools
import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from hf_efficient.kernels.native.heap import HeapTrimmer
from hf_efficient.kernels.native.structs import Product
from hf_efficient.kernels.replay import aten_instructions, fusion, memory
from hf_efficient.kernels.replay.cuda_graph import capture_made, is_graph_capturing
from hf_efficient.kernels.replay.host_reads import HostReads, NotReplayable
from hf_efficient.kernels.replay.instructions import OPS, Instruction, address, interpreter
from hf_efficient.kernels.replay.registry import instructions_of, once_key


_UNREPEATABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


_HEAD = object()  # stands in a program where the output head begins


def _interpret(instructions: ctypes.Array) -> None:
    number = interpreter()(ctypes.addressof(instructions), len(instructions))
    refused = instructions[number - 1] if number else None
    if number and (refused.op == OPS["ROWS"] or refused.op == OPS["CALL"] and refused.alpha):
        raise IndexError("index out of range in self")  # torch's words for an embedding on a CPU
    if number:
        raise RuntimeError(
            f"instruction {number} of a captured forward was refused: lengths or blocks beyond the pages"
        )


def is_capturing() -> bool:
    """Whether a forward is being captured in the current thread, here or as a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    return isinstance(_get_current_dispatch_mode(), Capture) or is_graph_capturing()


def as_one_step(function, *inputs: torch.Tensor) -> torch.Tensor:
    """`function(*inputs)`, a new tensor. While a forward is captured it is one step of it, called again in every
    replay: it may read numbers on the host."""
    if torch.compiler.is_compiling() or not isinstance(capture := _get_current_dispatch_mode(), Capture):
        return function(*inputs)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        output = function(*inputs)
    capture.add_call(lambda: output.copy_(function(*inputs)), inputs)
    return output


class Capture(TorchDispatchMode):
    """Runs `forward()` and captures it. `replay()` computes the same from what the input tensors hold by then.

    Args:
        late: a tensor that the layers do not read, only the output head. `replay(head=False)` ends where it is first
            read, unless a tensor that exists is written behind that.

    Attributes:
        output: what `forward` returned; a replay overwrites its tensors.
        nbytes: of the results that stay in memory.

    Raises:
        NotReplayable: the forward reads numbers of tensors on the host, or draws random ones.
    """

    def __init__(self, forward, late: torch.Tensor | None = None):
        super().__init__()
        capture_made()
        self._kept, self._steps, program = [], [], []
        self._program = program  # instructions, and (function to call, the tensors it reads)
        self._given = {}  # address -> tensor, of what was read and not made
        self._made = {}  # address -> storage, of results
        self._unread = memory.UnreadResults()
        self._once = {}  # key of a call -> (what it read, its result)
        self._pinned = set()  # addresses of storages that have to stay there
        self._late, self._head = late, None  # `_head`: the step of a replay with which the output head begins
        self._has_head = False
        with torch.no_grad(), HostReads(), self:
            self.output = forward()
        outputs = _tensors_of(self.output)
        program = fusion.fuse(program, outputs)
        self._share_memory(program, outputs)
        for is_call, steps in itertools.groupby(program, lambda step: isinstance(step, tuple)):
            if is_call:
                for call, _ in steps:
                    if call is not _HEAD:
                        self._steps.append(call)
                    elif self._has_head:
                        self._head = len(self._steps)
            else:
                self._pack(list(steps))

    def _share_memory(self, program: list, outputs: list[torch.Tensor]) -> None:
        """Keeps no more memory for results than a replay needs."""
        self._pinned.update(map(address, outputs))
        self._unread = None
        buffer, unneeded = memory.share(program, self._made, self._pinned)
        results = [storage for at, storage in self._made.items() if at not in unneeded]
        self._kept += [*self._given.values(), buffer, *results]
        self.nbytes = sum(storage.nbytes() for storage in results) + (0 if buffer is None else buffer.nbytes)
        freed = sum(self._made[at].nbytes() for at in unneeded)
        self._program = self._made = self._once = self._given = self._late = None
        HeapTrimmer().count(freed)  # 40 MB of a prompt of 32 tokens, which the C library would keep

    @torch.no_grad()
    def replay(self, head: bool = True):
        """Computes `output` again, from what the inputs hold now. head: if False, what `late` is needed for may be left
        out, and the output means nothing."""
        torch.get_num_threads()  # gives a new Python thread torch's number of threads
        for step in self._steps if head else self._steps[: self._head]:
            step()
        return self.output

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_gather = func is torch.ops.aten.index.Tensor and all(
            x is None or x.dtype in (torch.int64, torch.int32) for x in args[1]
        )  # by integers: of a known size, though its tag says otherwise
        if _UNREPEATABLE & set(func.tags) and not is_gather:
            raise NotReplayable(f"the forward calls {func}")
        inputs = _tensors_in((*args, *kwargs.values()))
        if func._schema.is_mutable:
            self._forget(set(map(address, inputs)))
            self._has_head = False
        key = once_key(func, args)
        if key in self._once:
            return self._once[key][1]
        result = aten_instructions.computed(func, args, kwargs)
        tensors = _tensors_in((result,))
        self._given |= {address(x): x for x in inputs if address(x) not in self._made}
        if key is not None:
            self._once[key] = args[0], result
        if self._is_view(func, args, tensors):
            return result
        before = set(map(address, inputs))
        if self._late is not None and address(self._late) in before:
            self._program.append((_HEAD, []))
            self._late, self._has_head = None, True
        made = {address(x): x.untyped_storage() for x in tensors if address(x) not in before}
        self._made |= made
        instructions = None if interpreter() is None else instructions_of(func, args, kwargs, tensors)
        if instructions is None:
            self._program.append((_call_again(func, args, kwargs, tensors), inputs))
            self._pinned.update(map(address, tensors))
            return result
        self._program += instructions
        self._unread.count(list(made.values()))
        for instruction in instructions:
            self._kept += instruction.keep
            self._pinned.update(instruction.pinned)
        if instructions[-1].op == OPS["CALL"]:  # whose addresses cannot be changed
            self._pinned.update(map(address, [*inputs, *tensors]))
        return result

    def add_call(self, call, inputs) -> None:
        """`call()` comes next, which reads the tensors in `inputs`."""
        self._program.append((call, _tensors_of(inputs)))

    def _forget(self, written: set[int]) -> None:
        """Storages that may be written: calls that read them, or made them, are computed again."""
        self._once = {key: own for key, own in self._once.items() if written.isdisjoint(map(address, own))}

    @staticmethod
    def _is_view(func, args, tensors) -> bool:
        if func.is_view:
            return True
        if func._schema.is_mutable or len(tensors) != 1:
            return False
        inputs = [x for x in args if isinstance(x, torch.Tensor) and x.layout is torch.strided]  # oneDNN's are not
        return any(address(x) == address(tensors[0]) for x in inputs)

    def _pack(self, instructions: list) -> None:
        for instruction in instructions:
            if instruction.op == OPS["LINEAR"]:
                products = (Product * len(instruction.products))(*instruction.products)
                instruction.weight, instruction.sizes[1] = ctypes.addressof(products), len(products)
                self._kept.append(products)
        packed = (Instruction * len(instructions))(*instructions)
        self._steps.append(functools.partial(_interpret, packed))


def _call_again(func, args, kwargs, tensors):
    """A function that calls `func` with the same arguments and puts the results into `tensors`."""
    if func is torch.ops.aten._to_copy.default:  # of a position's number, in every token of most models
        return functools.partial(tensors[0].copy_, args[0])
    out = getattr(func.overloadpacket, "out", None) if len(tensors) == 1 else None
    if out is not None and _signature(func) == _signature(out)[:-1]:
        return functools.partial(out, *args, **kwargs, out=tensors[0])

    def call():
        for tensor, new in zip(tensors, _tensors_in((func(*args, **kwargs),))):
            if new is not tensor:
                tensor.copy_(new)

    return call


def _tensors_of(tree) -> list[torch.Tensor]:
    """Those with a storage, unlike oneDNN's weights."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.layout is torch.strided]


def _tensors_in(values) -> list[torch.Tensor]:
    """As `_tensors_of`, of arguments and results of operators, which hold them in lists and tuples alone: in less than
    half the time, twice for each operator that is recorded."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors_in(value)
    return found


def _signature(func) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]
