"""A process of one other engine for benchmarks/cpu_generate_peers.py, in that engine's own environment: answers each
line of JSON with one, as the processes of cpu_generate_ways.py do. Imports nothing but the engine.

    PYTHON cpu_generate_engines.py ENGINE FOLDER THREADS
"""

import json
import os
import sys
import time


class OpenVino:
    """OpenVINO GenAI over a folder of `optimum-cli export openvino`. Its metrics count rows together, so that one token
    and all are two calls."""

    def __init__(self, folder: str, threads: int):
        import openvino
        import openvino_genai

        self.genai, self.tensor = openvino_genai, openvino.Tensor
        self.pipe = openvino_genai.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=threads)

    def run(self, ids: list[list[int]], new: int) -> list[int]:
        import numpy as np

        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
        inputs = self.genai.TokenizedInputs(self.tensor(np.array(ids)), self.tensor(np.ones_like(np.array(ids))))
        return list(self.pipe.generate(inputs, config).tokens[0])


class Vllm:
    """vLLM over the model's own folder, in bfloat16. One token and all are two calls."""

    def __init__(self, folder: str, threads: int):
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_LOGGING_LEVEL": "ERROR"}
        import vllm

        self.parameters = vllm.SamplingParams
        options = dict(max_model_len=2048, enable_prefix_caching=False, max_num_seqs=64)
        self.model = vllm.LLM(folder, dtype="bfloat16", **options)

    def run(self, ids: list[list[int]], new: int) -> list[int]:
        parameters = self.parameters(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        prompts = [{"prompt_token_ids": row} for row in ids]
        return list(self.model.generate(prompts, parameters, use_tqdm=False)[0].outputs[0].token_ids)


class Onnx:
    """ONNX Runtime GenAI over a folder of its model builder, token by token."""

    def __init__(self, folder: str, threads: int):
        import onnxruntime_genai

        self.genai, config = onnxruntime_genai, onnxruntime_genai.Config(folder)
        session = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
        config.overlay(json.dumps(session))
        self.model = onnxruntime_genai.Model(config)

    def steps(self, ids: list[list[int]], new: int):
        parameters, length = self.genai.GeneratorParams(self.model), len(ids[0]) + new
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(ids))
        generator = self.genai.Generator(self.model, parameters)
        generator.append_tokens(ids if len(ids) > 1 else ids[0])
        for _ in range(new):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])


class IkLlama:
    """ik_llama.cpp through the library of cpu_generate_ik_llama.c. folder: `LIBRARY:GGUF`. One sequence."""

    def __init__(self, folder: str, threads: int):
        import ctypes

        library, _, path = folder.partition(":")
        self.array, self.library = ctypes.c_int32, ctypes.CDLL(library)
        self.seconds = (ctypes.c_double * 2)()
        if self.library.ik_open(path.encode(), threads, 2048, 1):
            raise RuntimeError(f"{path} could not be opened")

    def timed(self, ids: list[list[int]], new: int) -> dict:
        if len(ids) > 1:
            raise ValueError("one sequence only")
        tokens = (self.array * new)()
        if self.library.ik_run((self.array * len(ids[0]))(*ids[0]), len(ids[0]), new, tokens, self.seconds):
            raise RuntimeError("llama_decode failed")
        return {"first": self.seconds[0], "decode": self.seconds[1], "row": list(tokens)}


ENGINES = {"OpenVINO": OpenVino, "vLLM": Vllm, "ONNX Runtime": Onnx, "ik_llama.cpp": IkLlama}


def answer(engine, ids: list[list[int]], new: int) -> dict:
    """Seconds to the first token and of the others, and the tokens of the first row."""
    start = time.perf_counter()
    if isinstance(engine, IkLlama):
        return engine.timed(ids, new)
    if isinstance(engine, Onnx):
        row, times = [], []
        for token in engine.steps(ids, new):
            row.append(token)
            times.append(time.perf_counter())
        return {"first": times[0] - start, "decode": times[-1] - times[0], "row": row}
    engine.run(ids, 1)
    first = time.perf_counter() - start
    if new == 1:
        return {"first": first, "decode": 0.0, "row": [0]}
    again = [[row[0] + 1, *row[1:]] for row in ids]  # prompts are kept: another one
    start = time.perf_counter()
    row = engine.run(again, new)
    return {"first": first, "decode": time.perf_counter() - start - first, "row": row}


def peak_memory_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    name, folder, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, calls = None, 0
    for line in _lines():
        try:
            if line is None:
                engine = ENGINES[name](folder, threads)
                found = {"loading_peak_bytes": peak_memory_bytes()}
            else:
                ask, calls = json.loads(line), calls + 2
                ids = [[100 + calls, *row[1:]] for row in ask["ids"]]  # a prompt that was not seen before
                found = answer(engine, ids, ask["stop"]) | {"peak_memory_bytes": peak_memory_bytes()}
                found["anonymous_bytes"] = None
        except Exception as reason:
            found = {"failed": f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"}
        print(json.dumps(found), file=answers, flush=True)
        if engine is None:
            return


def _lines():
    """None, which loads, and then each line that is asked."""
    yield None
    yield from sys.stdin


if __name__ == "__main__":
    main()
