"""What do other libraries' quantized weights cost in perplexity, on the windows of benchmarks/quality.py?

    pip install hqq==0.2.8 optimum-quanto bitsandbytes torchao llama-cpp-python auto-round
    python benchmarks/quality_peers.py [--rows GLOB ...] [--tokens FILE] [--calibration-tokens FILE] [--output FILE]

SmolLM2-135M-Instruct, all linears but the head, quantized and computed by the peer's own package. Perplexities and
differences to bf16 are as in benchmarks/quality.py, whose row "bf16" must be measured. Bits of a weight count every
tensor that the peer's layers hold, but for the scale of a row in LLM.int8(). A row stands in the results when it is
done, with the version of the package; a package that is missing is named and its rows are left out.

llama.cpp's types with an importance matrix are made by its own quantizer, of the mean squared inputs on 64 windows of
the calibration text, the embedding left in 8 bits, and computed by transformers in bfloat16. They need rows of a
multiple of 256 inputs. Rows of 576 get what llama.cpp takes instead, which has more bits. `types` in a row says how
many of the weights came out as which type.

AutoRound tunes its roundings on 64 windows of the calibration text, in groups of 64 with zero points, 2 windows a step,
for the number of steps a block that the row's name says (its own default is 200, its light recipe takes 50).
"""

import ctypes
import importlib.metadata
import sys
import tempfile
import time
from pathlib import Path

import cpu_generate_ways as ways
import harness
import quality
import torch


def hqq(bits: int):
    """Groups of 64 with float zero points, hqq's own default."""

    def load(folder):
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        model = ways.stock(folder)
        config = BaseQuantizeConfig(nbits=bits, group_size=64)
        for name, module in linears(model).items():
            layer = HQQLinear(module, config, compute_dtype=torch.bfloat16, device="cpu")
            model.set_submodule(name, layer)
        return model

    return load


class _Importance(ctypes.Structure):
    """`llama_model_imatrix_data`."""

    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t)]


GGUF_NAMES = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def importance() -> dict[str, torch.Tensor]:
    """Name of a tensor in a GGUF file -> the mean squares of what its columns are multiplied by, float32 [K]."""
    from hf_efficient.observers.hooks import watching_inputs
    from hf_efficient.observers.linear_inputs import LinearInputs

    model = harness.load()
    modules = {
        f"blk.{number}.{short}.weight": layer.get_submodule(name)
        for number, layer in enumerate(model.model.layers)
        for name, short in GGUF_NAMES.items()
    }
    seen = {name: LinearInputs(module.in_features, hessian=False) for name, module in modules.items()}
    with watching_inputs(modules, lambda name, x: seen[name].update(x)), torch.no_grad():
        for window in harness.windows(CALIBRATION[0], "calibration", 64, 512):
            model.model(input_ids=window[None])
    return {name: inputs.mean_square for name, inputs in seen.items()}


def llama_cpp(kind: str):
    """llama.cpp's quantizer with `LLAMA_FTYPE_MOSTLY_<kind>` and an importance matrix."""

    def load(folder):
        import gguf
        import llama_cpp as library
        from transformers import AutoModelForCausalLM

        from hf_efficient.integrations.transformers_releases import dequantized_gguf

        means = {name: mean.contiguous() for name, mean in importance().items()}
        rows = [
            (n.encode(), ctypes.cast(m.data_ptr(), ctypes.POINTER(ctypes.c_float)), len(m)) for n, m in means.items()
        ]
        matrix = (_Importance * (len(rows) + 1))(*rows)
        params = library.llama_model_quantize_default_params()
        params.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize, params.token_embedding_type = True, library.GGML_TYPE_Q8_0
        params.imatrix = ctypes.cast(matrix, type(params.imatrix))
        with tempfile.TemporaryDirectory() as made:
            path = Path(made) / "model.gguf"
            failed = library.llama_model_quantize(str(ways.gguf()).encode(), str(path).encode(), ctypes.byref(params))
            if failed:
                raise RuntimeError(f"llama_model_quantize returned {failed}")
            own = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name in means]
            loading = dict(gguf_file=path.name, dtype=torch.bfloat16, **dequantized_gguf())
            model = AutoModelForCausalLM.from_pretrained(made, **loading)
        elements = {t.name: int(t.n_elements) for t in own}
        model.bits_per_weight = 8 * sum(int(t.n_bytes) for t in own) / sum(elements.values())
        kinds = {t.tensor_type.name for t in own}
        model.types = {
            kind: sum(elements[t.name] for t in own if t.tensor_type.name == kind) / sum(elements.values())
            for kind in sorted(kinds)
        }
        return model.eval()

    return load


