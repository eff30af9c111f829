"""Changes of dictionaries, classes and closures are noticed without looking into them."""

import sys
from collections import OrderedDict

import pytest
from helpers import tiny_model

from hf_efficient.generation.model_snapshot import ModelSnapshot
from hf_efficient.generation.replay import object_versions
from hf_efficient.generation.replay.object_versions import ObjectVersions, dictionary_of


pytestmark = pytest.mark.skipif(not object_versions.are_there(), reason="no versions in this Python, or no C++ kernels")


class Thing:
    def __init__(self):
        self.number = 1


class Other(Thing):
    pass


def store_many(thing):
    for number in range(2, 100):  # Python specializes the instruction that stores an attribute
        thing.number = number


CHANGES = {
    "a new key": lambda d, thing: d.__setitem__("new", 1),
    "another value": lambda d, thing: d.__setitem__("number", 5),
    "a key less": lambda d, thing: d.pop("number"),
    "cleared": lambda d, thing: d.clear(),
    "updated": lambda d, thing: d.update(number=5),
    "merged": lambda d, thing: d.__ior__({"number": 5}),
    "by default": lambda d, thing: d.setdefault("new", 1),
    "an attribute": lambda d, thing: setattr(thing, "number", 5),
    "many times": lambda d, thing: store_many(thing),
    "a new attribute": lambda d, thing: setattr(thing, "new", 5),
    "an attribute less": lambda d, thing: delattr(thing, "number"),
    "of the base class": lambda d, thing: object.__setattr__(thing, "number", 5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_dictionaries(name):
    thing = Thing()
    versions = ObjectVersions([vars(thing)])
    before = versions.read()
    assert thing.number == vars(thing)["number"] and vars(thing) == dict(vars(thing)) and versions.read() == before
    CHANGES[name](vars(thing), thing)
    assert versions.read() != before


def test_classes_cells_and_others():
    thing, held, ordered = Thing(), [], OrderedDict(a=1)

    def closure():
        return held

    (cell,) = closure.__closure__
    versions = ObjectVersions([ordered, dictionary_of(Other.__dict__)], [thing], [cell])
    seen = [versions.read()]
    thing.__class__ = Other
    seen.append(versions.read())
    held = {}
    seen.append(versions.read())
    ordered["a"] = 2
    seen.append(versions.read())
    Other.added = 1
    seen.append(versions.read())
    del Other.added
    assert len({*seen, versions.read()}) == 6 and versions.read() == versions.read()
    assert dictionary_of(ordered) is ordered and dictionary_of([]) is None


def test_pythons_without_them_are_known(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert not object_versions.are_there()
    with pytest.raises(ValueError, match="no versions in this Python"):
        ObjectVersions([{}])


@pytest.mark.parametrize("has_versions", [True, False])
def test_a_snapshot_with_and_without_them(has_versions, monkeypatch):
    monkeypatch.setattr(object_versions, "are_there", lambda: has_versions)
    model = tiny_model("llama")
    layer = model.model.layers[0]
    snapshot = ModelSnapshot(model)
    layer.self_attn.scaling = float(layer.self_attn.scaling)  # stored anew, and the same
    assert snapshot.is_unchanged() and snapshot.is_unchanged()
    for change in (
        lambda: setattr(layer.self_attn, "scaling", 3.0),
        lambda: model.config.rope_parameters.update(rope_theta=5.0),
        lambda: setattr(layer, "__class__", type("Another", (type(layer),), {})),
        lambda: model.register_buffer("new", None),
    ):
        snapshot = ModelSnapshot(model)
        change()
        assert not snapshot.is_unchanged()


first = node = Thing()  # a global that functions read: things that lead to each other
for _ in range(6):
    node.next, node.numbers = Thing(), [1, 2]
    node = node.next
node.next = first


def test_what_lies_in_globals_is_the_same_at_each_look():
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x * first.number)
    snapshot = ModelSnapshot(model)
    assert all(snapshot.is_unchanged() for _ in range(5) if [object() for _ in range(1000)])
    first.next.numbers[0] = 5
    assert not snapshot.is_unchanged()


class Registry(list):
    def __init__(self, items, name):
        super().__init__(items)
        self.name = name


@pytest.mark.parametrize("has_versions", [True, False])
def test_empty_containers_of_any_class(has_versions, monkeypatch):
    monkeypatch.setattr(object_versions, "are_there", lambda: has_versions)
    model = tiny_model("llama")
    model.model.layers[0].registry = Registry([], "none")
    snapshot = ModelSnapshot(model)
    assert snapshot.is_unchanged() == snapshot.complete
    model.model.layers[0].registry.append(1)
    assert not snapshot.is_unchanged()
