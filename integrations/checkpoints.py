"""Saved checkpoints: what must be in one before it is read, and a save that cannot damage what it replaces."""

import contextlib
import os
import re
import shutil
import tempfile
import types

from safetensors import safe_open
from transformers.core_model_loading import WeightRenaming, rename_source_key

from hf_efficient.layers import CompressedWeight


def part_name(name: str, weight: CompressedWeight, part: str) -> str:
    """Full name of the canonical tensor `part` ("qweight", "scale", "zero_point") of the weight called `name`."""
    return (name.removesuffix("weight") if weight.experts is None else name + "_") + part


def check(files, weights: dict[str, tuple[CompressedWeight, bool]], conversions, model) -> None:
    """Compares the headers of safetensors `files` with the tensors that `weights` (full name -> weight) need.

    Raises:
        ValueError: tensors are missing or have another shape; names them, before any weight is read.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    expected = {}
    for name, (weight, _) in weights.items():
        for parameter, shape in weight.shapes().items():
            expected[part_name(name, weight, parameter.removeprefix(weight.prefix))] = shape
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():
                renamed, _ = rename_source_key(key, renamings, [], model.base_model_prefix, expected)
                if renamed in expected:
                    found[renamed] = tuple(opened.get_slice(key).get_shape())
    missing = sorted(set(expected) - set(found))
    if missing:
        raise ValueError(
            f"the quantized checkpoint lacks {len(missing)} of {len(expected)} tensors that its quantization_config "
            f"promises, for example {missing[:3]}: it is incomplete, or its config is that of another model"
        )
    wrong = [f"{k}: {found[k]} instead of {tuple(shape)}" for k, shape in expected.items() if found[k] != tuple(shape)]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors of the quantized checkpoint do not have the shape that its quantization_config and "
            f"architecture give, for example {'; '.join(wrong[:3])}"
        )


def save_aside_then_move(model) -> None:
    """Makes `model.save_pretrained` write into a folder of its own and move the files when all are written, so that a save
    that fails leaves what was there (with `push_to_hub=True` it stays transformers'), and `model.push_to_hub` write a card."""
    model.save_pretrained = types.MethodType(save_pretrained, model)
    model.push_to_hub = types.MethodType(push_to_hub, model)


def restore_save(model) -> None:
    """Gives the model transformers' `save_pretrained` and `push_to_hub` back."""
    model.__dict__.pop("save_pretrained", None)
    model.__dict__.pop("push_to_hub", None)


def push_to_hub(self, repo_id, **options):
    """What `save_aside_then_move` installs; see `hub.push_to_hub`."""
    from hf_efficient.integrations import hub

    return hub.push_to_hub(self, repo_id, **options)


def save_pretrained(self, save_directory, is_main_process=True, *args, **kwargs):
    """What `save_aside_then_move` installs; the name is the method's, by which pickle finds the class's own."""
    original = type(self).save_pretrained
    target = os.path.abspath(os.fspath(save_directory))
    if kwargs.get("push_to_hub") or not is_main_process or os.path.isfile(target):
        return original(self, save_directory, is_main_process, *args, **kwargs)
    with written_aside(target) as aside:
        original(self, aside, is_main_process, *args, **kwargs)


@contextlib.contextmanager
def written_aside(target: str):
    """Gives a folder to write a checkpoint into, whose files are moved to the folder `target` when the block ends without an
    error; shards of an earlier checkpoint are removed then."""
    existed = os.path.isdir(target)
    os.makedirs(target, exist_ok=True)
    aside = tempfile.mkdtemp(prefix=".saving-", dir=target)  # inside: moving must not cross a file system
    try:
        yield aside
        written = os.listdir(aside)
        for name in written:
            os.replace(os.path.join(aside, name), os.path.join(target, name))
        weights = [name for name in written if name.endswith((".safetensors", ".safetensors.index.json"))]
        if weights:
            _remove_stale_weights(target, set(weights))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if not existed and not os.listdir(target):
            os.rmdir(target)


def _remove_stale_weights(target: str, written: set[str]) -> None:
    """Removes shards and indices of an earlier save that the new one did not write."""
    stem = re.escape(re.split(r"-\d{5}-of-|\.safetensors", min(written, key=len))[0])
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    for name in os.listdir(target):
        if ours.fullmatch(name) and name not in written:
            os.remove(os.path.join(target, name))
