"""What a user asks for: plain data that survives a round trip through JSON. One file a config."""

from hf_efficient.configs.weight_only import WeightOnlyConfig, available_methods, module_matches  # noqa: F401
