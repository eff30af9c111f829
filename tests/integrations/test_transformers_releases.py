"""What has moved between releases of transformers: the older likes of names and signatures, under any release."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model
from torch import nn
from transformers import DynamicCache, GenerationMixin
from transformers.utils import import_utils

from hf_efficient.integrations import transformers_releases as releases
from hf_efficient.integrations import transformers_tensor_parallel


@pytest.fixture
def oldest(monkeypatch):
    """The installed transformers counts as the oldest supported one."""
    version = ".".join(map(str, releases.OLDEST))
    monkeypatch.setattr(releases, "version", lambda: version)
    monkeypatch.setattr(releases, "has", lambda release: releases.OLDEST >= releases.numbers(release))


def test_what_an_older_release_lacks_is_refused_by_name(oldest):
    releases.needs("5.16", "this")
    with pytest.raises(ValueError, match="packed pages needs transformers 5.19 or later; installed is 5.16.1"):
        releases.needs("5.19", "packed pages")


def test_releases_are_compared_as_numbers():
    assert releases.numbers("5.9.1") < releases.numbers("5.16") < releases.numbers("5.16.1.dev0")
    assert releases.numbers("5.25.0.dev0") >= releases.BELOW


def test_arguments_that_all_layers_share_become_those_of_each(monkeypatch):
    both = ["full_attention", "sliding_attention"], {"sliding_window": 8}
    monkeypatch.setattr("transformers.cache_utils.get_layer_types_and_kwargs", lambda decoder: both)
    assert releases.layer_types_and_kwargs(None) == (both[0], [both[1], both[1]])


def test_conversions_are_given_the_model_that_is_being_loaded(oldest):
    class Quantizer(releases.quantizer_base()):
        __init__ = is_serializable = is_trainable = lambda self: None

        def update_weight_conversions(self, conversions, model):
            return [*conversions, model]

    quantizer, model = Quantizer(), nn.Linear(1, 1)
    quantizer._being_loaded = model
    assert quantizer.update_weight_conversions(["a"]) == ["a", model]
    assert not vars(quantizer), "nothing keeps the model"
    assert quantizer.update_weight_conversions(["a"], model) == ["a", model]


def test_parameters_are_declared_as_their_tensors_are(oldest):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    releases.keep_dtypes(model, {"0.weight": "BF16", "1.weight": "U8"})
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16, *[torch.float32] * 3]


def test_a_cache_that_the_caller_passed_is_marked(oldest, monkeypatch):
    monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", lambda self, config, kwargs, *args: None)
    releases.mark_users_caches()
    model, cache = tiny_model("llama"), DynamicCache()
    model._prepare_cache_for_generation(None, {"past_key_values": cache})
    assert cache._is_user_defined
    model._prepare_cache_for_generation(None, {})


def test_tensor_parallelism_is_refused_before_anything_is_changed(oldest):
    model = tiny_model("llama")
    model.config.distributed_config = SimpleNamespace(tp_size=2, tp_plan="auto")
    with pytest.raises(ValueError, match="tp_size=2: tensor parallelism of compressed weights needs .* 5.23 or later"):
        transformers_tensor_parallel.check(model, None, False, True)


def test_models_whose_windows_would_be_dropped_are_refused(oldest):
    releases.check_paged_attention(tiny_model("llama").config)
    with pytest.raises(ValueError, match="sliding_window=8 in continuous batching under flash_paged needs .* 5.19"):
        releases.check_paged_attention(tiny_model("mistral").config)


def test_gguf_is_found_where_python_does_not_name_its_distribution(oldest, monkeypatch):
    mapping = {}
    monkeypatch.setattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", mapping, raising=False)
    releases.name_gguf()
    assert mapping == {"gguf": ["gguf"]}
