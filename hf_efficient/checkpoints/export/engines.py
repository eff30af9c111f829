"""Which engines read an export, by what their loaders take before they read a weight."""

SERVERS = ("vLLM", "SGLang")
# (bits, symmetric) of weights whose activations have 16 bits
GPTQ_SCHEMES = {(4, True), (8, True)}  # vLLM's AutoGPTQConfig, whatever the device
PACKED_SCHEMES = {(4, True), (4, False), (8, True)}  # vLLM's kernels for compressed-tensors' "pack-quantized"
GROUP_SIZES = (-1, 32, 64, 128)  # of both


def is_served(schemes: set[tuple[int, bool]], bits: int, symmetric: bool, group_size: int) -> bool:
    """Whether vLLM reads weights of `bits` in groups of `group_size` from a layout that it knows with `schemes`."""
    return (bits, symmetric) in schemes and group_size in GROUP_SIZES
