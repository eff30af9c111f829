"""The part "http" of serving.py: servers of an OpenAI API, asked by the `openai` package, as many clients at once as
there are requests.

Prompts are 16 to 256 tokens of Wikipedia articles, chats stream 16 to 128 tokens, greedily, and end where
the model ends them. New tokens are those of the answers' texts. CPU seconds and memory are those of the server and of
the processes that it starts.
"""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path


STARTING = 240  # seconds


def command(engine: str, options, port: int, folder: Path) -> list[str]:
    """How a server starts. folder: takes the checkpoint of a quantized model."""
    at = ["--host", "127.0.0.1", "--port", str(port)]
    if engine.startswith("vLLM"):
        words = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
        return [*words, "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", str(options.requests), *at]
    if engine.startswith("stock"):
        words = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", options.model]
        tokens = ["--cb-max-batch-tokens", "1024"]  # its masks of 8192 tokens take gigabytes
        return [*words, *at, "--continuous-batching", "--cb-num-blocks", str(options.blocks), *tokens]
    model = options.model
    if "int4" in engine:
        from serving import int4_config

        save(options.model, int4_config("int8 inputs" in engine), folder)
        model = folder
    words = [sys.executable, "-c", "import sys; from hf_efficient.cli import main; sys.exit(main())", "serve"]
    return [*words, str(model), *at, "--sequences", str(options.requests), "--context", "512"]


def save(source: str, config, folder: Path) -> None:
    """The quantized model with its tokenizer in `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype="auto").save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


class HttpWorker:
    """A server in a process of its own; `ask` and `stop` as those of serving.py's `Worker`."""

    def __init__(self, engine: str, options):
        from transformers import AutoTokenizer

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        if engine.startswith("vLLM"):
            bound = f"0-{options.threads - 1}"
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": bound}
        self.log = (root / "log").open("wb+")
        words = command(engine, options, port, root / "model")
        self.model = str(root / "model") if (root / "model").is_dir() else options.model
        self.process = subprocess.Popen(words, stdout=self.log, stderr=self.log, env=environment)
        self.url, self.tokenizer = f"http://127.0.0.1:{port}", AutoTokenizer.from_pretrained(options.model)
        self.wait()

    def wait(self) -> None:
        """Raises RuntimeError where the server ends, or is not ready in time."""
        end = time.monotonic() + STARTING
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        self.log.seek(0)
        written = self.log.read().decode(errors="replace")[-2000:]
        self.stop()
        raise RuntimeError(f"{self.process.args}: the server did not start: {written}")

    def ask(self, count: int, seed: int, **_) -> dict:
        from serving import summary

        before = self.usage()
        results, tokens = asyncio.run(self.chats(chats(self.tokenizer, count, seed)))
        found = summary(results)
        after = self.usage()
        found["new_tokens_per_second"] = tokens / found["seconds"]
        return found | {"cpu_seconds": after[0] - before[0], "peak_memory_mb": after[1]}

    async def chats(self, requests: list[tuple[str, int]]) -> tuple[list[tuple[float, list[float]]], int]:
        """(when it was asked, when its pieces came) of each request, in seconds, and the tokens of all answers."""
        import openai

        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)
        start = time.perf_counter()

        async def chat(prompt: str, new: int) -> tuple[float, list[float], str]:
            asked, stamps, text = time.perf_counter() - start, [], ""
            stream = await client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": prompt}], max_tokens=new, temperature=0.0,
                stream=True,
            )  # fmt: skip
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    stamps.append(time.perf_counter() - start)
                    text += chunk.choices[0].delta.content
            return asked, stamps, text

        found = await asyncio.gather(*(chat(*request) for request in requests))
        await client.close()
        tokens = sum(len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for *_, text in found)
        return [(asked, stamps) for asked, stamps, _ in found if stamps], tokens

    def usage(self) -> tuple[float, float]:
        """CPU seconds and the peak of resident megabytes, of the server and what it started."""
        seconds = peak = 0.0
        for process in self.processes():
            times = process.cpu_times()
            seconds += times.user + times.system
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        return seconds, peak

    def processes(self) -> list:
        """The server and what it started; none where it has ended."""
        import psutil

        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        import psutil

        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()


def chats(tokenizer, count: int, seed: int) -> list[tuple[str, int]]:
    """(prompt, most new tokens) of each request."""
    import harness

    draw = random.Random(seed)
    windows = harness.windows(None, "calibration", count, 256)
    return [
        (tokenizer.decode(window[: draw.randint(16, 256)], skip_special_tokens=True), draw.randint(16, 128))
        for window in windows
    ]