def auto_round(bits: int, steps: int):
    """AutoRound with so many steps a block. What it stores of a group: codes, a 16-bit scale, an integer zero point."""

    def load(folder):
        from auto_round import AutoRound
        from transformers import AutoTokenizer

        windows = harness.windows(CALIBRATION[0], "calibration", 64, 512)
        rounding = AutoRound(
            ways.stock(folder),
            AutoTokenizer.from_pretrained(folder),
            scheme="W4A16",
            bits=bits,
            group_size=64,
            sym=False,
            iters=steps,
            nsamples=len(windows),
            seqlen=windows.shape[1],
            batch_size=2,
            dataset=[{"input_ids": window[None]} for window in windows],
            device_map="cpu",
        )
        model, _ = rounding.quantize()
        model.bits_per_weight = bits + (16 + bits) / 64
        return model.to(torch.bfloat16).eval()

    return load


CALIBRATION: list[str | None] = [None]  # --calibration-tokens

# name -> (package, its function of a folder)
PEERS = {
    "quanto int8": ("optimum-quanto", ways.quanto("int8")),
    "quanto int4": ("optimum-quanto", ways.quanto("int4")),
    "torchao int8": ("torchao", ways.torchao("Int8WeightOnlyConfig")),
    "bitsandbytes NF4": (
        "bitsandbytes",
        ways.bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    ),
    "bitsandbytes LLM.int8()": ("bitsandbytes", ways.bitsandbytes(load_in_8bit=True)),
    "hqq int4 g64": ("hqq", hqq(4)),
    "hqq int3 g64": ("hqq", hqq(3)),
    **{f"llama.cpp {kind}, imatrix": ("llama-cpp-python", llama_cpp(kind)) for kind in ("IQ4_XS", "IQ3_XS", "IQ2_M")},
    **{f"AutoRound int{bits} g64, 50 steps": ("auto-round", auto_round(bits, 50)) for bits in (4, 3, 2)},
}


def linears(model) -> dict:
    """Name -> linear layer, or what a peer put in its place: all but the head."""
    plain = {name for name, module in harness.load().named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module for name, module in model.named_modules() if name in plain - {"lm_head"}}


def stored_bytes(value, seen: set[int]) -> int:
    """Bytes of all tensors in `value`: a tensor (of a subclass, too), a module, or a list or dict of such."""
    if isinstance(value, dict):
        return sum(stored_bytes(part, seen) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(stored_bytes(part, seen) for part in value)
    is_state = not isinstance(value, torch.Tensor) and hasattr(value, "absmax")  # bitsandbytes' QuantState
    if not isinstance(value, (torch.Tensor, torch.nn.Module)) and not is_state:
        return 0
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if is_state:  # its table of 16 values serves all layers
        return stored_bytes([value.absmax, value.state2], seen)
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return sum(stored_bytes(getattr(value, name), seen) for name in names)
    if isinstance(value, torch.nn.Module):
        held = [value._parameters, value._buffers, {k: v for k, v in vars(value).items() if k in ("W_q", "meta")}]
        return stored_bytes(held, seen)
    return value.nbytes + stored_bytes(getattr(value, "quant_state", None), seen)


def measure(load, texts: dict[str, torch.Tensor]) -> dict:
    """One row."""
    import hf_efficient
    from hf_efficient.evaluation import perplexity, samples

    hf_efficient.register()
    torch.manual_seed(0)
    start = time.perf_counter()
    model = load(samples.sample_model())
    row = {"seconds": time.perf_counter() - start}
    row["bits_per_weight"] = getattr(model, "bits_per_weight", None)
    if hasattr(model, "types"):
        row["types"] = model.types
    if row["bits_per_weight"] is None:
        own = linears(model)
        weights = sum(module.in_features * module.out_features for module in own.values())
        row["bits_per_weight"] = 8 * stored_bytes(list(own.values()), set()) / weights
    for name, windows in texts.items():
        row[name] = {"nll": perplexity.negative_log_likelihood(model, windows).tolist()}
    return row


def main() -> None:
    parser = harness.parser(__doc__, "quality_peers.json")
    parser.add_argument("--rows", nargs="*", default=["*"], help="globs of row names")
    parser.add_argument("--tokens", help="as in benchmarks/quality.py")
    parser.add_argument("--calibration-tokens", help="as in benchmarks/quality.py")
    options = parser.parse_args()
    CALIBRATION[0] = options.calibration_tokens

    from hf_efficient.evaluation import environment

    base = harness.read(harness.RESULTS / "quality.json", {}).get("bf16")
    if base is None:
        sys.exit("benchmarks/quality.py has no row bf16")
    texts = quality.texts(options.tokens)
    if base["texts"] != quality.digests(texts):
        sys.exit("benchmarks/quality.py measured other texts: give --tokens as then")
    done = harness.read(options.output, {})
    for name in harness.matching(PEERS, options.rows):
        package, load = PEERS[name]
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: the package {package} is not installed", file=sys.stderr)
            continue
        row = {"package": f"{package} {version}", **measure(load, texts)}
        for text in texts:
            nll, reference = (torch.tensor(each[text]["nll"]).double() for each in (row, base))
            row[text] |= harness.score(nll, reference)
        done[name] = {**row, "environment": environment.describe()}
        harness.write(options.output, done)
        print(name, *(f"{text} {row[text]['perplexity']:.3f}" for text in texts), f"{row['bits_per_weight']:.3f} bits")


if __name__ == "__main__":
    main()
