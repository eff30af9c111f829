"""Which `RaggedModel` a model needs."""

from hf_efficient.generation.encoder_reading import EncoderReading
from hf_efficient.generation.model_traits import has_states, has_states_alone, reads_encoder
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.state_reading import StateReading, StatesAlone


class RaggedEncoderDecoder(EncoderReading, RaggedModel):
    """A `RaggedModel` over an `EncoderDecoderPagedCache`."""


class RaggedHybrid(StateReading, RaggedModel):
    """A `RaggedModel` with layers that have a recurrent state."""


class RaggedStates(StatesAlone, RaggedModel):
    """A `RaggedModel` over a `StateCache`."""


def ragged_model(model, *arguments, **options) -> RaggedModel:
    """The `RaggedModel` that `model` needs."""
    if has_states(model):
        kind = RaggedStates if has_states_alone(model) else RaggedHybrid
    else:
        kind = RaggedEncoderDecoder if reads_encoder(model) else RaggedModel
    return kind(model, *arguments, **options)
