"""A forward recorded once and replayed on the same tensors, as a CUDA graph does on a GPU: between two matrix products no
Python and no dispatcher runs.

What the C++ interpreter (`native/replay/replay.cpp`) knows becomes an instruction on raw pointers; any other operator is called as it
was, and its result copied to where it was recorded.
"""

import ctypes
import functools
import itertools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from hf_efficient.kernels.attention import native_cpu as pages
from hf_efficient.kernels.linear import contextual_mlp, native_cpu, native_sparse
from hf_efficient.kernels.native import build
from hf_efficient.kernels.replay import fusion, memory
from hf_efficient.kernels.replay.fusion import OPS, Instruction, Operand


aten = torch.ops.aten
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_UNARY = {
    aten._to_copy: "COPY", aten.clone: "COPY", aten.neg: "NEG", aten.abs: "ABS", aten.relu: "RELU", aten.silu: "SILU",
    aten.tanh: "TANH", aten.sigmoid: "SIGMOID", aten.exp: "EXP", aten.sqrt: "SQRT", aten.rsqrt: "RSQRT",
    aten.reciprocal: "RECIPROCAL", aten.cos: "COS", aten.sin: "SIN",
}  # fmt: skip
_BINARY = {aten.add: "ADD", aten.sub: "SUB", aten.mul: "MUL", aten.div: "DIV"}
_HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr)
_DENSE_ROWS = 128  # of the recorded forwards; 64 rows of SmolLM2 take 28 ms, in torch 62
_UNREPEATABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


@functools.cache
def interpreter():
    library = build.load("replay")
    if library is None:
        return None
    library.hf_replay.argtypes, library.hf_replay.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return library.hf_replay


def _interpret(instructions: ctypes.Array) -> None:
    place = interpreter()(ctypes.addressof(instructions), len(instructions))
    if place and instructions[place - 1].op == OPS["ROWS"]:
        raise IndexError("index out of range in self")  # torch's words for an embedding on a CPU
    if place:
        raise RuntimeError(f"instruction {place} of a recorded forward was refused: lengths or blocks beyond the pages")


class NotReplayable(RuntimeError):
    """The forward asks for numbers on the host, or for random ones."""


class _Unread(torch.Tensor):
    """Stands for a tensor whose size is not known before it runs, as long as nobody reads it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotReplayable(f"the forward calls {func.__name__} on a tensor whose size it reads from another")


class _HostReads(TorchFunctionMode):
    """Refuses what reads numbers past the dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS:
            raise NotReplayable(f"the forward calls {func.__name__}")
        if func is torch.ones and any(isinstance(size, torch.Tensor) for size in args):  # masks of all columns
            return torch.empty(0).as_subclass(_Unread)
        return func(*args, **(kwargs or {}))


def is_capturing() -> bool:
    """Whether a forward is being recorded in the current thread."""
    return not torch.compiler.is_compiling() and isinstance(_get_current_dispatch_mode(), Capture)


def as_one_step(function, *inputs: torch.Tensor) -> torch.Tensor:
    """`function(*inputs)`, a new tensor. Where a forward is being recorded it is one step of it, and may read numbers on the
    host."""
    tape = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
    if not isinstance(tape, Capture):
        return function(*inputs)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        output = function(*inputs)
    tape.add_call(lambda: output.copy_(function(*inputs)), inputs)
    return output


