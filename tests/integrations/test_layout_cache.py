"""Kept layouts of a saved checkpoint: later loads compute the same bits, whatever becomes of the file."""

import copy
import json
import logging
import os
import shutil
import time
from pathlib import Path

import fresh_processes
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_models import INT4, folder, load, logits
from transformers import AutoConfig

from hf_efficient.integrations import loaded_layouts
from hf_efficient.kernels.linear import lines, native_cpu
from hf_efficient.kernels.native import layout_cache, tiers


pytestmark = pytest.mark.skipif(native_cpu.kernel(4) is None, reason="layouts of the C++ kernels are kept")
MIXED = dict(INT4, quantize_lm_head=True, overrides={"lm_head": {"bits": 8}})


@pytest.fixture
def checkpoint(tmp_path):
    load(folder(dtype=torch.bfloat16), torch.bfloat16, **MIXED).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv(layout_cache.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def packed(monkeypatch):
    """The shapes of all weights that were packed."""
    shapes, pack = [], lines._packed
    monkeypatch.setattr(lines, "_packed", lambda *arguments: shapes.append(arguments[-1]) or pack(*arguments))
    return shapes


def loaded(checkpoint, packed) -> tuple[torch.Tensor, int]:
    """(logits of the checkpoint, the number of weights that were packed for it)."""
    packed.clear()
    return logits(load(checkpoint, torch.bfloat16)), len(packed)


@pytest.fixture
def expected(checkpoint, packed):
    found, count = loaded(checkpoint, packed)
    assert count
    return found, count


def test_the_second_load_maps_what_the_first_packed(checkpoint, expected, kept, packed, tmp_path):
    logits_then, count = expected
    for own in (count, 0, 0):
        found, number = loaded(checkpoint, packed)
        assert torch.equal(found, logits_then) and number == own
    [file] = kept.iterdir()
    model = load(checkpoint, torch.bfloat16)
    data = model.lm_head._layout.packed.data_ptr()
    assert str(file) in open("/proc/self/maps").read() and data % 64 == 0
    file.unlink()  # while it is mapped
    assert torch.equal(logits(model), logits_then)
    assert torch.equal(logits(copy.deepcopy(model)), logits_then)
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def truncated(file, checkpoint):
    os.truncate(file, file.stat().st_size - 1)


def garbage(file, checkpoint):
    file.write_bytes(b"\xff" * 1000)


def empty(file, checkpoint):
    file.write_bytes(b"")


def foreign(file, checkpoint):
    shutil.copy(checkpoint / "model.safetensors", file)


def other_shapes(file, checkpoint):
    with safe_open(file, framework="pt") as opened:
        key = opened.metadata()
    tensors = {name: tensor[:1].contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata=key)


@pytest.mark.parametrize("damage", [lambda file, _: file.unlink(), truncated, garbage, empty, foreign, other_shapes])
def test_a_file_that_is_not_whole_or_not_ours_is_made_anew(damage, checkpoint, expected, kept, packed, caplog):
    loaded(checkpoint, packed)
    [file] = kept.iterdir()
    whole = file.read_bytes()
    damage(file, checkpoint)
    with caplog.at_level(logging.WARNING, "hf_efficient"):
        found, count = loaded(checkpoint, packed)
    assert torch.equal(found, expected[0]) and count == expected[1]
    assert file.read_bytes() == whole and list(kept.iterdir()) == [file]
    assert ("made anew" in caplog.text) == (damage in (truncated, garbage, empty))
    assert loaded(checkpoint, packed)[1] == 0


def test_a_changed_checkpoint_is_packed_again_in_the_same_file(checkpoint, kept, packed):
    """Of the same size and modification time, as reproducible archives have it."""
    loaded(checkpoint, packed)
    [file], weights = kept.iterdir(), checkpoint / "model.safetensors"
    before, tensors = weights.stat(), load_file(weights)
    name = "model.layers.0.mlp.up_proj.qweight"
    save_file({**tensors, name: tensors[name] ^ 255}, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    changed, count = loaded(checkpoint, packed)
    assert count and list(kept.iterdir()) == [file]
    os.environ.pop(layout_cache.VARIABLE)
    assert torch.equal(changed, loaded(checkpoint, packed)[0])


@pytest.fixture
def other(checkpoint, tmp_path):
    """A function that puts another checkpoint's weights into the place of those of `checkpoint`."""
    tensors, name = load_file(checkpoint / "model.safetensors"), "model.layers.0.mlp.up_proj.qweight"
    save_file({**tensors, name: tensors[name] ^ 255}, tmp_path / "other", metadata={"format": "pt"})
    return lambda: os.replace(tmp_path / "other", checkpoint / "model.safetensors")


def before_the_call(monkeypatch, name, action):
    """`action` runs once, before the first call of the function `name` of loaded_layouts."""
    call, actions = getattr(loaded_layouts, name), [action]

    def both(*arguments):
        while actions:
            actions.pop()()
        return call(*arguments)

    monkeypatch.setattr(loaded_layouts, name, both)


def test_of_weights_that_are_replaced_once_they_are_mapped_nothing_is_kept(
    checkpoint, expected, other, kept, packed, monkeypatch, caplog
):
    before_the_call(monkeypatch, "derive_all", other)
    with caplog.at_level(logging.WARNING, "hf_efficient"):
        found, count = loaded(checkpoint, packed)
    assert torch.equal(found, expected[0]) and count == expected[1]
    assert f"{checkpoint} was changed while it was loaded" in caplog.text and not kept.exists()
    changed = loaded(checkpoint, packed)[0]
    monkeypatch.delenv(layout_cache.VARIABLE)
    assert torch.equal(changed, loaded(checkpoint, packed)[0]) and not torch.equal(changed, found)


def test_of_weights_that_are_replaced_before_they_are_mapped_nothing_is_taken(
    checkpoint, expected, other, kept, packed, monkeypatch
):
    loaded(checkpoint, packed)
    [file], take = kept.iterdir(), loaded_layouts.state_of_files
    whole = file.read_bytes()

    def state_then_replaced(files):
        before = take(files)
        other()
        return before

    monkeypatch.setattr(loaded_layouts, "state_of_files", state_then_replaced)
    found, count = loaded(checkpoint, packed)
    monkeypatch.undo()
    assert count == expected[1] and file.read_bytes() == whole
    assert torch.equal(found, loaded(checkpoint, packed)[0]) and not torch.equal(found, expected[0])


def test_a_checkpoint_that_is_removed_once_it_is_mapped_is_loaded(
    checkpoint, expected, kept, packed, monkeypatch, caplog
):
    before_the_call(monkeypatch, "derive_all", lambda: shutil.rmtree(checkpoint))
    with caplog.at_level(logging.WARNING, "hf_efficient"):
        found, count = loaded(checkpoint, packed)
    assert torch.equal(found, expected[0]) and count == expected[1] and not kept.exists()
    assert f"layouts of {checkpoint} are not kept" in caplog.text and "No such file" in caplog.text


def test_a_folder_that_cannot_be_searched_gets_a_warning(checkpoint, expected, kept, packed, monkeypatch, caplog):
    loaded(checkpoint, packed)
    stat = Path.stat

    def refuse(path, **options):
        if kept in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with caplog.at_level(logging.WARNING, "hf_efficient"):
        found, count = loaded(checkpoint, packed)
    assert torch.equal(found, expected[0]) and count == expected[1]
    assert "Permission denied" in caplog.text


def test_samples_tell_files_apart_whose_times_are_the_same(tmp_path):
    def samples(content):
        (tmp_path / "weights").write_bytes((2).to_bytes(8, "little") + b"{}" + content)
        return layout_cache._state(str(tmp_path / "weights")).rsplit(b"(", 1)[0]

    for place in (0, 500_000, 984_000):
        changed = bytearray(1_000_000)
        changed[place : place + 16_000] = b"x" * 16_000
        assert samples(bytes(1_000_000)) != samples(changed)
    assert samples(b"short") != samples(b"other")


def two_caches(checkpoint):
    """Of one checkpoint, with a tensor that each has made."""
    files = [str(checkpoint / "model.safetensors")]
    caches = [layout_cache.LayoutCache(files, layout_cache.state(files), ()) for _ in range(2)]
    for cache in caches:
        with cache.of("layer"):
            layout_cache.kept((3,), torch.float32, lambda: torch.ones(3))
    return caches


def test_an_equal_file_is_not_written_again_and_partial_files_of_yesterday_go(checkpoint, kept):
    first, second = two_caches(checkpoint)
    kept.mkdir()
    old, young, others = (kept / name for name in (".layouts-1.partial", ".layouts-2.partial", ".data.partial"))
    for path, days in ((old, 2), (young, 0.5), (others, 2)):
        path.write_bytes(b"")
        os.utime(path, (time.time() - days * 86400,) * 2)
    first.finish()
    written = first.path.stat()
    second.finish()
    assert os.path.samestat(written, second.path.stat()) and written.st_mtime_ns == second.path.stat().st_mtime_ns
    assert {*kept.iterdir()} == {young, others, first.path}
    with safe_open(first.path, framework="pt") as opened:
        assert opened.metadata()["checkpoint"] == str(checkpoint)


def test_a_file_of_another_user_is_not_read(checkpoint, expected, kept, packed, monkeypatch, caplog):
    loaded(checkpoint, packed)
    [file] = kept.iterdir()
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file, metadata=metadata)
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with caplog.at_level(logging.WARNING, "hf_efficient"):
        found, count = loaded(checkpoint, packed)
    assert torch.equal(found, expected[0]) and count == expected[1]
    assert f"{file} holds no layouts that can be read, they are made anew: it belongs to another user" in caplog.text
    assert file.stat().st_uid == os.getuid()


def test_sources_that_name_and_derive_layouts_have_a_part_in_the_key(monkeypatch):
    read = set()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.add(path.resolve().name) or b"")
    layout_cache._sources.__wrapped__()
    assert {"__init__.py", "layers.py", "experts.py", "embeddings.py", "loaded_layouts.py", "layout_cache.py"} <= read
    assert {"lines.py", "affine.py", "tiers.py"} <= read


