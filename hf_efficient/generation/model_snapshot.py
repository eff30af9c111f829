"""What the forward of a model depends on besides its inputs, recorded so that a later change is noticed."""

import contextvars
import enum
import functools
import inspect
import logging
import os
import re
import sys
import types
import weakref
from collections import deque
from operator import attrgetter, itemgetter

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from hf_efficient.generation.replay import object_versions
from hf_efficient.generation.replay.object_versions import ObjectVersions
from hf_efficient.integrations.transformers_loop import LEFT_BY_PROMPTS


_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented), enum.Enum,
    os.PathLike, re.Pattern, type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket, inspect.Signature,
)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_UNUSED_BY_FORWARDS = (GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin, logging.Logger, weakref.ref)
_WRAPPERS = staticmethod, classmethod, property, functools.cached_property
_MAX_ITEMS = 1000  # of a user's global container that is looked into
_MAX_OBJECTS = 100_000  # comparing more would take longer than a forward
_IS_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: a class that Python code made
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_READ_BY_FORWARDS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_FOREIGN = frozenset(("torch", "numpy", "builtins", "functools", "contextlib", "collections", "typing", "logging"))
_LIBRARIES = _FOREIGN | {"transformers", "hf_efficient", "accelerate", "peft"}


class ModelSnapshot:
    """The state of `model` when this was made; `is_unchanged` says whether a forward would still compute the same.

    It covers the module tree; the modules' classes with the functions of their forwards and the global names that these
    read, of user code with what lies in them (`_glance`); attributes (numbers, strings, functions, and the contents of
    lists, dictionaries and plain objects); the config; parameters and buffers (identity, address, layout, and torch's
    counter of changes in place); and autocast. It does not see changes in place through `Tensor.data`.

    complete: False where something cannot be inspected, such as a NumPy array or an object of a C extension, and where
        the model can be reached from its own parts. In the second case this holds no references, as they would keep the
        model alive, and `is_unchanged` is False.
    """

    def __init__(self, model: nn.Module):
        self.complete, self._reaches_itself = True, False
        self._model = weakref.ref(model)
        self._type = type(model)
        self._seen: dict[int, object] = {}  # holds references while this is made, so that no id is reused
        self._live, self._frozen = [], []  # containers and copies of them
        self._empty = []  # containers that were empty
        self._objects, self._types = [], []
        self._items, self._values = [], []  # (container, key) -> value that must stay the same object
        self._cells, self._contents = [], []  # of closures
        self._names: dict[int, tuple[dict, dict]] = {}  # id -> a namespace, and the names in it that functions read
        self._users_names: list[tuple[dict, str, object]] = []  # (namespace, name, `_glance` at its value)
        self._functions: list[tuple[types.FunctionType, object]] = []  # the user's, with `_parts` of each
        self._tensors: list[torch.Tensor] = []
        self._own = self._attributes(model)
        self._visit_module(model)
        del self._seen
        self._reads = [(itemgetter(*names), space, tuple(names.values())) for space, names in self._names.values()]
        try:
            self._versions = self._read_versions()
        except RuntimeError:  # tensor subclasses without storage
            self._tensors, self._versions, self.complete = [], [[]] * len(_OF_TENSORS), False
        self._settings = _settings()
        self._note_versions(model)
        if self._reaches_itself:
            for held in (self._live, self._frozen, self._empty, self._objects, self._items, self._values, self._cells):
                held.clear()
            self._own, self._names, self._reads, self._contents = {}, {}, [], []
            self._users_names, self._functions = [], []
            self._object_versions, self._dictionaries = None, []
            self._others, self._copies, self._other_empty, self._other_items = [], [], [], []

    def is_unchanged(self) -> bool:
        model = self._model()
        if self._reaches_itself:
            return False
        try:
            return (
                type(model) is self._type
                and self._contents_are_same(model)
                and self._globals_are_same()
                and all(_glance(space[name]) == glance for space, name, glance in self._users_names)
                and all(_parts(function) == parts for function, parts in self._functions)
                and self._read_versions() == self._versions
                and _settings() == self._settings
            )
        except Exception:  # a name is gone, or a tensor was replaced by something that cannot be compared with it
            return False

    def sees_changes(self) -> bool:
        """Whether something has changed that can be seen."""
        return not (self._reaches_itself or self.is_unchanged())

    @staticmethod
    def _attributes(model) -> dict:
        """The model's own attributes. Its bound methods, which keep it alive, are replaced by functions."""
        return {
            name: value.__func__ if getattr(value, "__self__", None) is model else value
            for name, value in vars(model).items()
        }

    def _note_versions(self, model: nn.Module) -> None:
        """Notes the numbers of all dictionaries: what lies in one is compared only where its number has changed."""
        self._object_versions = self._global_versions = None
        self._others, self._copies, self._other_empty, self._other_items = [], [], [], []
        if not object_versions.are_there():
            return
        self._dictionaries = []  # which must live on
        for live, frozen in [*zip(self._live, self._frozen), *((empty, None) for empty in self._empty)]:
            dictionary = object_versions.dictionary_of(live)
            if dictionary is not None:
                self._dictionaries.append(dictionary)
            elif frozen is None:
                self._other_empty.append(live)
            else:
                self._others.append(live)
                self._copies.append(frozen)
        self._other_items = [
            (container, key, value)
            for (container, key), value in zip(self._items, self._values)
            if not isinstance(container, dict)
        ]
        self._object_versions = ObjectVersions([vars(model), *self._dictionaries], self._objects, self._cells)
        self._global_versions = ObjectVersions([space for _, space, _ in self._reads])
        self._attributes_at = id(vars(model))
        self._objects_before, self._globals_before = self._object_versions.read(), self._global_versions.read()

    def _contents_are_same(self, model: nn.Module) -> bool:
        now = None
        if self._object_versions is not None and id(vars(model)) == self._attributes_at:
            now = self._object_versions.read()
            if now == self._objects_before:
                same = self._others == self._copies and not any(self._other_empty)
                return same and all(container[key] is value for container, key, value in self._other_items)
        same = (
            _are_same(self._attributes(model), self._own)
            and not any(self._empty)
            and self._live == self._frozen
            and list(map(type, self._objects)) == self._types
            and all(container[key] is value for (container, key), value in zip(self._items, self._values))
            and all(cell.cell_contents is held for cell, held in zip(self._cells, self._contents))
        )
        if same and now is not None:
            self._objects_before = now
        return same

    def _globals_are_same(self) -> bool:
        now = self._global_versions and self._global_versions.read()
        if now is not None and now == self._globals_before:
            return True
        same = all(_same(read(space), values) for read, space, values in self._reads)
        if same:
            self._globals_before = now
        return same

    def _read_versions(self) -> list[list]:
        return [list(map(read, self._tensors)) for read in _OF_TENSORS]

    def _visit(self, value) -> None:
        """Notes whatever a forward can reach from `value`. What cannot be followed leaves `complete` False."""
        if isinstance(value, _ATOMS) or isinstance(value, _UNUSED_BY_FORWARDS) or id(value) in self._seen:
            return
        if value is self._model() or len(self._seen) > _MAX_OBJECTS:
            self.complete, self._reaches_itself = False, self._reaches_itself or value is self._model()
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
        elif isinstance(value, nn.Module):
            self._visit_module(value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__)
            self._visit(value.__func__)
        elif isinstance(value, functools.partial):
            self._visit([value.func, value.args, value.keywords])
        elif isinstance(value, functools._lru_cache_wrapper):
            self._visit(value.__wrapped__)
        elif isinstance(value, _CONTAINERS):
            self._hold(value)
        elif _is_ours(value):  # layouts of weights are immutable
            return
        elif hasattr(value, "__dict__") and not _has_state_in_c(type(value)):
            self._note_class(value)
            self._hold(vars(value))
        else:
            self.complete = False

    def _visit_module(self, module: nn.Module) -> None:
        self._note_class(module)
        is_root, is_ours = module is self._model(), _is_ours(module)
        is_compressed = is_ours and hasattr(module, "compressed_weights")
        attributes = self._own if is_root else _read(vars(module))
        if not is_root:
            has_others = len(attributes) < len(vars(module))
            self._live.append(_ReadAttributes(module) if has_others else vars(module))
            self._frozen.append(attributes)
        for name in _READ_BY_FORWARDS:
            self._hold(attributes[name], visit=not is_compressed)
        if is_compressed:  # its forward reads the bias and layouts, which are derived once
            self._visit(attributes["_parameters"].get("bias"))
        for name, value in attributes.items():
            if name not in _OF_EVERY_MODULE and not (is_ours and name.startswith("_")):
                self._hold_item(attributes if is_root else vars(module), name, value)

    def _hold(self, container, visit: bool = True) -> None:
        """The contents of `container` must stay the same."""
        if not container:
            self._empty.append(container)
            return
        self._live.append(container)
        self._frozen.append(dict(container) if isinstance(container, dict) else type(container)(container))
        if not visit:
            return
        if isinstance(container, (set, frozenset)):
            items = ((None, value) for value in container)
        else:
            items = list(container.items()) if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            self._hold_item(container, key, value)

    def _hold_item(self, container, key, value) -> None:
        if isinstance(value, _ATOMS) or isinstance(value, nn.Module):  # the comparison of the containers is enough
            self._visit(value)
            return
        if isinstance(value, _UNUSED_BY_FORWARDS):
            return
        if key is not None and not (isinstance(value, torch.Tensor) and value.numel() > 1):
            self._items.append((container, key))
            self._values.append(value)
        self._visit(value)

    def _note_class(self, value) -> None:
        if value is not self._model():
            self._objects.append(value)
            self._types.append(type(value))
        for cls in type(value).__mro__:
            if id(cls) in self._seen or cls is object:
                continue
            self._seen[id(cls)] = cls
            self._live.append(cls.__dict__)
            self._frozen.append(dict(cls.__dict__))
            if _is_foreign(cls) or cls.__module__.startswith(_ENGINE):
                continue
            if not isinstance(value, nn.Module) and not _is_users(cls):
                continue
            for member in list(cls.__dict__.values()):
                for name in ("__func__", "fget", "func"):  # of static and class methods, and of properties
                    if isinstance(member, _WRAPPERS):
                        member = getattr(member, name, member)
                if isinstance(member, (types.FunctionType, functools.partial)):
                    self._visit(member)

    def _visit_function(self, function: types.FunctionType) -> None:
        """Notes the cells of `function`, and the global names that it reads unless it is another library's."""
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._cells.append(cell)
            self._contents.append(content)
            if not isinstance(content, type):
                self._visit(content)
        if _is_foreign(function):
            return
        names, space, is_users = _names_of(function.__code__), function.__globals__, _is_users(function)
        if is_users:
            self._functions.append((function, _parts(function)))
        for name in names:
            if name not in space:
                continue
            value = space[name]
            self._name(space, name, value, is_users)
            if isinstance(value, types.ModuleType):
                for attribute in names:
                    if attribute in vars(value):
                        self._name(vars(value), attribute, vars(value)[attribute], is_users)

    def _name(self, space: dict, name: str, value, is_users: bool) -> None:
        self._names.setdefault(id(space), (space, {}))[1][name] = value
        if isinstance(value, (types.FunctionType, functools.partial)) and not _is_foreign(value):
            self._visit(value)
        if is_users and not isinstance(glance := _glance(value), int):
            self._users_names.append((space, name, glance))


