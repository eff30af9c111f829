"""The house holds: imports go one way, importing is cheap and quiet, PyPI's `kernels` stays visible, lines fit."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import fresh_processes
import import_graph
import pytest


ROOT = Path(__file__).resolve().parents[1]


def test_the_import_graph_keeps_its_rules():
    assert import_graph.broken_rules() == []


def test_kernel_folders_import_only_torch_triton_and_the_standard_library():
    allowed = set(sys.stdlib_module_names) | {"torch", "triton"}
    wrong = [
        f"{path.name}:{node.lineno}: {name}"
        for path in (ROOT / "kernels").glob("*/torch-ext/*/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in absolute_imports(node)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide PyPI's kernels from transformers"


def test_lines_of_the_native_kernels_have_at_most_120_characters():
    sources = [path for suffix in ("h", "cpp") for path in (ROOT / "hf_efficient").rglob(f"*.{suffix}")]
    assert len(sources) > 10
    lines = ((path, i, line) for path in sources for i, line in enumerate(path.read_text().splitlines(), 1))
    assert [f"{path.name}:{i}" for path, i, line in lines if len(line) > 120] == []


def absolute_imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []


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
    assert any(float(python(code)) <= 0.3 for _ in range(3))


def test_import_loads_neither_torch_nor_the_quantizers():
    loaded = python("import hf_efficient, sys; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert loaded == "False False"


REGISTERED = """
import torch
from transformers import AttentionInterface
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
import hf_efficient
hf_efficient.register()
print("efficient_weight_only" in AUTO_QUANTIZER_MAPPING, "flash_paged" in AttentionInterface(),
      torch.cuda.is_initialized())
"""


def test_registers_when_imported_after_transformers_and_touches_no_gpu():
    done = fresh_processes.run(["-c", "import transformers.modeling_utils" + REGISTERED], check=True)
    assert done.stdout.strip() == "True True False"


def test_registers_when_imported_first_and_no_full_collection_looks_through_what_is_imported():
    """A collection is half a second of the time to the first token of a process."""
    code = (
        "import gc, hf_efficient, torch, transformers; seen = []; gc.collect(); "
        "gc.callbacks.append(lambda phase, info: seen.append(info['generation'])); "
        "import transformers.modeling_utils; old = len(gc.get_objects(generation=2)); "
        "print(2 in seen, old > 0.9 * len(gc.get_objects()), gc.isenabled(), gc.get_freeze_count())"
    )
    assert python(code + REGISTERED).split("\n") == ["False True True 0", "True True False"]


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
import torch
sys.path.append("tests")
from helpers import tiny_model
model = tiny_model("llama")
ids = torch.arange(1, 9)[None]
out = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
print(type(model).__mro__[1].__name__, model.config._attn_implementation, type(out.past_key_values).__name__,
      out.sequences.tolist(), torch.stack(out.logits).double().sum().item())
"""
    printed = [
        fresh_processes.run(["-c", code.format(plugin=plugin)], cwd=ROOT, check=True).stdout for plugin in (True, False)
    ]
    assert printed[0] == printed[1] != ""


def test_tests_and_benchmarks_share_no_module_name():
    """Both folders are on sys.path while a benchmark is tested, so one module would hide the other."""
    assert not {p.stem for p in (ROOT / "tests").glob("*.py")} & {p.stem for p in (ROOT / "benchmarks").glob("*.py")}
