"""What the decoder of an encoder-decoder model reads besides its own tokens: the encoder's inputs and output."""

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import BaseModelOutput, ModelOutput


@dataclass
class Source:
    """The sources of a batch, one a row.

    Args:
        model: the target, whose encoder read them.
        encoder_outputs: of that encoder; `last_hidden_state` is [rows, n, hidden size]. It may be a tuple's first.
        attention_mask: [rows, n], 0 at padding; or None.
        inputs: what the encoder read, [rows, ...]: token ids, their embeddings, or features of sound; None where not
            known.
    """

    model: torch.nn.Module
    encoder_outputs: BaseModelOutput
    attention_mask: torch.Tensor | None = None
    inputs: torch.Tensor | None = None

    def __post_init__(self):
        if not isinstance(self.encoder_outputs, ModelOutput):
            self.encoder_outputs = BaseModelOutput(last_hidden_state=self.encoder_outputs[0])

    @property
    def tokens(self) -> int:
        """n, the columns of a source."""
        return self.encoder_outputs.last_hidden_state.shape[1]

    def rows(self, rows: list[int]) -> "Source":
        """The sources of these rows."""
        states = self.encoder_outputs.last_hidden_state

        def part(x):
            return None if x is None else x[torch.tensor(rows, device=x.device)]

        outputs = BaseModelOutput(last_hidden_state=part(states))
        return Source(self.model, outputs, part(self.attention_mask), part(self.inputs))

    def token_lists(self) -> list[list[int]] | None:
        """The tokens of each source without padding; None where the sources are no text."""
        ids, mask = self.inputs, self.attention_mask
        if ids is None or ids.dim() != 2 or ids.is_floating_point():
            return None
        if mask is None or mask.shape != ids.shape:
            return ids.tolist()
        return [[token for token, real in zip(*row) if real] for row in zip(ids.tolist(), mask.tolist())]

    def for_draft(self, draft) -> "Source":
        """What `draft`, another model, reads of the same sources. The output of the target's encoder where the draft
        has none of its own (distil-whisper's `WhisperForCausalLM`) or has the same one (`draft.get_encoder() is
        model.get_encoder()`); else its own encoder runs.

        Raises ValueError where it has to run and what the target's encoder read is not known.
        """
        encoder = draft.get_encoder() if draft.config.is_encoder_decoder else None
        if encoder is None or encoder is self.model.get_encoder():
            return self
        are_embeds = self.inputs is not None and encoder.main_input_name == "input_ids" and self.inputs.dim() == 3
        if self.inputs is None or are_embeds:  # of the target's embedding
            raise ValueError(
                f"assistant_model={type(draft).__name__} has an encoder of its own, and only "
                f"{'inputs_embeds' if are_embeds else 'encoder_outputs'} were given: pass the model's inputs, or let "
                "the assistant have the target's encoder"
            )
        inputs = {encoder.main_input_name: self.inputs.to(draft.device)}
        mask = None if self.attention_mask is None else self.attention_mask.to(draft.device)
        with torch.no_grad():
            outputs = encoder(**inputs, attention_mask=mask, return_dict=True)
        return Source(draft, outputs, self.attention_mask, self.inputs)
