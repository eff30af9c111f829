"""What transformers knows of GGUF files: none of it is documented."""

from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS  # noqa: F401
from transformers.integrations.gguf.utils import is_gguf_arch_supported  # noqa: F401
from transformers.modeling_gguf_pytorch_utils import (  # noqa: F401
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
    read_field,
)
