"""What holds for every target: folders and models give the same files, bad input is named, and nothing half-written
is left."""

import filecmp
import json
import os
import shutil
import textwrap

import fresh_processes
import pytest
import torch
import unpackers
from exported import compressed, largest_difference, weights
from helpers import needs_adapters, save_tiny, tiny_model, tiny_tokenizer
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_efficient
from hf_efficient.checkpoints.export import FORMATS, folder, source
from hf_efficient.cli import main


HALF_ULP = 2**-11  # of float16, relative


def target(path, format):
    return path / ("out.gguf" if format == "gguf" else f"out-{format}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A compressed model and the folder it was saved to, with an output head that is tied to the embedding."""
    path = tmp_path_factory.mktemp("saved")
    model = compressed(path, "llama_tied", model_dtype=torch.bfloat16, bits=4, group_size=32, symmetric=True)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    return model, path / "model"


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the folder, to be damaged."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in saved[1].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize("format", FORMATS[:3])
def test_a_folder_gives_the_files_of_the_model(saved, tmp_path, format):
    model, path = saved
    of_model = hf_efficient.export(model, tmp_path / "a", format, tokenizer=tiny_tokenizer())
    of_folder = hf_efficient.export(path, tmp_path / "b", format)
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "b").iterdir())
    same, different, odd = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", names, shallow=False)
    assert "model.safetensors" in same and "config.json" in same and not odd
    assert of_model.nbytes >= sum((tmp_path / "a" / name).stat().st_size for name in names) > 0
    assert of_folder.quantized_layers == of_model.quantized_layers == 14
    assert AutoConfig.from_pretrained(tmp_path / "b").architectures == ["LlamaForCausalLM"]
    assert GenerationConfig.from_pretrained(tmp_path / "b").max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "b")("abc")["input_ids"] == tiny_tokenizer()("abc")["input_ids"]
    tensors = unpackers.tensors_of(tmp_path / "b")
    assert "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors
    assert type(model.config.quantization_config).__name__ == "WeightOnlyConfig", "the model is as it was"


def test_a_folder_gives_the_gguf_of_the_model(saved, copied, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copied / file).unlink()
    hf_efficient.export(saved[0], tmp_path / "a.gguf", "gguf")
    hf_efficient.export(copied, tmp_path / "b.gguf", "gguf")
    ours, theirs = unpackers.gguf(tmp_path / "a.gguf"), unpackers.gguf(tmp_path / "b.gguf")
    assert largest_difference(ours, theirs) == 0 and "output.weight" not in ours


def test_shards(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SHARD_BYTES", 20_000)
    hf_efficient.export(saved[1], tmp_path / "out")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in unpackers.tensors_of(tmp_path / "out").values())
    assert max(sum(t.nbytes for t in load_file(tmp_path / "out" / file).values()) for file in files) <= 20_000
    assert largest_difference(weights(saved[0]), unpackers.compressed_tensors(tmp_path / "out")) == 0
    again = hf_efficient.export(saved[0], tmp_path / "again", "gptq")
    assert again.quantized_layers == 14


def test_a_sharded_folder_is_read(saved, tmp_path):
    model, _ = saved
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    hf_efficient.export(tmp_path / "sharded", tmp_path / "out")
    assert largest_difference(weights(model), unpackers.compressed_tensors(tmp_path / "out")) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_what_fails_leaves_what_was_there(saved, tmp_path, format, monkeypatch):
    model, _ = saved
    if format == "bitnet":  # holds ternary weights only
        ternary = hf_efficient.BitNetConfig()
        model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "plain"), quantization_config=ternary)
        shutil.rmtree(tmp_path / "plain")
    output = target(tmp_path, format)
    if format == "gguf":
        output.write_bytes(b"older")
    else:
        output.mkdir()
    calls = []
    reader = source._reader_of_module

    def failing(module, prefix):
        read = reader(module, prefix)

        def counted(part):
            calls.append(part)
            if len(calls) > 20:
                raise OSError("the disk is full")
            return read(part)

        return counted

    monkeypatch.setattr(source, "_reader_of_module", failing)
    with pytest.raises(OSError, match="the disk is full"):
        hf_efficient.export(model, output, format)
    assert list(tmp_path.iterdir()) == [output]
    assert output.read_bytes() == b"older" if format == "gguf" else not any(output.iterdir())


def test_what_is_killed_leaves_nothing_that_loads(copied, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copied / file).unlink()
    outputs = {format: str(target(tmp_path, format)) for format in ("compressed-tensors", "gguf")}
    code = f"""
        import os, signal
        import hf_efficient
        from hf_efficient.checkpoints.export import source
        reader = source._reader_of_file
        def killing(handles, names):
            read = reader(handles, names)
            def read_or_die(part):
                if "layers.1.mlp.down_proj" in names[part]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return read(part)
            return read_or_die
        source._reader_of_file = killing
        for format, output in {outputs}.items():
            if os.fork() == 0:
                hf_efficient.export({str(copied)!r}, output, format)
            assert os.wait()[1] == signal.SIGKILL
    """
    result = fresh_processes.run(["-c", textwrap.dedent(code)])
    assert result.returncode == 0, result.stderr
    left = set(tmp_path.iterdir()) - {copied}
    assert len(left) == 2 and all(path.name.startswith(".out") for path in left)
    for path in left:
        where, options = (path, {}) if path.is_dir() else (tmp_path, {"gguf_file": path.name})
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(where, **options)


