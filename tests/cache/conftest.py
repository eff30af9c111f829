"""The Llama that the tests of caches share."""

import pytest
from helpers import tiny_model


@pytest.fixture(scope="module")
def shared_llama():
    return tiny_model("llama")


@pytest.fixture
def llama(shared_llama):
    """One for all tests of a file, with the attention that reads pages."""
    shared_llama.set_attn_implementation("flash_paged")
    return shared_llama


@pytest.fixture(params=["sdpa", "flash_paged"])
def model(request, shared_llama):
    shared_llama.set_attn_implementation(request.param)
    return shared_llama