def test_another_tier_another_scheme_and_other_sources_have_their_own(checkpoint, expected, kept, packed, monkeypatch):
    loaded(checkpoint, packed)
    others = [name for name in tiers.present(tiers.cpu_features()) if name not in ("torch", tiers.tier().name)]
    if others:
        with monkeypatch.context() as patch:
            patch.setenv(tiers.VARIABLE, others[0])
            assert loaded(checkpoint, packed)[1] == expected[1] and len(list(kept.iterdir())) == 2
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["int8_on_cpu"] = True
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert loaded(checkpoint, packed)[1] == expected[1] and loaded(checkpoint, packed)[1] == 0
    count = len(list(kept.iterdir()))
    monkeypatch.setattr(layout_cache, "_sources", lambda: "another version")
    assert loaded(checkpoint, packed)[1] == expected[1] and len(list(kept.iterdir())) == count


def test_nothing_is_kept_of_weights_that_no_file_holds(checkpoint, kept):
    load(folder(dtype=torch.bfloat16), torch.bfloat16, **MIXED)
    assert not kept.exists()
    kind = type(load(checkpoint, torch.bfloat16))
    before, tensors = set(kept.iterdir()), load_file(checkpoint / "model.safetensors")
    config = AutoConfig.from_pretrained(checkpoint)
    kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.bfloat16)
    assert set(kept.iterdir()) == before


