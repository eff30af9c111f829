"""What a user asks for: plain data that survives a round trip through JSON. One file a config."""

from hf_efficient.configs.base import CompressionConfig, module_matches  # noqa: F401
from hf_efficient.configs.bitnet import BitNetConfig  # noqa: F401
from hf_efficient.configs.calibration import CalibrationConfig  # noqa: F401
from hf_efficient.configs.sparse import SparseConfig, available_pruning_methods  # noqa: F401
from hf_efficient.configs.w8a8 import W8A8Config  # noqa: F401
from hf_efficient.configs.weight_only import WeightOnlyConfig, available_methods  # noqa: F401
