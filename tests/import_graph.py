"""The import graph of the package: which room may import which, and how tangled it is.

`python tests/import_graph.py` prints the counts and ends with status 1 where a rule is broken; `make quality` runs it.
A room is a folder or a file of the package; a file belongs to the room with the longest name that its own begins with.
"""

import ast
import functools
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
MOST_IMPORTS = 9  # of ours, in one file
# the longest chain of imports inside a room; the topmost file of the cache holds a `PagedCache` beside cross attention,
# and in generation the kinds of `RaggedModel` stand between it and the drafters
MOST_FLOORS = {"cache": 8, "generation": 12}

_SHELF = {"flash_paged": "kernels/flash-paged", "efficient_linear": "kernels/efficient-linear"}

# imported by every room, import only each other
LEAVES = (
    "files",
    "adapter_files",
    "byte_sizes",
    "tensor_files",
    "integrations.transformers_compat",
    "integrations.transformers_insides",
    "integrations.transformers_layers",
    "integrations.transformers_loading",
    "integrations.transformers_loop",
    "integrations.transformers_mtp",
    "integrations.transformers_releases",
)

# room -> the rooms it may import, besides itself and the leaves
ROOMS = {
    "files": "",
    "adapter_files": "",
    "byte_sizes": "",
    "tensor_files": "",
    "integrations.transformers_compat": "",
    "integrations.transformers_insides": "",
    "integrations.transformers_layers": "",
    "integrations.transformers_loading": "",
    "integrations.transformers_loop": "",
    "integrations.transformers_mtp": "",
    "integrations.transformers_releases": "",
    "kernels.flash_paged": "",
    "kernels.efficient_linear": "",
    "kernels": "",
    "kernels.native": "",
    "kernels.replay": "kernels kernels.native",
    "kernels.attention": "kernels kernels.native kernels.replay kernels.flash_paged",
    "kernels.linear": "kernels kernels.native kernels.replay kernels.efficient_linear",
    "formats": "kernels kernels.linear",
    "layers": "kernels.linear kernels.replay formats",
    "observers": "kernels",
    "methods": "observers kernels formats",
    "pruning": "observers kernels.linear formats methods",
    "configs": "observers formats methods pruning",
    "calibration": "observers configs kernels formats methods pruning layers evaluation",
    "cache": "cache.bookkeeping cache.eviction cache.stores kernels.attention",
    "cache.bookkeeping": "kernels.attention",
    "cache.eviction": "",
    "cache.stores": "cache.bookkeeping cache.eviction kernels.attention",
    "generation": "cache cache.bookkeeping kernels kernels.attention generation.speculation generation.replay",
    "generation.speculation": "",
    # kernels.attention and kernels.linear: the fused operators that captures on a GPU use
    "generation.replay": "cache cache.bookkeeping cache.stores kernels kernels.replay kernels.attention kernels.linear",
    # kernels.attention: layers of drafters that keep keys and values of their own
    "generation.drafters": "generation generation.speculation generation.replay cache.bookkeeping configs methods "
    "layers kernels.replay kernels.attention",
    "generation.speculation.options": "generation.speculation generation.drafters",
    "generation.decode": "generation generation.speculation generation.speculation.options generation.replay "
    "generation.drafters cache",
    "generation.training": "generation generation.speculation.options generation.drafters generation.decode observers",
    "generation.training.train_draft": "generation generation.drafters generation.training compression",
    # kernels.linear: on a CPU the experts that a forward reads are one product
    "expert_offload": "layers kernels.replay kernels.linear",
    "planning.model_trace": "layers",
    "checkpoints": "configs layers",
    "targets": "configs layers planning.model_trace checkpoints",
    "integrations": "configs layers formats kernels.attention kernels.native calibration cache generation "
    "generation.decode generation.replay generation.speculation generation.speculation.options targets checkpoints "
    "integrations.hub",
    "integrations.hub": "integrations.model_card integrations.folder_record integrations.folder_kinds "
    "integrations.folder_card integrations.evaluation_card",
    "integrations.evaluation_card": "integrations.model_card",
    "integrations.folder_card": "integrations.model_card integrations.folder_kinds",
    "integrations.folder_kinds": "integrations.model_card integrations.folder_record",
    "integrations.folder_record": "integrations.model_card",
    "integrations.model_card": "configs evaluation",
    "integrations.optimum_command": "cli",
    "checkpoints.adopt": "configs layers formats kernels.linear checkpoints integrations",
    "checkpoints.export": "configs layers formats kernels.linear checkpoints checkpoints.adopt integrations",
    "compression": "configs layers formats observers pruning calibration integrations methods evaluation kernels "
    "kernels.native kernels.replay kernels.linear kernels.attention cache.stores generation generation.decode "
    "generation.training",
    "planning": "configs calibration layers formats methods kernels.native kernels.linear cache cache.stores "
    "planning.model_trace evaluation targets integrations",
    "planning.model_report": "layers kernels.attention generation generation.decode integrations",
    "prompts": "",  # works with any model, compressed by this package or not
    "evaluation": "kernels",
    "model_cards": "",
    "cli": "configs evaluation calibration checkpoints checkpoints.export compression planning integrations "
    "integrations.hub integrations.model_card integrations.folder_record integrations.evaluation_card",
}
_IN_LAYERS = ("layers", "dense_layers", "embeddings", "experts", "bit_linear")
_IN_DECODE = tuple(  # they import drafters
    f"generation.{name}" for name in ("request", "request_drafts", "request_draft_model", "served", "loop")
)


