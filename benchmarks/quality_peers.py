"""What do other libraries' quantized weights cost in perplexity, on the windows of benchmarks/quality.py?

    pip install hqq==0.2.8 optimum-quanto bitsandbytes torchao
    python benchmarks/quality_peers.py [--rows GLOB ...] [--output FILE]

SmolLM2-135M-Instruct, all linears but the head, quantized and computed by the peer's own package. Perplexities and
differences to bf16 are as in benchmarks/quality.py, whose row "bf16" must be measured. Bits of a weight count every
tensor that the peer's layers hold, but for the scale of a row in LLM.int8(). A row stands in the results when it is
done, with the version of the package; a package that is missing is named and its rows are left out.
"""

import importlib.metadata
import sys
import time

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
    options = parser.parse_args()

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
