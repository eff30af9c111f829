"""hf_efficient: makes any Hugging Face model smaller and faster without leaving the Hugging Face ecosystem.

Importing this package registers its quantizers and attention with transformers as soon as transformers' own model
loading code is imported. It touches no GPU and changes nothing for a model that does not ask.
"""

import contextlib
import gc
import importlib
import importlib.abc
import importlib.util
import sys
import threading

from hf_efficient.integrations import transformers_compat


__version__ = "0.2.0"

_PUBLIC = {
    "WeightOnlyConfig": "hf_efficient.configs",
    "W8A8Config": "hf_efficient.configs",
    "BitNetConfig": "hf_efficient.configs",
    "SparseConfig": "hf_efficient.configs",
    "CalibrationConfig": "hf_efficient.configs",
    "PagedCache": "hf_efficient.cache.paged_cache",
    "EncoderDecoderPagedCache": "hf_efficient.cache.encoder_decoder_cache",
    "PrefixCache": "hf_efficient.cache.prefix_cache",
    "PrefixOffload": "hf_efficient.cache.prefix_tiers",
    "ContinuousBatchingConfig": "hf_efficient.integrations.transformers_paged_formats",
    "Offload": "hf_efficient.cache.stores.offload",
    "EvictionPolicy": "hf_efficient.cache.eviction.base",
    "AdaKV": "hf_efficient.cache.eviction.adakv",
    "Distinctive": "hf_efficient.cache.eviction.distinctive",
    "ExpectedAttention": "hf_efficient.cache.eviction.expected_attention",
    "HeavyHitter": "hf_efficient.cache.eviction.heavy_hitter",
    "KeyNorm": "hf_efficient.cache.eviction.key_norm",
    "SinkWindow": "hf_efficient.cache.eviction.sink_window",
    "SnapKV": "hf_efficient.cache.eviction.snapkv",
    "TOVA": "hf_efficient.cache.eviction.tova",
    "BestOf": "hf_efficient.generation.drafters.best_of",
    "Drafter": "hf_efficient.generation.drafters.base",
    "PromptLookup": "hf_efficient.generation.drafters.prompt_lookup",
    "Speculation": "hf_efficient.generation.speculation.options",
    "TokenRecycling": "hf_efficient.generation.drafters.token_recycling",
    "TypicalAcceptance": "hf_efficient.generation.speculation.verification",
    "DraftHeads": "hf_efficient.generation.drafters.draft_heads",
    "EagleHead": "hf_efficient.generation.drafters.eagle",
    "MedusaHeads": "hf_efficient.generation.drafters.medusa",
    "MultiTokenPrediction": "hf_efficient.generation.drafters.mtp",
    "train_draft": "hf_efficient.generation.training.train_draft",
    "AssistantDrafter": "hf_efficient.generation.drafters.assistant",
    "SelfSpeculation": "hf_efficient.generation.drafters.self_speculation",
    "TranslatedDrafter": "hf_efficient.generation.drafters.translated",
    "SpeculativeGenerationMixin": "hf_efficient.integrations.transformers_generation",
    "enable_speculation": "hf_efficient.integrations.transformers_generation",
    "PromptCompressor": "hf_efficient.prompts.compressor",
    "optimize": "hf_efficient.integrations.transformers_generation",
    "report": "hf_efficient.planning.model_report",
    "speculative_generate": "hf_efficient.generation.decode",
    "warm_up": "hf_efficient.generation.warm_up",
    "compress_on_disk": "hf_efficient.compression.disk_to_disk",
    "prune_structure": "hf_efficient.compression.structured_pruning",
    "ContextualSparsity": "hf_efficient.pruning.contextual.saved",
    "sparsify_context": "hf_efficient.calibration.contextual",
    "adopt": "hf_efficient.checkpoints.adopt",
    "save_as_bitsandbytes": "hf_efficient.checkpoints.export.bitsandbytes",
    "export": "hf_efficient.checkpoints.export",
    "estimate": "hf_efficient.planning.estimate",
    "ExpertOffload": "hf_efficient.expert_offload.offload",
    "LayerPrefetch": "hf_efficient.integrations.accelerate_prefetch",
    "recover": "hf_efficient.compression.recovery",
    "trainable": "hf_efficient.compression.recovery.unpacking",
    "distill": "hf_efficient.compression.distillation",
    "to_bitnet": "hf_efficient.compression.bitnet",
    "BitLinear": "hf_efficient.bit_linear",
    "KeepMasks": "hf_efficient.compression.recovery.trainer",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def register() -> None:
    """Registers the quantizers and attention implementations with transformers. Idempotent; import calls it."""
    integrations = ("registration", "loading", "attention", "attention_choice", "warnings")
    with _without_collections():
        for name in (*(f"integrations.transformers_{name}" for name in integrations), "checkpoints.adopt"):
            importlib.import_module(f"hf_efficient.{name}").register()
        releases = importlib.import_module("hf_efficient.integrations.transformers_releases")
        releases.mark_users_caches()
        releases.name_gguf()
        importlib.import_module("hf_efficient.integrations.transformers_cache_names").register()


@contextlib.contextmanager
def _without_collections():
    """Without Python's garbage collector, if it is on. Modules stay, so it would look through all objects of torch and
    transformers in vain, which takes half a second. Afterwards all objects count as old ones: else the next collections
    would look through them."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            if hasattr(gc, "get_freeze_count") and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # puts them into the oldest generation
            gc.enable()


def _register_peft() -> None:
    importlib.import_module("hf_efficient.integrations.peft_injection")


def _register_serving() -> None:
    name = "hf_efficient.integrations.transformers_serving"
    is_being_imported = name in sys.modules  # it imports the server, and registers at its end
    if not is_being_imported and importlib.import_module("hf_efficient.integrations.transformers_releases").has("5.19"):
        importlib.import_module(name).register()


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Imports `module` without garbage collections, and calls `register`, if any, right after it, so that importing
    hf_efficient need not import torch."""

    def __init__(self, module: str, register=None):
        self.module, self.register = module, register
        self._searching = threading.local()

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        if spec is None:  # not installed
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            with _without_collections():
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                if self.register is not None:
                    self.register()

        spec.loader.exec_module = exec_module
        return spec


transformers_compat.check_release()
for _module, _register in (
    ("transformers.modeling_utils", register),
    ("transformers.cli.serving.server", _register_serving),
    ("peft", _register_peft),
):
    if _module in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _RegisterAfterImport(_module, _register))
for _module in ("torch", "transformers.models.auto.modeling_auto"):  # each imports a thousand others
    if _module not in sys.modules:
        sys.meta_path.insert(0, _RegisterAfterImport(_module))
