"""What transformers knows of GGUF files: none of it is documented."""

from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
    read_field,
)


__all__ = [
    "GGUF_PRE_TOKENIZER_SPLITS",
    "TENSOR_PROCESSORS",
    "TensorProcessor",
    "get_gguf_hf_weights_map",
    "is_gguf_arch_supported",
    "load_gguf_checkpoint",
    "read_field",
]