def test_a_folder_that_cannot_be_written_gets_a_warning(checkpoint, expected, kept, packed, monkeypatch, caplog):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(layout_cache, "atomic_write", refuse)  # tests may run as root, who may write anywhere
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "hf_efficient"):
            found, count = loaded(checkpoint, packed)
        assert torch.equal(found, expected[0]) and count == expected[1]
    assert f"layouts are not kept in {kept} (${layout_cache.VARIABLE}): " in caplog.text


@pytest.mark.parametrize("below", ["", "below"])
def test_what_is_no_folder_is_refused_before_loading(below, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(layout_cache.VARIABLE, str(tmp_path / "file" / below))
    with pytest.raises(ValueError, match=r"\$HF_EFFICIENT_LAYOUT_CACHE is '.*file.*': .*/file is no folder"):
        load(checkpoint)


@pytest.mark.slow
def test_two_processes_make_it_at_once(checkpoint, expected, kept, packed):
    program = """
import os, sys, torch
import hf_efficient
from transformers import AutoModelForCausalLM
other = os.fork()
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
assert not other or os.waitpid(other, 0)[1] == 0
"""
    fresh_processes.run(["-c", program, checkpoint], check=True)
    assert len(list(kept.iterdir())) == 1
    found, count = loaded(checkpoint, packed)
    assert torch.equal(found, expected[0]) and count == 0