class Capture(TorchDispatchMode):
    """Runs `forward()` and records it; `replay()` does the same again on what its input tensors hold then, and its outputs
    lie in the same tensors (`output`). nbytes: of the results that stay in memory.

    Raises NotReplayable where the forward reads numbers of tensors on the host or draws random ones.
    """

    def __init__(self, forward):
        super().__init__()
        self._kept, self._steps, program = [], [], []
        self._program = program  # instructions, and (what to call, the tensors it reads)
        self._tensors = []  # all that were read or made
        self._made = {}  # storages of results by address
        self._pinned = set()  # addresses of those that have to stay there
        with torch.no_grad(), _HostReads(), self:
            self.output = forward()
        outputs = _tensors_of(self.output)
        program = fusion.fuse(program, outputs)
        self._free(program, outputs)
        for is_call, steps in itertools.groupby(program, lambda step: isinstance(step, tuple)):
            if is_call:
                self._steps += [call for call, _ in steps]
            else:
                self._pack(list(steps))

    def _free(self, program: list, outputs: list[torch.Tensor]) -> None:
        """Keeps no more memory for results than a replay needs."""
        self._pinned.update(map(_address, outputs))
        others = {_address(x): x for x in self._tensors if _address(x) not in self._made}
        self._tensors.clear()
        buffer, unneeded = memory.share(program, self._made, self._pinned)
        results = [storage for address, storage in self._made.items() if address not in unneeded]
        self._kept += [*others.values(), buffer, *results]
        self.nbytes = sum(storage.nbytes() for storage in results) + (0 if buffer is None else buffer.nbytes)
        self._program = self._made = None

    @torch.no_grad()
    def replay(self):
        torch.get_num_threads()  # gives a new Python thread torch's number of threads
        for step in self._steps:
            step()
        return self.output

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        by_place = func is aten.index.Tensor and all(
            x is None or x.dtype in (torch.int64, torch.int32) for x in args[1]
        )
        if _UNREPEATABLE & set(func.tags) and not by_place:
            raise NotReplayable(f"the forward calls {func}")
        result = func(*args, **kwargs)
        tensors, inputs = _tensors_of(result), _tensors_of((args, kwargs))
        self._tensors += [*inputs, *tensors]
        if not self._is_view(func, args, tensors):
            before = set(map(_address, inputs))
            self._made |= {_address(x): x.untyped_storage() for x in tensors if _address(x) not in before}
            instructions = self._instructions(func, args, kwargs, tensors)
            if instructions is None:
                self.add_call(self._call(func, args, kwargs, tensors), (args, kwargs))
                self._pinned.update(map(_address, tensors))
            else:
                self._program += instructions
                if instructions[-1].op == OPS["CALL"]:  # which has addresses of its own
                    self._pinned.update(map(_address, [*inputs, *tensors]))
        return result

    def add_call(self, call, inputs) -> None:
        """`call()` comes next, which reads the tensors in `inputs`."""
        self._program.append((call, _tensors_of(inputs)))

    @staticmethod
    def _is_view(func, args, tensors) -> bool:
        if func.is_view:
            return True
        if func._schema.is_mutable or len(tensors) != 1:
            return False
        inputs = [x for x in args if isinstance(x, torch.Tensor) and x.layout is torch.strided]  # oneDNN's are not
        return any(x.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr() for x in inputs)

    def _pack(self, instructions: list) -> None:
        for instruction in instructions:
            if instruction.op == OPS["LINEAR"]:
                products = (native_cpu.Product * len(instruction.products))(*instruction.products)
                instruction.weight, instruction.sizes[1] = ctypes.addressof(products), len(products)
                self._kept.append(products)
        packed = (Instruction * len(instructions))(*instructions)
        self._steps.append(functools.partial(_interpret, packed))

    @staticmethod
    def _call(func, args, kwargs, tensors):
        out = getattr(func.overloadpacket, "out", None) if len(tensors) == 1 else None
        if out is not None and _signature(func) == _signature(out)[:-1]:
            return functools.partial(out, *args, **kwargs, out=tensors[0])

        def call():
            results = torch.utils._pytree.tree_leaves(func(*args, **kwargs))
            for tensor, new in zip(tensors, (x for x in results if isinstance(x, torch.Tensor))):
                if new is not tensor:
                    tensor.copy_(new)

        return call

    def _instructions(self, func, args, kwargs, tensors) -> list[Instruction] | None:
        packet = func.overloadpacket
        if packet is torch.ops.hf_efficient.flash_attn_with_kvcache:
            return self._attention(*tensors, *args)
        if interpreter() is None or len(tensors) != 1 or tensors[0].dim() > 4:
            return None
        y = tensors[0]
        if packet is torch.ops.hf_efficient.cpu_linear:
            instruction = self._linear(y, *args)
        elif packet is torch.ops.hf_efficient.cpu_sparse_linear:
            instruction = self._sparse(y, *args)
        elif packet is torch.ops.hf_efficient.contextual_mlp:
            instruction = self._contextual(y, *args)
        elif packet is aten.embedding:
            instruction = self._rows(y, *args[:2])
        elif packet in (aten.mm, aten.addmm):
            bias, x, weight = (None, *args) if packet is aten.mm else args
            instruction = self._dense(y, x, weight.t(), bias) if not kwargs else None
        elif packet is aten.argmax:
            instruction = self._argmax(y, *args)
        elif packet is aten.cat:
            parts, dim = args[0], args[1] if len(args) > 1 else 0
            if any(part.dtype not in _TYPES or part.dim() != y.dim() for part in parts):
                return None
            places = y.split([part.shape[dim] for part in parts], dim)
            return [self._elementwise("COPY", place, [part]) for place, part in zip(places, parts)]
        else:
            instruction = self._pointwise(func, packet, args, kwargs, y)
        return None if instruction is None else [instruction]

    def _pointwise(self, func, packet, args, kwargs, y):
        name, inputs, alpha, beta = None, [x for x in args if isinstance(x, torch.Tensor)], 1.0, 0.0
        if any(x.dtype not in _TYPES for x in (*inputs, y)):
            return None
        if packet in _UNARY:
            name = _UNARY[packet]
        elif packet is aten.copy_ and args[1].shape == y.shape:
            name, inputs = "COPY", [args[1]]
        elif packet is aten.gelu:
            name = "GELU_TANH" if kwargs.get("approximate") == "tanh" else "GELU"
        elif packet is aten.pow and func is aten.pow.Tensor_Scalar:
            name, beta = "POW", float(args[1])
        elif packet in _BINARY and not kwargs.get("rounding_mode") and isinstance(args[0], torch.Tensor):
            name, alpha = _BINARY[packet], float(kwargs.get("alpha", 1))
            if len(inputs) == 1:
                beta = float(args[1])
        elif packet in (aten.mean, aten.sum) and func in (aten.mean.dim, aten.sum.dim_IntList):
            dims = args[0].dim()
            if 0 < dims <= 4 and args[1] and [d % dims for d in args[1]] == [dims - 1]:
                return self._reduction("MEAN" if packet is aten.mean else "SUM", y, args[0], *args[2:3])
        return name and self._elementwise(name, y, inputs, alpha, beta)

    @staticmethod
    def _elementwise(name, y, inputs, alpha=1.0, beta=0.0):
        shape = y.shape
        operands = [_operand(x.expand(shape)) for x in inputs]
        a, b = operands[0], operands[1] if len(operands) == 2 else Operand()
        instruction = Instruction(OPS[name], _sizes(shape), _operand(y), a, b, Operand(), alpha, beta, None, None)
        return instruction.noting(y, inputs)

    def _attention(self, out, lse, *args):
        call = pages.AttentionCall(*args)
        if call.block_table is None:
            call.block_table = torch.arange(len(call.q), dtype=torch.int32)[:, None]
        where = (call.cache_seqlens, torch.int32), (call.block_table, torch.int32), (call.tree_mask, torch.int64)
        where = (*where, (call.quantized_seqlens, torch.int32))
        static = all(x is None or (x.dtype is dtype and x.is_contiguous()) for x, dtype in where)
        scales = call.k_scale, call.v_scale, call.k_min, call.v_min
        if not static or not pages.serves(call.q, call.k_cache, call.v_cache, *scales):
            return None
        instructions = []
        for name in ("q", "k", "v"):
            x = getattr(call, name)
            if x is not None and not x.is_contiguous():
                setattr(call, name, torch.empty_like(x, memory_format=torch.contiguous_format))
                instructions.append(self._elementwise("COPY", getattr(call, name), [x]))
        native, alive = pages.describe(call, out, lse)
        if native is None:
            return None
        self._kept.append((call, native, alive))
        instruction = Instruction(OPS["CALL"], weight=ctypes.addressof(native))
        instruction.linear = ctypes.cast(pages.kernel(call.q.dtype), ctypes.c_void_p).value
        return [*instructions, instruction.noting(out, [call.q, call.k, call.v])]

    def _contextual(self, y, *args):
        call = contextual_mlp.describe(y, *args)
        if call is None:
            return None
        self._kept.append(call)
        instruction = Instruction(OPS["CALL"], weight=ctypes.addressof(call))
        instruction.linear = ctypes.cast(contextual_mlp.kernel(), ctypes.c_void_p).value
        return instruction.noting(y, [x for x in args if isinstance(x, torch.Tensor)])

    @staticmethod
    def _reduction(name, y, x, keepdim=False):
        y = y if keepdim else y.unsqueeze(-1)
        whole = _operand(y.expand(*y.shape[:-1], x.shape[-1]))
        return Instruction(OPS[name], _sizes(x.shape), whole, _operand(x)).noting(y, [x])

    @staticmethod
    def _argmax(y, x, dim=None, keepdim=False):
        if dim is None or dim % x.dim() != x.dim() - 1 or x.dtype not in _TYPES:
            return None
        instruction = Instruction(OPS["ARGMAX"], _sizes(x.shape), a=_operand(x))
        instruction.y.data = y.data_ptr()
        return instruction.noting(y, [x])

    @staticmethod
    def _rows(y, weight, index):
        if index.dtype is not torch.int64 or not all(x.is_contiguous() for x in (y, weight, index)):
            return None
        row_bytes = weight.shape[1] * weight.element_size()
        instruction = Instruction(OPS["ROWS"], _sizes((len(weight), index.numel(), row_bytes)))
        instruction.y.data, instruction.a.data, instruction.b.data = y.data_ptr(), weight.data_ptr(), index.data_ptr()
        return instruction.noting(y, [weight, index])

    @staticmethod
    def _dense(y, x, weight, bias):
        operands = (x, weight) if bias is None else (x, weight, bias)
        if (
            any(t.dtype is not torch.bfloat16 or not t.is_contiguous() for t in operands)
            or len(x) > _DENSE_ROWS
            or (bias is not None and bias.shape != weight.shape[:1])
        ):
            return None
        instruction = Instruction(OPS["DENSE"], _sizes((len(x), *weight.shape)))
        for name, tensor in (("y", y), ("a", x), ("b", weight), ("c", bias)):
            getattr(instruction, name).data = None if tensor is None else tensor.data_ptr()
        instruction.kind = x.data_ptr(), x.shape
        return instruction.noting(y, [x, weight, bias])

    def _linear(self, y, x, packed, scale, zero_point, bias, bits, group, out_features, in_features, rounds_inputs):
        layout = group, out_features, in_features, rounds_inputs
        weight = native_cpu.weight_structure(packed, scale, zero_point, *layout)
        kind = bits, group, rounds_inputs
        return self._product(y, x, bias, weight, native_cpu.kernel(bits).linear, kind, [packed, scale, zero_point])

    def _sparse(self, y, x, values, masks, starts, bias, *layout):
        weight = native_sparse.weight_structure(values, masks, starts, *layout)
        return self._product(y, x, bias, weight, native_sparse.function(), ("sparse",), [values, masks, starts])

    def _product(self, y, x, bias, weight, function, kind, tensors):
        """One of packed weights; weight: its structure and the address of that."""
        if not x.is_contiguous() or not y.is_contiguous() or x.dtype not in (torch.float32, torch.bfloat16):
            return None
        if bias is not None and (bias.dtype is not x.dtype or bias.shape != y.shape[-1:] or not bias.is_contiguous()):
            return None
        structure, address = weight
        self._kept.append(structure)
        self._pinned.update(_address(x) for x in tensors if x is not None)
        instruction = Instruction(OPS["LINEAR"], _sizes((x.numel() // x.shape[-1], 1)))
        instruction.a.data, instruction.a.type = x.data_ptr(), _TYPES[x.dtype]
        instruction.linear = ctypes.cast(function, ctypes.c_void_p).value
        instruction.products = [native_cpu.Product(address, None if bias is None else bias.data_ptr(), y.data_ptr())]
        instruction.kind = x.data_ptr(), x.shape, *kind
        return instruction.noting(y, [x, *tensors, bias])


def _tensors_of(tree) -> list[torch.Tensor]:
    """Those with a storage, unlike oneDNN's weights."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided]


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _signature(func) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]


def _sizes(shape):
    return (ctypes.c_int64 * 4)(*(1,) * (4 - len(shape)), *shape)


def _operand(x: torch.Tensor) -> Operand:
    return Operand(x.data_ptr(), (ctypes.c_int64 * 4)(*(0,) * (4 - x.dim()), *x.stride()), _TYPES[x.dtype])
