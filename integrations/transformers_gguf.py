"""What transformers knows of GGUF files: none of it is documented."""

from transformers.modeling_gguf_pytorch_utils import (  # noqa: F401
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
    read_field,
)


def is_gguf_arch_supported(architecture: str) -> bool:
    """Whether transformers keeps weights of files of this architecture packed. It came with 5.17."""
    from transformers.integrations.gguf import utils

    return utils.is_gguf_arch_supported(architecture)
