"""The token ids of a batch whose rows grow at their own pace, and what acts on them: logits processors and stopping."""

from itertools import groupby

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_of
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_efficient.generation.uniforms import Uniforms


# Processors that look at one row of scores and at nothing else: they act on all rows and positions in one call.
POINTWISE = (
    processors_of.TemperatureLogitsWarper,
    processors_of.TopKLogitsWarper,
    processors_of.TopPLogitsWarper,
    processors_of.TopHLogitsWarper,
    processors_of.MinPLogitsWarper,
    processors_of.TypicalLogitsWarper,
    processors_of.EpsilonLogitsWarper,
    processors_of.EtaLogitsWarper,
    processors_of.InfNanRemoveLogitsProcessor,
    processors_of.LogitNormalization,
    processors_of.SuppressTokensLogitsProcessor,
)
# Processors that forbid the end of a row which has fewer tokens than so many.
MIN_LENGTH = {
    processors_of.MinLengthLogitsProcessor: lambda own: own.min_length,
    processors_of.MinNewTokensLengthLogitsProcessor: lambda own: own.prompt_length_to_skip + own.min_new_tokens,
}
# Processors that remember their last call: a rejected draft cannot be taken back from them.
STATEFUL = (
    processors_of.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    processors_of.SynthIDTextWatermarkLogitsProcessor,
)


def _kind(processor) -> str:
    if type(processor) is processors_of.PrefixConstrainedLogitsProcessor:
        return "constraint"
    if type(processor) in MIN_LENGTH:
        return "min length"
    return "pointwise" if type(processor) in POINTWISE else "by length"


def longest(criteria: StoppingCriteriaList) -> int:
    """How many tokens a row can reach, its prompt among them: a criterion of the caller's own replaces that of the config."""
    return min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))


