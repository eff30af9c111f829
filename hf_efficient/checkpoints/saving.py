"""A save that cannot damage what it replaces: a folder of a checkpoint holds the old one, the new one, or none that loads.

Every file is written into a hidden folder inside the target first. Then names change, in this order:

1. the entry points of the old checkpoint (`model.safetensors`, `model.safetensors.index.json`) leave the folder;
2. its shards leave, its other files are replaced, and the new shards arrive, under names that the folder did not have;
3. the new entry point arrives.

A process that is killed before 1 leaves the old checkpoint, one that is killed after 3 the new one. Between them
`from_pretrained` finds no entry point and says so; the files of both lie whole in the hidden folder `.saving-*`.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
import types


_WEIGHTS = re.compile(r"(?P<stem>.+?)(?P<shard>(?:-[0-9a-f]{8})?-\d{5}-of-\d{5})?\.safetensors")
_INDEX = re.compile(r"(?P<stem>.+?)\.safetensors\.index(?P<variant>\..+)?\.json")


def save_aside_then_move(model) -> None:
    """Makes `model.save_pretrained` write through `written_aside` (with `push_to_hub=True` it stays transformers'), and
    `model.push_to_hub` write a card."""
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
    """Gives an empty folder to write a checkpoint into, which replaces the checkpoint of the same name ("model", or
    "model.fp16" of a variant) in the folder `target` when the block ends without an error. Other files of `target` stay. An
    error leaves `target` as it was."""
    existed = os.path.isdir(target)
    os.makedirs(target, exist_ok=True)
    aside = tempfile.mkdtemp(prefix=".saving-", dir=target)  # inside: moving must not cross a file system
    new, old = os.path.join(aside, "new"), os.path.join(aside, "old")
    replaced = False
    try:
        os.mkdir(new)
        yield new
        _rename_shards(new, os.listdir(target))
        _replace(target, new, old)
        replaced = True
    finally:
        if replaced or not os.path.exists(old):  # otherwise it is the only copy of what was there
            shutil.rmtree(aside, ignore_errors=True)
        if not existed and not os.listdir(target):
            os.rmdir(target)


def _replace(target: str, new: str, old: str) -> None:
    """Moves the files of `new` into `target`, and what they replace into the new folder `old`. An error puts everything back
    and removes `old`."""
    written, undo = os.listdir(new), []
    stems = {_checkpoint(name)[0] for name in written if _checkpoint(name)}
    present = [name for name in os.listdir(target) if _checkpoint(name) and _checkpoint(name)[0] in stems]

    def move(source: str, destination: str) -> None:
        os.rename(source, destination)
        undo.append((destination, source))

    os.mkdir(old)
    try:
        for name in sorted(present, key=_is_shard):  # entry points first
            move(os.path.join(target, name), os.path.join(old, name))
        for name in sorted(written, key=lambda name: (_is_entry_point(name), _is_shard(name))):
            source, place, kept = (os.path.join(folder, name) for folder in (new, target, old))
            if os.path.isdir(place):
                move(place, kept)
            elif os.path.exists(place):  # replaced, never absent: a folder without its config is read as something else
                shutil.copy2(place, kept)
                undo.append((kept, place))
                os.replace(source, place)
                continue
            move(source, place)
    except BaseException:
        for source, destination in reversed(undo):
            os.replace(source, destination)
        shutil.rmtree(old, ignore_errors=True)
        raise


def _checkpoint(name: str) -> tuple[str, bool] | None:
    """(which checkpoint the file `name` belongs to, whether it is a shard), None of a file that holds no weights."""
    if index := _INDEX.fullmatch(name):
        return index["stem"] + (index["variant"] or ""), False
    weights = _WEIGHTS.fullmatch(name)
    return weights and (weights["stem"], weights["shard"] is not None)


def _is_shard(name: str) -> bool:
    return bool(_checkpoint(name) and _checkpoint(name)[1])


def _is_entry_point(name: str) -> bool:
    """Whether `from_pretrained` finds the weights by `name`: an index, or weights in one file."""
    return bool(_checkpoint(name)) and not _is_shard(name)


def _rename_shards(new: str, taken: list[str]) -> None:
    """Gives the shards in the folder `new` other names, in the index too, where `taken` has one of theirs: whoever reads the
    old index meanwhile finds an old shard or none, never a new one."""
    shards = [name for name in os.listdir(new) if _is_shard(name)]
    if not set(shards) & set(taken):
        return
    token = secrets.token_hex(4)
    names = {name: re.sub(r"(-\d{5}-of-\d{5}\.safetensors)$", rf"-{token}\1", name) for name in shards}
    for name in filter(_INDEX.fullmatch, os.listdir(new)):
        path = os.path.join(new, name)
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        index["weight_map"] = {key: names[shard] for key, shard in index["weight_map"].items()}
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for name, other in names.items():
        os.rename(os.path.join(new, name), os.path.join(new, other))
