"""The house holds: imports go one way, importing is cheap and quiet, PyPI's `kernels` stays visible."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]

# room -> rooms it may import (shared DESIGN: "the one direction of imports")
MAY_IMPORT = {
    "flash_paged": set(),
    "efficient_linear": set(),
    "kernels": {"flash_paged", "efficient_linear"},
    "formats": {"kernels"},
    "observers": set(),
    "adapter_files": set(),
    "configs": {"observers", "formats", "methods", "pruning"},
    "methods": {"observers", "kernels", "formats"},
    "pruning": {"observers", "kernels", "formats", "methods", "adapter_files"},
    "layers": {"kernels", "formats"},
    "calibration": {"observers", "configs", "kernels", "formats", "methods", "pruning", "layers"},
    "cache": {"kernels"},
    "generation": {"cache", "configs", "methods", "layers", "kernels", "adapter_files"},
    "evaluation": set(),
    "model_cards": set(),
    "integrations": {
        *("observers", "configs", "kernels", "formats", "methods", "layers", "calibration", "cache", "generation"),
        *("pruning", "evaluation"),
    },
    "cli": {"configs", "evaluation", "integrations"},
}
# of integrations only what writes cards looks at reports, and only another program's entry point calls ours
MAY_ALSO_IMPORT = {
    "integrations/model_card.py": {"evaluation"},
    "integrations/optimum_command/hf_efficient.py": {"cli"},
}
LAYER_FILES = {"layers.py", "linear_classes.py", "experts.py", "bitnet.py"}


def sources() -> dict[Path, str]:
    """Every source file of the package -> the room it stands in."""
    found = {}
    for path in (ROOT / "hf_efficient").rglob("*.py"):
        first = path.relative_to(ROOT / "hf_efficient").parts[0]
        if first != "__init__.py":
            found[path] = "layers" if first in LAYER_FILES else first.removesuffix(".py")
    for folder, room in (("integrations", "integrations"), ("model_cards", "model_cards")):
        found |= {path: room for path in (ROOT / folder).rglob("*.py")}
    for path in (ROOT / "kernels").glob("*/torch-ext/*/**/*.py"):
        found[path] = path.relative_to(ROOT / "kernels").parts[2]
    return found


def package_of(path: Path, room: str) -> list[str]:
    """The package that relative imports in `path` start from."""
    if room in ("flash_paged", "efficient_linear"):
        return ["hf_efficient", "kernels", room]
    parts = path.parent.relative_to(ROOT).parts
    return [*parts] if parts[0] == "hf_efficient" else ["hf_efficient", *parts]


def imported_modules(path: Path, room: str) -> list[tuple[int, str]]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package_of(path, room)
            start = start[: len(start) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            modules.append((node.lineno, module))
            modules += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return modules


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "hf_efficient" or len(parts) == 1:
        return None
    if parts[1] == "kernels" and len(parts) > 2 and parts[2] in ("flash_paged", "efficient_linear"):
        return parts[2]
    room = "layers" if f"{parts[1]}.py" in LAYER_FILES else parts[1]
    return room if room in MAY_IMPORT else None


def test_every_file_stands_in_a_room():
    assert {str(path.relative_to(ROOT)): room for path, room in sources().items() if room not in MAY_IMPORT} == {}


def test_imports_go_one_way():
    wrong = []
    for path, room in sources().items():
        for line, module in imported_modules(path, room):
            target = room_of(module)
            allowed = MAY_IMPORT[room] | MAY_ALSO_IMPORT.get(path.relative_to(ROOT).as_posix(), set())
            if target and target != room and target not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {module}")
    assert wrong == []


def test_kernel_folders_import_only_torch_triton_and_the_standard_library():
    allowed = set(sys.stdlib_module_names) | {"torch", "triton"}
    wrong = []
    for path, room in sources().items():
        if room in ("flash_paged", "efficient_linear"):
            own = f"hf_efficient.kernels.{room}."
            wrong += [
                f"{path.name}:{line}: {module}"
                for line, module in imported_modules(path, room)
                if module.split(".")[0] not in allowed and not f"{module}.".startswith(own)
            ]
    assert wrong == []
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide PyPI's kernels from transformers"


def python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_kernels_is_the_package_from_pypi_in_the_repository_root():
    assert "site-packages" in python("import kernels; print(kernels.__file__)")


def test_import_costs_at_most_300_ms_on_top_of_transformers():
    code = "import transformers, time; t = time.process_time(); import hf_efficient; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) <= 0.3


def test_import_loads_neither_torch_nor_the_quantizers():
    loaded = python("import hf_efficient, sys; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert loaded == "False False"


@pytest.mark.parametrize(
    "order",
    [
        "import hf_efficient; import transformers.modeling_utils",
        "import transformers.modeling_utils; import hf_efficient",
    ],
)
def test_registers_whichever_is_imported_first_and_touches_no_gpu(order):
    code = (
        f"{order}; import torch; from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING; "
        "from transformers import AttentionInterface; import hf_efficient; hf_efficient.register(); "
        "print('efficient_weight_only' in AUTO_QUANTIZER_MAPPING, 'flash_paged' in AttentionInterface(), "
        "torch.cuda.is_initialized())"
    )
    assert python(code) == "True True False"


def test_public_names_are_importable_and_listed():
    import hf_efficient

    for name in hf_efficient.__all__:
        assert getattr(hf_efficient, name) is not None
        assert name in dir(hf_efficient)
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_efficient.__getattr__("no_such_name")


def test_a_model_that_does_not_ask_is_not_changed():
    code = """
import sys
if {plugin}: import hf_efficient
import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                  num_attention_heads=2, num_key_value_heads=1)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(1, 9)[None]
out = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
print(type(model).__mro__[1].__name__, model.config._attn_implementation, type(out.past_key_values).__name__,
      out.sequences.tolist(), torch.stack(out.logits).double().sum().item())
"""
    assert python(code.format(plugin=True)) == python(code.format(plugin=False))


def test_tests_and_benchmarks_share_no_module_name():
    """Both folders stand on sys.path while a benchmark is tested: whichever is imported first would be taken for the other."""
    assert not {p.stem for p in (ROOT / "tests").glob("*.py")} & {p.stem for p in (ROOT / "benchmarks").glob("*.py")}
