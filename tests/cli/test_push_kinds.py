"""`hf-efficient push` publishes every kind of output that its commands write, each with a card; nothing else."""

import json
import shutil

import pytest
from helpers import TEXT, is_installed, save_tiny
from hub_directory import serving
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient.cli import main, record
from hf_efficient.integrations import folder_kinds, folder_record


HEADS = ["--num-tokens", "200", "--epochs", "1", "--max-new-tokens", "8", "--batch-size", "4", "--draft-tokens", "32"]
COMMANDS = {  # kind -> (arguments after the model, file or folder that is published)
    "compressed-tensors": ["export", "small", "--format", "compressed-tensors"],
    "gptq": ["export", "small", "--format", "gptq"],
    "awq": ["export", "small", "--format", "awq"],
    "gguf": ["export", "bare", "--format", "gguf"],
    "pruned": ["prune-structure", "tiny", "--method", "l1", "--remove", "0.2"],
    "recovered": ["recover", "pruned", "--teacher", "tiny", "--texts", "text.txt", "--steps", "1", "--sequence-length",
                  "16"],
    "draft heads": ["train-draft", "tiny", "--kind", "medusa", "--prompts", "prompts.txt", *HEADS],
    "context predictors": ["sparsify-context", "tiny", "--calibration", "text.txt", "--num-samples", "2",
                           "--sequence-length", "32"],
}  # fmt: skip
LIBRARIES = {"gguf": "gguf", "draft heads": "hf_efficient", "context predictors": "hf_efficient"}
SHOWN = {  # kind -> what its card tells a reader to do
    "compressed-tensors": "vllm serve me/mine",
    "gptq": "vllm serve me/mine",
    "awq": "vllm serve me/mine",
    "gguf": "llama-cli -hf me/mine",
    "pruned": 'AutoModelForCausalLM.from_pretrained("me/mine")',
    "recovered": 'AutoModelForCausalLM.from_pretrained("me/mine")',
    "draft heads": 'hf_efficient.DraftHeads.from_pretrained("me/mine")',
    "context predictors": 'hf_efficient.ContextualSparsity.from_pretrained("me/mine").apply(model)',
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder in which every one of `COMMANDS` wrote its output, called as its kind with hyphens."""
    folder = tmp_path_factory.mktemp("kinds")
    save_tiny(folder / "tiny", eos_token_id=None)
    (folder / "text.txt").write_text(TEXT * 60)
    (folder / "prompts.txt").write_text("The river runs\nHello there\nAnna meets\nBruno brings\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["--output", "small", "--group-size", "32", "--symmetric", "--method", "rtn"]
        assert main(["quantize", "tiny", *words]) == 0
        ignored = shutil.ignore_patterns("tokenizer*")  # of a kind that no gguf holds
        shutil.copytree("small", "bare", ignore=ignored)
        for kind, words in COMMANDS.items():
            if kind != "gguf" or is_installed("gguf"):
                assert main([*words, "--output", output(kind)]) == 0, kind
    return folder


def output(kind: str) -> str:
    return f"{kind.replace(' ', '-')}" + (".gguf" if kind == "gguf" else "")


DRAFT_MODEL = ["train-draft", "tiny", "--kind", "model", "--layers", "1", "--prompts", "prompts.txt", *HEADS[:-2]]


@pytest.mark.parametrize("kind", [*COMMANDS, "draft model"])
def test_an_output_is_there_with_its_record_or_not_at_all(kind, made, tmp_path, monkeypatch):
    """`push` made no card of an export or of draft heads whose command was interrupted just before it wrote that."""
    if kind == "gguf" and not is_installed("gguf"):
        pytest.skip("needs the package gguf")

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.chdir(made)
    monkeypatch.setattr(folder_record, "write", stop)
    words = COMMANDS.get(kind, DRAFT_MODEL)
    assert main([*words, "--output", str(tmp_path / output(kind))]) == 130
    assert {path.name for path in tmp_path.iterdir()} <= {f"{output(kind)}-progress"}  # of train-draft


@pytest.mark.parametrize("kind", COMMANDS)
def test_each_kind_is_published_with_its_card(kind, made, tmp_path, monkeypatch, capsys):
    source = made / output(kind)
    if not source.exists():
        pytest.skip("needs the package gguf")
    capsys.readouterr()
    with serving(tmp_path / "repos", monkeypatch):
        assert main(["push", str(source), "me/mine", "--base-model", "org/model", "--licence", "mit"]) == 0
    repo = tmp_path / "repos" / "me" / "mine"
    files = {path.name for path in repo.iterdir()} - {"README.md", ".gitattributes"}
    if source.is_file():
        assert files == {source.name} and (repo / source.name).read_bytes() == source.read_bytes()
    else:
        assert files == {path.name for path in source.iterdir()} - {"README.md"}
    card = ModelCard.load(repo / "README.md")
    assert (card.data.base_model, card.data.license) == ("org/model", "mit")
    assert card.data.library_name == LIBRARIES.get(kind, "transformers")
    found = folder_kinds.KINDS["pruned" if kind == "recovered" else kind]
    assert card.data.tags == ["hf_efficient", *found.tags] and card.data.base_model_relation == found.relation
    assert SHOWN[kind] in card.text
    assert "pypi.org" not in card.text and "pip install hf_efficient" not in card.text, "it is not on PyPI"
    assert f"hf-efficient {COMMANDS[kind][0]} {COMMANDS[kind][1]} " in card.text, "the command it was made with"
    before = "hf-efficient quantize tiny" if kind in ("compressed-tensors", "gptq", "awq", "gguf") else None
    before = "hf-efficient prune-structure tiny" if kind == "recovered" else before
    assert before is None or card.text.index(before) < card.text.index(f"hf-efficient {COMMANDS[kind][0]}")
    assert ("is right" in card.text) == (kind == "draft heads"), "measured when they were trained"


@pytest.mark.parametrize("kind", [kind for kind in COMMANDS if kind != "gguf"])
def test_the_base_model_comes_from_the_record(kind, made, tmp_path, capsys):
    target = tmp_path / "pushed"
    assert main(["push", str(made / output(kind)), str(target)]) == 0, capsys.readouterr().err
    card = ModelCard.load(target / "README.md")
    assert "`tiny`" in card.text and str(made) not in card.content and card.data.base_model is None


def test_a_checkpoint_of_bitsandbytes_is_published(made, tmp_path, capsys):
    config = hf_efficient.WeightOnlyConfig(bits=4, codebook="nf4", group_size=64, method="rtn")
    save_tiny(tmp_path / "wide", intermediate_size=128)  # blocks of 64 divide its rows
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", quantization_config=config)
    hf_efficient.save_as_bitsandbytes(model, tmp_path / "nf4")
    words = ["push", str(tmp_path / "nf4"), str(tmp_path / "pushed"), "--base-model", "org/model"]
    assert main(words) == 0, capsys.readouterr().err
    card = ModelCard.load(tmp_path / "pushed" / "README.md")
    assert card.data.tags == ["hf_efficient", "quantized"] and "With transformers and bitsandbytes" in card.text


def test_a_gguf_in_a_folder_is_published_too(made, tmp_path, capsys):
    if not is_installed("gguf"):
        pytest.skip("needs the package gguf")
    (tmp_path / "mine").mkdir()
    shutil.copy(made / "gguf.gguf", tmp_path / "mine" / "model.gguf")
    assert main(["push", str(tmp_path / "mine"), str(tmp_path / "pushed"), "--base-model", "org/model"]) == 0
    assert {path.name for path in (tmp_path / "pushed").iterdir()} == {"model.gguf", "README.md"}
    assert "org/model" in ModelCard.load(tmp_path / "pushed" / "README.md").text


def test_what_is_no_output_is_refused(made, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("x")
    for name in ("empty", "text"):
        assert main(["push", str(tmp_path / name), str(tmp_path / "out")]) == 1
        printed = capsys.readouterr().err
        assert str(tmp_path / name) in printed and "draft heads" in printed and "compressed-tensors" in printed
    assert main(["push", str(made / "tiny"), str(tmp_path / "out")]) == 1
    assert "quant_method=None and is nothing that is published" in capsys.readouterr().err
    fake = shutil.copytree(made / "small", tmp_path / "fake")
    config = json.loads((fake / "config.json").read_text())
    (fake / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    assert main(["push", str(fake), str(tmp_path / "out")]) == 1
    assert "no tensor is called *.qzeros" in capsys.readouterr().err
    broken = shutil.copytree(made / "pruned", tmp_path / "broken")
    folder_record.path_of(broken).write_text('{"kind": "pruned"}')
    assert main(["push", str(broken), str(tmp_path / "out")]) == 1
    assert "is not what hf-efficient wrote" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_recorded_command_that_is_markup_stays_text(made, tmp_path):
    folder = shutil.copytree(made / "pruned", tmp_path / "pruned")
    content = folder_record.read(folder)
    content["commands"] = ["x\n```\n# heading {{ 7 * 7 }}"]
    folder_record.path_of(folder).write_text(json.dumps(content))
    assert main(["push", str(folder), str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "\n# heading" not in text and "````bash\nx ``` # heading {{ 7 * 7 }}\n````" in text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["quantize", "/home/me/models/tiny", "--output", "out"], "hf-efficient quantize tiny --output out"),
        (["quantize", "org/model", "--output", "~/x/out"], "hf-efficient quantize org/model --output out"),
        (["quantize", "a/b/c", "--output", "../out"], "hf-efficient quantize a/b/c --output out"),
        (["x", '{"dataset": "/home/me/a.txt"}'], """hf-efficient x '{"dataset": "a.txt"}'"""),
        (["x", "--text=/home/me/a.txt"], "hf-efficient x --text=a.txt"),
        (["x", "https://host/a/b"], "hf-efficient x https://host/a/b"),
    ],
)
def test_paths_of_this_machine_are_not_recorded(given, shown):
    assert record.shown_command(given) == shown
