"""`hf-efficient push` and `push_to_hub`: what is published is whole, reloads bit for bit, and its card tells no
number that its report does not hold."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from hub_directory import serving
from huggingface_hub import ModelCard
from report_content import content as report_content
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient import W8A8Config, WeightOnlyConfig
from hf_efficient.cli import main
from hf_efficient.integrations import hub, model_card


ROOT = Path(__file__).resolve().parents[2]
IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of a quantized model with a tokenizer, the model)"""
    folder = tmp_path_factory.mktemp("hub")
    tiny_model("llama").save_pretrained(folder / "tiny")
    (folder / "tiny" / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "tiny",
        quantization_config=WeightOnlyConfig(bits=4, group_size=32, overrides={"*.v_proj": {"bits": 8}}),
    )
    model.save_pretrained(folder / "small")
    tiny_tokenizer().save_pretrained(folder / "small")
    return folder / "small", model


@pytest.fixture
def small(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "small")


def measured(folder) -> dict:
    """A report whose last variant measured `folder`."""
    content = report_content()
    content["variants"][-1]["weights_sha256"] = hub.weights_sha256(folder)
    (folder / "report.json").write_text(json.dumps(content))
    return content


def states_equal(one, other) -> bool:
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_pushed_to_the_hub_and_loaded_from_it(made, small, tmp_path, monkeypatch, capsys):
    content = measured(small)
    with serving(tmp_path / "repos", monkeypatch) as server:
        repo = tmp_path / "repos" / "me" / "small-int4"
        repo.mkdir(parents=True)
        (repo / "model-00001-of-00002.safetensors").write_text("of an earlier upload")
        assert main(["push", str(small), "me/small-int4", "--private"]) == 0
        assert "hf_secret" not in "".join(capsys.readouterr())
        assert set(server.authorizations) >= {"Bearer hf_secret"}
        assert [p for _, p in server.requests if "/commit/" in p] == ["/api/models/me/small-int4/commit/main"]
        assert not (repo / "model-00001-of-00002.safetensors").exists(), "from_pretrained might read it"
        again = AutoModelForCausalLM.from_pretrained("me/small-int4")
    assert states_equal(again, made[1])
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, made[1](IDS).logits)
    assert {p.name for p in repo.iterdir()} == {p.name for p in small.iterdir()} | {"README.md"}
    assert not (small / "README.md").exists(), "the folder is not changed"

    card, variant = ModelCard.load(repo / "README.md"), content["variants"][-1]
    assert (card.data.base_model, card.data.base_model_relation) == ("org/model", "quantized")
    assert card.data.tags == ["hf_efficient", "quantized"] and card.data.library_name == "transformers"
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values == {
        "perplexity": variant["perplexity"],
        "nll_difference": variant["nll_difference"],
        "tokens_per_second": variant["one_prompt"]["tokens_per_second"]["median"],
    }
    errors = [result.metric_args for result in card.data.eval_results]
    assert errors[1] == {"standard_error": variant["nll_difference_standard_error"]}
    for shown in (f"memory: {variant['weight_bytes']} bytes", "28.50 against 22.20", "nat (standard error 0.0000)"):
        assert shown in card.text
    for package, version in content["environment"]["versions"].items():
        assert f"{package} {version}" in card.text
    assert content["environment"]["hardware"]["cpu"] in card.text and '"me/small-int4"' in card.text


def test_the_recipe_in_the_card_is_the_config(made):
    _, compression = hub.read_folder(made[0])
    assert eval("hf_efficient." + model_card.recipe(compression), {"hf_efficient": hf_efficient}) == compression
    static = W8A8Config(activations="static", calibration={"dataset": "a 'b'.txt"})
    again = eval("hf_efficient." + model_card.recipe(static), {"hf_efficient": hf_efficient})
    assert again == static


def test_pushed_to_a_folder_without_network_or_figures(made, small, tmp_path):
    target = tmp_path / "new" / "tiny-int4"
    base = made[0].parent / "tiny"
    assert hub.push(small, str(target), base_model=str(base)) == str(target)
    assert states_equal(AutoModelForCausalLM.from_pretrained(target), made[1])
    card = ModelCard.load(target / "README.md")
    assert "Nothing was measured for this card" in card.text and card.data.eval_results is None
    assert card.data.license == "mit" and card.data.base_model is None, "a folder is no model of the Hub"
    assert str(base) not in card.content and "`tiny`" in card.text
    with pytest.raises(ValueError, match="exists already"):
        hub.push(small, str(target))


def test_a_model_pushes_itself_and_a_copy_does_too(made, tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(measured(shutil.copytree(made[0], tmp_path / "copy"))))
    copy = pickle.loads(pickle.dumps(made[1]))
    with serving(tmp_path / "repos", monkeypatch):
        made[1].push_to_hub("mine", report=report)
    card = ModelCard.load(tmp_path / "repos" / "me" / "mine" / "README.md")
    assert card.data.eval_results and card.data.base_model == "org/model"
    made[1].push_to_hub(str(tmp_path / "local"))
    assert "`tiny`" in ModelCard.load(tmp_path / "local" / "README.md").text
    assert states_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "local"), copy)
    with pytest.raises(ValueError, match="tags"):
        made[1].push_to_hub("mine", tags=["x"])