@pytest.mark.parametrize(
    ("format", "name", "message"),
    [
        ("onnx", "out", r"format='onnx' is not supported: it must be one of \('compressed-tensors'"),
        ("gguf", "out", "for format='gguf' it must be a file name in .gguf"),
        ("gguf", "taken.gguf", "it must be a file name in .gguf"),
        ("awq", "taken.gguf", "taken.gguf' exists already: give a new or an empty folder"),
        ("gptq", "file", "exists already"),
    ],
)
def test_bad_arguments_are_named(saved, tmp_path, format, name, message):
    (tmp_path / "taken.gguf").mkdir()
    (tmp_path / "taken.gguf" / "file").touch()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        hf_efficient.export(saved[0], tmp_path / name, format)


def test_a_compressed_output_head_is_read_from_a_folder(tmp_path):
    model = compressed(tmp_path, "llama_tied", bits=4, group_size=32, symmetric=True, quantize_lm_head=True)
    model.save_pretrained(tmp_path / "model")
    for format in ("compressed-tensors", "gptq", "gguf"):
        of_folder = hf_efficient.export(tmp_path / "model", target(tmp_path, format), format)
        assert of_folder.quantized_layers == 15
    assert "lm_head.weight_packed" in unpackers.tensors_of(target(tmp_path, "compressed-tensors"))
    assert json.loads((target(tmp_path, "gptq") / "config.json").read_text())["quantization_config"]["lm_head"] is True
    stored = unpackers.gguf(target(tmp_path, "gguf"))["output.weight"]
    assert (stored - weights(model)["lm_head.weight"]).abs().max() <= HALF_ULP * stored.abs().max()


@needs_adapters
def test_adapters_are_refused(tmp_path):
    model = compressed(tmp_path, bits=4, group_size=32)
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="the model carries adapters: merge them"):
        hf_efficient.export(model, tmp_path / "out")


def test_what_is_no_compressed_model_is_named(saved, tmp_path):
    with pytest.raises(ValueError, match="a Linear cannot be exported: it must be a PreTrainedModel"):
        hf_efficient.export(nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(ValueError, match="the folder holds no config.json"):
        hf_efficient.export(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ValueError, match="no compressed layer.*save_pretrained writes what every engine reads"):
        hf_efficient.export(tiny_model("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/part.safetensors", "model.bin", 7])
def test_file_names_that_leave_the_folder_are_refused(copied, tmp_path, name):
    index = {"weight_map": {"model.norm.weight": name}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "outside.safetensors")
    with pytest.raises(ValueError, match="weight_map must name safetensors files beside it"):
        hf_efficient.export(copied, tmp_path / "out")


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"weight_map": [1]}', b'{"weight_map": {"a": []}}', b"\xff"])
def test_an_index_that_is_none_is_refused(content, copied, tmp_path):
    (copied / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors.index.json is no index of safetensors files"):
        hf_efficient.export(copied, tmp_path / "out")


@pytest.mark.parametrize("size", [0, 100, -1])
def test_weights_that_are_cut_off_are_refused(size, copied, tmp_path):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file that can be read"):
        hf_efficient.export(copied, tmp_path / "out")


def test_folders_that_lie_are_refused(copied, tmp_path):
    tensors = load_file(copied / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.qweight"

    def refused(changed, message):
        save_file(changed, copied / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            hf_efficient.export(copied, tmp_path / "out")

    refused(
        {**tensors, name: tensors[name][:, :-1].contiguous()},
        rf"{name} is \(96, 31\) where config.json gives \(96, 32\)",
    )
    refused({n: t for n, t in tensors.items() if n != name}, rf"missing \['{name}'\]")
    refused({**tensors, "model.layers.0.extra": torch.ones(2)}, r"unknown \['model.layers.0.extra'\]")
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no model.safetensors; weights are read from safetensors only"):
        hf_efficient.export(copied, tmp_path / "out")
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_method='gptq', which was not made here"):
        hf_efficient.export(copied, tmp_path / "out")
    config |= {"model_type": "elsewhere", "auto_map": {"AutoConfig": "code.Config"}}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "code.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        hf_efficient.export(copied, tmp_path / "out")


def test_scales_that_float16_cannot_hold_are_named(saved, tmp_path):
    model = compressed(tmp_path, bits=4, group_size=32, symmetric=True)
    layer = model.model.layers[1].mlp.up_proj
    layer.restore_canonical()
    layer.scale.data[0, 0] = 1e5
    for format in ("gptq", "awq", "gguf"):
        with pytest.raises(
            ValueError, match=r"model\.layers\.1\.mlp\.up_proj: a scale of 1e\+05 does not fit the float16"
        ):
            hf_efficient.export(model, target(tmp_path, format), format)
        assert not target(tmp_path, format).exists()


def test_the_command(saved, tmp_path, capsys):
    arguments = ["export", str(saved[1]), "--format", "gptq", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert "14 compressed layers, weights unchanged" in capsys.readouterr().out
    assert main(arguments) == 1
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", str(saved[1]), "--format", "onnx", "--output", os.devnull])
