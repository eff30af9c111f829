"""The insides of transformers: all of them are listed, still there, and touched nowhere else."""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import fresh_processes
import pytest
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer

from hf_efficient.integrations import transformers_attention
from hf_efficient.integrations import transformers_compat as compat


ROOT = Path(__file__).resolve().parents[2]
INTEGRATIONS = ROOT / "integrations"
MODULES = ("transformers.core_model_loading", "transformers.conversion_mapping")  # nothing in them is documented
OBJECTS = (PreTrainedConfig(), GenerationConfig(), PreTrainedModel, GenerationMixin, WeightConverter, ConversionOps)
# private attributes of transformers' objects, those that every class or module has left out
PRIVATE = {name for kind in (*OBJECTS, HfQuantizer) for name in dir(kind) if name.startswith("_")}
PRIVATE -= {name for kind in (nn.Module, PreTrainedConfig.__mro__[-1], Path) for name in dir(kind)}
PRIVATE |= {inside.name for inside in compat.INSIDES if inside.name.startswith("_")}
PRIVATE = {name for name in PRIVATE if not name.startswith("__")}


def touched(path: Path) -> list[tuple[int, str]]:
    """(line, name) of the private attributes of transformers that a file reads or sets, and of what it imports of
    it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE and ast.unparse(node.value) not in ("self", "cls"):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            names = [alias.name for alias in node.names if alias.name.startswith("_") or node.module in MODULES]
            found += [(node.lineno, name) for name in names]
    return found


@pytest.mark.parametrize("inside", compat.INSIDES, ids=lambda inside: f"{inside.used_by}-{inside.path}")
def test_every_inside_is_there_and_used_where_the_list_says(inside):
    if inside.is_expected:
        compat.find(inside)
    elif inside.until is None:  # no older release has it
        with pytest.raises((ImportError, AttributeError)):
            compat.find(inside)
    assert inside.name in (ROOT / inside.used_by).read_text()


def test_the_list_names_each_inside_once():
    assert len(set(compat.INSIDES)) == len(compat.INSIDES)


@pytest.mark.parametrize("path", sorted(INTEGRATIONS.glob("transformers_*.py")), ids=lambda path: path.stem)
def test_what_a_file_touches_is_listed(path):
    listed = {inside.name for inside in compat.INSIDES if inside.used_by == f"integrations/{path.name}"}
    assert {name for _, name in touched(path)} <= listed


def test_no_other_file_touches_an_inside():
    paths = [*(ROOT / "hf_efficient").rglob("*.py"), *INTEGRATIONS.rglob("*.py")]
    paths = [path for path in paths if path.parent != INTEGRATIONS or not path.name.startswith("transformers_")]
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for path in paths for line, name in touched(path)]
    assert found == []


def test_only_one_place_knows_the_old_name_of_the_cache():
    """As of 5.24 it is deprecated: every call of a model and every output goes through `cache_name()`."""

    def uses(node) -> bool:
        names = node.arg if isinstance(node, ast.keyword) else getattr(node, "attr", getattr(node, "value", None))
        return names == "past_key_values"

    paths = [*(ROOT / "hf_efficient").rglob("*.py"), *INTEGRATIONS.rglob("*.py")]
    found = {path.name for path in paths for node in ast.walk(ast.parse(path.read_text())) if uses(node)}
    assert found == {"transformers_releases.py"}


def test_an_inside_that_is_gone_is_named(monkeypatch):
    rows = {
        "transformers.modeling_utils:PreTrainedModel._gone": dict(),
        "transformers.nowhere:function": dict(),
        "transformers.modeling_utils:PreTrainedModel.save_pretrained": dict(parameters=("self", "folder")),
        "transformers.modeling_utils:PreTrainedModel.tie_weights": dict(reads="_gone"),
    }
    for path, options in rows.items():
        monkeypatch.setattr(compat, "INSIDES", (compat.Inside(path, "here.py", **options),))
        name = path.rpartition(".")[2].rpartition(":")[2]
        with pytest.raises(
            ImportError, match=f"needs .*{name}.*, which transformers .* does not have. Supported: .*5.16.1"
        ):
            compat.require("here.py")
        compat.require("there.py")


@pytest.mark.parametrize("version", ["4.57.1", "5.16.0", "5.25.0.dev0", "6.0.0"])
def test_another_release_is_refused_on_import(version, tmp_path):
    folder = tmp_path / f"transformers-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import hf_efficient"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert f"does not work with transformers {version}" in result.stderr and compat.RELEASES in result.stderr


def test_imports_in_any_order():
    """transformers imports its modules when a name is first asked for, and ours with them. All tests import ours
    first."""
    code = "from transformers import pipeline; import sys; assert 'hf_efficient' not in sys.modules"
    fresh_processes.run(["-c", f"{code}; import hf_efficient"], check=True)


def test_the_releases_are_those_that_are_installed_and_required():
    compat.check_release()
    (required,) = (line for line in metadata.requires("hf_efficient") if line.startswith("transformers"))
    assert set(required.removeprefix("transformers").split(",")) == set(compat.RELEASES.split(","))


@pytest.mark.parametrize(
    "name", ["attention", "compile", "continuous_batching", "masks", "paged_formats", "quantized_pages"]
)
def test_registering_the_attention_looks_for_its_insides(name, monkeypatch):
    """Each of them, one after another, is gone."""
    find = compat.find
    here = f"integrations/transformers_{name}.py"
    for gone in [inside for inside in compat.INSIDES if inside.used_by == here and inside.is_expected]:

        def find_all_but_one(inside, gone=gone):
            if inside is gone:
                raise AttributeError(gone.name)
            return find(inside)

        monkeypatch.setattr(compat, "find", find_all_but_one)
        path = re.escape(gone.path.removeprefix("transformers.").replace(":", "."))
        with pytest.raises(ImportError, match=rf"needs {path}.*, which transformers .* Supported: transformers"):
            transformers_attention.register()