class _ReadAttributes:
    """Equal to what `_read` gives of the attributes of `module`, as long as they stay what they are."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __eq__(self, other: dict) -> bool:
        return _read(vars(self.module)) == other


def _read(attributes: dict) -> dict:
    """The attributes of a module that steps after a prompt read."""
    return {name: value for name, value in attributes.items() if name not in LEFT_BY_PROMPTS}


_ENGINE = ("transformers.modeling_utils", "transformers.generation", "transformers.integrations", "transformers.utils")


def _is_ours(value) -> bool:
    return type(value).__module__.startswith("hf_efficient.")


def _is_foreign(value) -> bool:
    return _package(value) in _FOREIGN


def _is_users(value) -> bool:
    """Whether a function or class is code of the user's, or of a checkpoint."""
    return _package(value) not in _LIBRARIES | sys.stdlib_module_names


def _package(value) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _glance(value, depth: int = 3):
    """The contents of a global of the user's, down to `depth` nested containers and plain objects. Other objects are
    represented by their id, so that nothing is kept alive."""
    if isinstance(value, torch.Tensor):
        return id(value), value.data_ptr(), value._version, value.shape
    if isinstance(value, contextvars.ContextVar):
        return id(value), _glance(value.get(None), depth)
    is_plain = _is_users(value) if isinstance(value, type) else _package(type(value)) not in _LIBRARIES
    is_plain = is_plain and not isinstance(value, (nn.Module, types.ModuleType, *_UNUSED_BY_FORWARDS))
    if is_plain and depth and len(contents := dict(getattr(value, "__dict__", {}))) in range(1, _MAX_ITEMS + 1):
        return id(value), _glance(contents, depth)
    if isinstance(value, _CONTAINERS) and depth and len(value) <= _MAX_ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(_inside(key, 0), _inside(item, depth - 1)) for key, item in items]
    return id(value)


def _inside(value, depth: int):
    return value if isinstance(value, _ATOMS) and not isinstance(value, type) else _glance(value, depth)


def _parts(function: types.FunctionType) -> tuple:
    """What of a function can be replaced."""
    values = function.__defaults__, function.__kwdefaults__, function.__dict__
    return function.__code__, *(_glance(value or ()) for value in values)


@functools.cache
def _has_state_in_c(cls: type) -> bool:
    """Whether objects of a class have state outside their `__dict__`: in slots, or in a C extension."""
    return any(
        "__slots__" in vars(base) and vars(base)["__slots__"] or not base.__flags__ & _IS_HEAP_TYPE
        for base in cls.__mro__[:-1]
    )


@functools.cache
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """The global and attribute names that a function and those defined in it read."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_of(constant)
    return tuple(dict.fromkeys(names))


def _are_same(attributes: dict, before: dict) -> bool:
    return attributes == before and all(
        attributes[name] is value or isinstance(value, _ATOMS) for name, value in before.items()
    )


def _same(read, values: tuple) -> bool:
    return read is values[0] if len(values) == 1 else read == values


_OF_TENSORS = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, *map(attrgetter, ("dtype", "_version"))


def _settings() -> tuple:
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return autocast, torch.get_default_dtype()