def test_the_card_of_a_private_base_model_is_read_with_the_token_that_is_given(small, tmp_path, monkeypatch):
    base = tmp_path / "repos" / "me" / "base"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: mit\n---\n# base\n")
    with serving(tmp_path / "repos", monkeypatch) as server:
        hub.push(small, "me/small", base_model="me/base", token="hf_given")
    assert ModelCard.load(tmp_path / "repos" / "me" / "small" / "README.md").data.license == "mit"
    assert set(server.authorizations) == {"Bearer hf_given", None}, "uploads to storage carry none"


def test_figures_of_other_weights_are_refused(small, tmp_path):
    measured(small)
    content = json.loads((small / "report.json").read_text())
    content["variants"][-1]["weights_sha256"] = "0" * 64
    (small / "report.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="did not measure the weights"):
        hub.push(small, str(tmp_path / "out"))
    content["variants"][-1]["perplexity"] = "<b>low</b>"
    (small / "report.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not one that `hf-efficient run` wrote"):
        hub.push(small, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", ["commit", "blob-"])
def test_an_interrupted_upload_leaves_nothing_that_loads(moment, small, tmp_path, monkeypatch):
    def fail(request):
        if moment in request.url.path:
            raise KeyboardInterrupt

    with serving(tmp_path / "repos", monkeypatch) as server:
        server.fail = fail
        assert main(["push", str(small), "me/half"]) == 130
        server.fail = lambda request: None
        assert list((tmp_path / "repos" / "me" / "half").iterdir()) == []
        with pytest.raises((OSError, ValueError), match="me/half"):
            AutoModelForCausalLM.from_pretrained("me/half")


def test_an_interrupted_copy_leaves_nothing(small, tmp_path, monkeypatch):
    def fail(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(KeyboardInterrupt):
        hub.push(small, str(tmp_path / "out" / "half"))
    assert list((tmp_path / "out").iterdir()) == []


def _write(name, text=""):
    return lambda folder: (folder / name).write_text(text)


def _index(folder):
    index = {"metadata": {}, "weight_map": {"a": "../../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def _link(folder):
    (folder.parent / "secret.json").write_text("{}")
    os.symlink("../secret.json", folder / "extra.json")


def _cut(folder):
    os.truncate(folder / "model.safetensors", 500)


def _config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_write("pytorch_model.bin"), "pytorch_model.bin.*neither pickles nor code"),
        (_write("modeling_evil.py"), "modeling_evil.py"),
        (_write("a\nb.json"), "is no file that is published"),
        (_index, "names '../../outside.safetensors'"),
        (
            _write("model.safetensors.index.json", "[]"),
            "'model.safetensors.index.json' is no index of safetensors files",
        ),
        (_write("model.safetensors.index.json", '{"weight_map": {"a": ["b"]}}'), "is no index of safetensors files"),
        (_shard, "'model-00001-of-00002.safetensors' is a part of a checkpoint, and no .*index.json names it"),
        (_link, "'extra.json' leads out of the folder"),
        (_cut, "'model.safetensors' is not whole"),
        (_config(quantization_config=None), "quant_method=None"),
        (_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quant_method='gptq'"),
        (_config(architectures=["X; import os"]), "is not a class"),
        (_write("README.md", "---\nbase_model: 'x\\n{{ 7 * 7 }}](evil)'\n---\n"), "not a plain name"),
        (_write("README.md", "---\n[: {\n---\n"), "cannot be read"),
    ],
)
def test_what_must_not_be_published_is_refused(spoil, message, small, tmp_path):
    spoil(small)
    with pytest.raises(ValueError, match=message):
        hub.push(small, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("repo", ["a/../b", "a b/c", "me/{{ 7*7 }}", "x\n---\n", "../{{ 7*7 }}", "a/b/c"])
def test_names_that_are_none_are_refused(repo, small, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError):
        hub.push(small, repo)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "small"}


@pytest.mark.parametrize("option", [{"licence": "mit\nevil: true"}, {"base_model": "/models/{{ x }}"}])
def test_metadata_that_is_markup_is_refused(option, small, tmp_path):
    with pytest.raises(ValueError, match="is not"):
        hub.push(small, str(tmp_path / "out"), **option)


def test_text_of_a_report_stays_text(small, tmp_path):
    content = measured(small)
    content["text"] = "{{ 7 * 7 }}\n---\nlicense: evil\n---\n`<script>`"
    content["environment"]["command"] = "```\n# heading {% raw %} ``` x"
    content["variants"][-1]["name"] = "[a](evil) | b"
    (small / "report.json").write_text(json.dumps(content))
    hub.push(small, str(tmp_path / "out"))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license is None and card.data.eval_results[0].dataset_name == content["text"]
    assert "`` {{ 7 * 7 }} --- license: evil --- `<script>` ``" in card.text
    assert "````" in card.text and "\n# heading" not in card.text
    assert r"\[a\](evil) \| b" in card.text


def test_the_committed_card_is_that_of_the_committed_report():
    content = json.loads((ROOT / "benchmarks" / "results" / "demo_cpu.json").read_text())
    variant = content["variants"][-1]
    name = "SmolLM2-135M-Instruct-int4-group-64"
    compression = model_card.read_config(variant["quantization"])
    options = {"base_model": content["model"], "licence": "apache-2.0", "content": content, "variant": variant}
    assert (ROOT / "model_cards" / f"{name}.md").read_text() == model_card.render(name, compression, **options)