class Sequences:
    """Prompts [batch, prompt_length] (left-padded, all rows equally wide) and their continuations of unequal length.

    `live` lists the rows still decoding (indices into the batch); every other argument called rows or starts is in the
    order of `live`. `generated[b]` counts the tokens of batch row b after its prompt. Processors and stopping criteria
    are called once for each distinct length, with the ids of the *whole* batch cut or right-padded to that length (as
    plain generation pads finished rows), so that they see the row indices and shapes of plain generation; what they
    answer for rows without a token at that length is not used.

    Args:
        input_ids: int64 [batch, prompt_length].
        attention_mask: [batch, >= prompt_length], 0 where a prompt column is padding; None when there is no padding.
        pad_token_id: fills rows that finish early; None when the model has none.
        processors, criteria: as `generate()` hands them to a decoding loop.
        keep_scores, keep_logits: collect the scores after, the logits before the processors, for every position.
        generation_config: of the run, for drafters; None is greedy.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        pad_token_id: int | None,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        keep_scores: bool = False,
        keep_logits: bool = False,
        generation_config: GenerationConfig | None = None,
    ):
        for processor in processors:
            if isinstance(processor, STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} remembers its last call, so tokens drafted in vain cannot be taken back "
                    "from it: generate without an assistant model and without prompt_lookup_num_tokens"
                )
        self.batch_size, self.prompt_length = input_ids.shape
        self.generation_config = generation_config or GenerationConfig(do_sample=False)
        self.device = input_ids.device
        self.prompt_mask = None if attention_mask is None else attention_mask[:, -self.prompt_length :]
        self.padding = 0 if pad_token_id is None else pad_token_id
        self.tokens = input_ids.long()  # as plain generation's are after its first token
        self.live = list(range(self.batch_size))
        self.generated = [0] * self.batch_size
        self.newest = self.tokens[:, self.prompt_length - 1].tolist()  # the last token of each row
        self.stopped_at: list[int | None] = [None] * self.batch_size  # length at which a row stopped
        self._index = torch.arange(self.batch_size, device=self.device)  # `live` on the device

        self.processors = [(kind, list(group)) for kind, group in groupby(processors, _kind)]
        self.processors_read_ids = any(kind != "pointwise" for kind, _ in self.processors)
        self.max_length = longest(criteria)
        self.eos = {int(t) for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten()}
        self.criteria = StoppingCriteriaList(
            c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        # without an end-of-sequence token plain generation lets a stopped row run on until all rows have stopped
        self.rows_end = any(hasattr(c, "eos_token_id") for c in criteria)
        self._uniforms = Uniforms()
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None

    @property
    def collects(self) -> bool:
        """Whether scores or logits are kept."""
        return self.scores is not None or self.logits is not None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each live row, prompt columns included."""
        return [self.prompt_length + self.generated[b] for b in self.live]

    @property
    def limits(self) -> list[int]:
        """How many drafts each live row can use: one less than it may still grow, as the target adds a token."""
        return [
            max(self.max_length - length - 1, 0) if self.unfinished(b) else 0
            for b, length in zip(self.live, self.lengths)
        ]

    def _whole(self) -> int | None:
        """The length of all rows, where it is one and none has left: then slices do what indices do otherwise."""
        generated = self.generated[0]
        if len(self.live) == self.batch_size and all(count == generated for count in self.generated):
            return self.prompt_length + generated
        return None

    def last(self, width: int) -> torch.Tensor:
        """The last `width` tokens of each live row, int64 [rows, width]."""
        if (length := self._whole()) is not None:
            return self.tokens[:, length - width : length]
        if width == 1 and self.device.type == "cpu":  # in Python: of so few numbers operators take longer
            return torch.tensor([[self.newest[b]] for b in self.live])
        lengths = torch.tensor(self.lengths, device=self.device)
        return self.tokens[self._index[:, None], lengths[:, None] + torch.arange(-width, 0, device=self.device)]

    def token_lists(self) -> list[list[int]]:
        """The tokens of each live row without padding."""
        rows = self.tokens[self._index].tolist()
        if self.prompt_mask is None:
            return [row[:length] for row, length in zip(rows, self.lengths)]
        masks = self.prompt_mask[self._index].tolist()
        return [
            [token for token, real in zip(row, mask) if real] + row[self.prompt_length : length]
            for row, mask, length in zip(rows, masks, self.lengths)
        ]

    def uniforms(self, depth: torch.Tensor | None) -> torch.Tensor:
        """What the tokens of each live row are drawn by: float64 [rows, width]. depth: int64 [rows, width], how many tokens
        behind the row's end each one stands; None for the one at the end."""
        index = np.zeros((len(self.live), 1), np.int64) if depth is None else depth.cpu().numpy()
        positions = np.array(self.lengths)[:, None] + index
        return self._uniforms(self.live, positions).to(self.device)

    def write(self, tokens: torch.Tensor, offset: int = 0) -> None:
        """Puts `tokens` [rows, width] after each live row's last token (`offset` columns later), without counting them."""
        needed = self._reserve(offset + tokens.shape[1])
        if (length := self._whole()) is not None:
            self.tokens[:, length + offset : needed] = tokens
            return
        starts = torch.tensor(self.lengths, device=self.device) + offset
        columns = starts[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.tokens[self._index[:, None], columns] = tokens

    def _reserve(self, columns: int) -> int:
        """Makes room for so many columns after the longest row. Returns the columns that these need."""
        needed = max(self.lengths) + columns
        if needed > self.tokens.shape[1]:
            self.tokens = pad(self.tokens, (0, max(needed - self.tokens.shape[1], 64)), value=self.padding)
        return needed

    @property
    def are_bare(self) -> bool:
        """Whether logits are taken as they are."""
        return not self.processors and not self.collects

    def process(self, logits: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Scores after the processors, float32 (or what these give) [rows, width, vocabulary]. `logits[:, i]` is for the token `offset + i`
        places after each row's last one; drafted tokens before it must have been written with `write`."""
        scores = logits.float()
        for kind, group in self.processors:
            if kind == "pointwise":
                flat = scores.flatten(0, 1)
                for processor in group:
                    flat = processor(None, flat)
                scores = flat.view_as(scores)
                continue
            if kind == "min length":
                for processor in group:
                    scores = self._without_ends(processor, scores, offset)
                continue
            group, before, scores = LogitsProcessorList(group), scores, scores.clone()
            if kind == "constraint":
                for processor in group:
                    self._constrain(processor, scores, offset)
                continue
            for length, places in self._places([scores.shape[1]] * len(self.live), offset).items():
                live, position = zip(*places)
                rows = [self.live[row] for row in live]
                whole = before.new_zeros(self.batch_size, before.shape[-1])
                whole[rows] = before[live, position]
                processed = group(self._ids(length), whole)[rows]
                scores = scores.to(torch.promote_types(scores.dtype, processed.dtype))  # a user's own may give float64
                scores[live, position] = processed.to(scores.dtype)
        return scores

    def extend(
        self, tokens: torch.Tensor, accepted: torch.Tensor, counts: torch.Tensor, scores=None, logits=None
    ) -> tuple[list[list[int]], list[int], list[int]]:
        """Appends to each unfinished live row its first `accepted + 1` tokens, or fewer where it stops before.

        Args: tokens [rows, width]; accepted and counts [rows] (see `verify`); scores and logits [rows, width, vocabulary]
        of these positions, where they are collected. One transfer to the host, whatever the batch.
        Returns: the tokens appended to each row, and how many drafts each row had accepted and proposed."""
        width = tokens.shape[1]
        host = torch.cat([accepted[:, None], counts[:, None], tokens], 1).tolist()
        kept = []
        for b, length, row in zip(self.live, self.lengths, host):
            keep = min(row[0] + 1, self.max_length - length) if self.unfinished(b) else 0
            if self.stopped_at[b] is None:
                ends = next((i + 1 for i in range(keep) if row[2 + i] in self.eos), None)
                if ends or length + keep == self.max_length:
                    keep = ends or keep
                    self.stopped_at[b] = length + keep
            kept.append(keep)
        for collected, values in ((self.scores, scores), (self.logits, logits)):
            if collected is not None:
                self._collect(collected, values, kept)
        if self.criteria:
            self.write(tokens)
            self._apply_criteria(kept)
        new = [row[2 : 2 + count] for row, count in zip(host, kept)]
        if self.device.type == "cpu":
            self._reserve(width)
            whole = self.tokens.numpy()
            for b, length, some in zip(self.live, self.lengths, new):
                whole[b, length : length + width] = some + [self.padding] * (width - len(some))
        else:
            if min(kept) < width:
                keep = torch.tensor(kept, device=self.device)[:, None]
                tokens = torch.where(torch.arange(width, device=self.device) < keep, tokens, self.padding)
            self.write(tokens)
        for b, some in zip(self.live, new):
            if some:
                self.generated[b] += len(some)
                self.newest[b] = some[-1]
        return new, [min(row[0], count) for row, count in zip(host, kept)], [row[1] for row in host]

    def unfinished(self, b: int) -> bool:
        """Whether batch row b still grows."""
        if self.rows_end:
            return self.stopped_at[b] is None
        length = self.prompt_length + self.generated[b]
        running = any(stop is None for stop in self.stopped_at)
        return length < self.max_length and (running or length < max(self.stopped_at))

    def select(self, rows: list[int]) -> None:
        """Only these rows (indices into `live`) go on."""
        self.live = [self.live[row] for row in rows]
        self._index = torch.tensor(self.live, device=self.device)

    def finish(self) -> torch.Tensor:
        """The finished ids, int64 [batch, longest row], padded on the right; collected scores are cut to match."""
        longest = max(self.generated) if self.rows_end else max(self.stopped_at) - self.prompt_length
        for collected in (self.scores, self.logits):
            if collected is not None:
                del collected[longest:]
        return self.tokens[:, : self.prompt_length + longest]

    def _without_ends(self, processor, scores: torch.Tensor, offset: int) -> torch.Tensor:
        """`scores` [rows, width, vocabulary] without the ends of rows that are too short for them."""
        missing = [MIN_LENGTH[type(processor)](processor) - offset - length for length in self.lengths]
        if max(missing) <= 0:
            return scores
        short = torch.arange(scores.shape[1]) < torch.tensor(missing)[:, None]
        ends = processor.eos_token_id.flatten()
        ends = ends[(ends >= 0) & (ends < scores.shape[-1])]  # -1: never
        scores = scores.clone()
        scores[..., ends] = scores[..., ends].masked_fill(short[..., None].to(scores.device), -torch.inf)
        return scores

    def _constrain(self, processor, scores: torch.Tensor, offset: int) -> None:
        """`prefix_allowed_tokens_fn` on `scores` in place, row by row: it is asked only about ids that it allowed itself,
        so it is not asked about what follows a drafted token that it excludes."""
        allowed = processor._prefix_allowed_tokens_fn
        for row, (b, length) in enumerate(zip(self.live, self.lengths)):
            own = processors_of.PrefixConstrainedLogitsProcessor(lambda _, ids, b=b: allowed(b, ids), num_beams=1)
            for position in range(scores.shape[1]) if self.unfinished(b) else ():
                place = length + offset + position
                scores[row, position] = own(self._ids(place)[b : b + 1], scores[row, position][None])[0]
                drafted = self.tokens[b, place : place + 1]
                if scores[row, position, drafted].isneginf().any():
                    break

    def _places(self, counts: list[int], offset: int = 0) -> dict[int, list[tuple[int, int]]]:
        """length -> the (row, position) pairs whose token has that many tokens before it, shortest first."""
        places: dict[int, list[tuple[int, int]]] = {}
        for row, (length, count) in enumerate(zip(self.lengths, counts)):
            for position in range(count):
                places.setdefault(length + offset + position, []).append((row, position))
        return dict(sorted(places.items()))

    def _ids(self, length: int) -> torch.Tensor:
        if length > self.tokens.shape[1]:
            self.tokens = pad(self.tokens, (0, length - self.tokens.shape[1]), value=self.padding)
        return self.tokens[:, :length]

    def _collect(self, collected: list[torch.Tensor], values: torch.Tensor, kept: list[int]) -> None:
        for length, places in self._places(kept).items():
            step = length - self.prompt_length
            if step == len(collected):
                collected.append(values.new_zeros(self.batch_size, values.shape[-1]))
            row, position = zip(*places)
            collected[step][[self.live[r] for r in row]] = values[row, position]

    def _apply_criteria(self, kept: list[int]) -> None:
        """Shortens `kept` where a criterion other than length and end-of-sequence stops a row; marks the row stopped."""
        for length, places in self._places(kept).items():
            scores = None if self.scores is None else tuple(self.scores[: length + 1 - self.prompt_length])
            stops = self.criteria(self._ids(length + 1), scores).tolist()
            for row, position in places:
                b, end = self.live[row], length + 1
                if stops[b] and (self.stopped_at[b] is None or self.stopped_at[b] > end):
                    self.stopped_at[b] = end
                    if self.rows_end:
                        kept[row] = position + 1