@functools.cache
def sources() -> dict[str, Path]:
    """Module of the package, without "hf_efficient." -> its file."""
    folders = {"": "hf_efficient", "integrations": "integrations", "model_cards": "model_cards"}
    folders |= {f"kernels.{name}": f"{folder}/torch-ext/{name}" for name, folder in _SHELF.items()}
    found = {}
    for prefix, folder in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [*filter(None, prefix.split(".")), *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if name:
                found[name] = path
    return found


def room_of(module: str) -> str | None:
    """The room of a module; None where it stands in none."""
    if module.split(".")[0] in _IN_LAYERS:
        return "layers"
    if module in _IN_DECODE:
        return "generation.decode"
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS), None)


@functools.cache
def imports() -> dict[str, dict[str, int]]:
    """Module -> {module of ours that it imports, anywhere in its file: line}."""
    modules = sources()
    return {name: _imports_of(name, path, modules) for name, path in modules.items()}


def _imports_of(name: str, path: Path, modules: dict[str, Path]) -> dict[str, int]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name.removeprefix("hf_efficient.") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}".removeprefix("hf_efficient.") for alias in node.names]
            targets = [name if name in modules else module.removeprefix("hf_efficient.") for name in names]
        else:
            continue
        found |= {target: node.lineno for target in targets if target in modules and target != name}
    return found


def arrows_up() -> list[str]:
    """Imports that the directions of `ROOMS` do not allow."""
    wrong = []
    for module, targets in imports().items():
        room = room_of(module)
        allowed = {room, *LEAVES, *ROOMS[room].split()}
        for target, line in targets.items():
            if room_of(target) not in allowed:
                wrong.append(f"{sources()[module].relative_to(ROOT)}:{line}: {room} imports {target}")
    return wrong


def circles() -> list[list[str]]:
    """Modules that import each other, at any distance."""
    reached = {module: set(targets) for module, targets in imports().items()}
    for middle in reached:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    return [sorted({module, *(t for t in targets if module in reached[t])}) for module, targets in reached.items()
            if module in targets]  # fmt: skip


def floors(room: str) -> int:
    """Files of the longest chain of imports inside a room and the rooms in it."""

    @functools.cache
    def height(module: str) -> int:
        inside = (target for target in imports()[module] if target.split(".")[0] == room)
        return 1 + max(map(height, inside), default=0)

    return max(height(module) for module in imports() if module.split(".")[0] == room)


def crowded() -> dict[str, int]:
    """Modules that import more than `MOST_IMPORTS` of ours, packages (which list what they hold) left out."""
    counts = {m: len(targets) for m, targets in imports().items() if sources()[m].name != "__init__.py"}
    return {module: count for module, count in counts.items() if count > MOST_IMPORTS}


def broken_rules() -> list[str]:
    """What is wrong with the graph, one line each."""
    wrong = [f"{module} stands in no room" for module in sources() if room_of(module) is None]
    if wrong:
        return wrong
    wrong += arrows_up() + [f"circle: {', '.join(circle)}" for circle in circles()]
    wrong += [f"{module} imports {count} files of ours: at most {MOST_IMPORTS}" for module, count in crowded().items()]
    for room, most in MOST_FLOORS.items():
        if floors(room) > most:
            wrong.append(f"{room} has {floors(room)} floors: at most {most}")
    return wrong


if __name__ == "__main__":
    wrong = broken_rules()
    print(*wrong, sep="\n", end="\n" if wrong else "")
    heights = ", ".join(f"{room} {floors(room)}" for room in ("cache", "generation", "kernels"))
    widest = max(len(targets) for m, targets in imports().items() if sources()[m].name != "__init__.py")
    print(f"{len(sources())} files, {sum(map(len, imports().values()))} imports, {len(circles())} files in circles, "
          f"{len(arrows_up())} arrows up, floors: {heights}, most imports of one file: {widest}")  # fmt: skip
    sys.exit(bool(wrong))
