"""The token ids of a batch whose sequences grow independently, with the logits processors and stopping criteria."""

from itertools import chain, groupby

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_of
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_efficient.cache.bookkeeping.tensors import to_device
from hf_efficient.generation.processor_kinds import MIN_LENGTH, OPTION_OF_STATEFUL, kind_of
from hf_efficient.generation.speculation.sampling import Uniforms
from hf_efficient.integrations.transformers_loop import allowed_tokens_fn


_MAX_LENGTH = 1 << 40  # a longer one is none; 64-bit integers hold this one


def longest(criteria: StoppingCriteriaList, prompt_length: int) -> int:
    """Tokens that a sequence can reach, its prompt among them: at least one more, as in plain generation. The caller's
    own criteria count, too."""
    most = min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
    return min(max(most, prompt_length + 1), _MAX_LENGTH)


def is_left_padded(input_ids: torch.Tensor, model_kwargs: dict) -> bool:
    """Whether all padding stands before the prompts and positions count from each prompt's first token, as `generate()`
    lays them out. A cache of pages holds no other prompts.

    Args:
        input_ids: int64 [batch, length].
        model_kwargs: `attention_mask` [batch, length], 0 at padding, or None; `position_ids` [batch or 1, length].
            Those of several axes, [axes, batch, length], may be any.
    """
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        expected = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return position_ids is None or _are_equal(position_ids, expected)
    if mask.shape != input_ids.shape:
        return False
    is_token = mask != 0
    if not bool(is_token[:, -1].all() and (is_token[:, 1:] >= is_token[:, :-1]).all()):
        return False
    expected = (is_token.long().cumsum(-1) - 1).clamp(min=0)
    return position_ids is None or _are_equal(torch.where(is_token, position_ids, 0), expected)


def _are_equal(position_ids: torch.Tensor, expected: torch.Tensor) -> bool:
    if position_ids.dim() == 3:
        return True
    is_wide = position_ids.dim() == 2 and position_ids.shape[1] == expected.shape[1]
    return is_wide and bool((position_ids == expected).all())


class Sequences:
    """Prompts [batch, prompt_length] (left-padded, all equally wide) and their continuations of unequal length.

    `live` lists the sequences still decoding (indices into the batch). Every other argument or result with one entry a
    row is in the order of `live`. `generated[b]` counts the tokens of sequence b of the batch after its prompt.

    Processors and stopping criteria see the row indices and shapes of plain generation: they are called once for each
    distinct length, with the ids of the *whole* batch cut or right-padded to that length. Their answers for sequences
    without a token at that length are not used.

    Args:
        input_ids: int64 [batch, prompt_length].
        attention_mask: [batch, >= prompt_length], 0 at padding; None when there is none.
        pad_token_id: fills sequences that finish early; None when the model has none.
        processors, criteria: as `generate()` hands them to a decoding method.
        keep_scores, keep_logits: collect the scores after, the logits before the processors, for every position.
        pads_finished: sequences that have ended go on with padding until all have, as in plain generation. Without
            drafts only.
        generation_config: of the call, for drafters; None is greedy.

    source: what the decoder of an encoder-decoder reads, a `Source` of the whole batch; else None.
    """

    source = None

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        pad_token_id: int | None,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        keep_scores: bool = False,
        keep_logits: bool = False,
        pads_finished: bool = False,
        generation_config: GenerationConfig | None = None,
    ):
        for processor in processors:
            for kind, option in OPTION_OF_STATEFUL.items():
                if isinstance(processor, kind):
                    raise ValueError(
                        f"{option}: its {type(processor).__name__} remembers its last call, so tokens drafted in vain "
                        "cannot be taken back from it. Leave it out, or generate without an assistant model, "
                        "prompt_lookup_num_tokens and speculative_generate"
                    )
        self.batch_size, self.prompt_length = input_ids.shape
        self.generation_config = generation_config or GenerationConfig(do_sample=False)
        self.device = input_ids.device
        self.prompt_mask = None if attention_mask is None else attention_mask[:, -self.prompt_length :]
        self.padding = 0 if pad_token_id is None else pad_token_id
        self.tokens = input_ids.long()  # as plain generation returns them
        self.live = list(range(self.batch_size))
        self.generated = [0] * self.batch_size
        self.newest = self.tokens[:, self.prompt_length - 1].tolist()  # the last token of each sequence
        self.stopped_at: list[int | None] = [None] * self.batch_size  # length at which a sequence stopped
        self._running = self.batch_size  # sequences that have not stopped
        self._index = torch.arange(self.batch_size, device=self.device)  # `live` on the device

        self.processors = [(kind, list(group)) for kind, group in groupby(processors, kind_of)]
        self.processors_read_ids = any(kind != "pointwise" for kind, _ in self.processors)
        self.max_length = longest(criteria, self.prompt_length)
        self.eos = {int(t) for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten()}
        self.criteria = StoppingCriteriaList(
            c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        # without an end-of-sequence token plain generation continues stopped sequences until all have stopped
        has_ends = any(hasattr(c, "eos_token_id") for c in criteria)
        self.end_one_by_one = has_ends and not pads_finished
        self.pads_finished = has_ends and pads_finished
        self._uniforms = Uniforms()
        self._written = 0  # columns that `write` has filled behind the sequences since `extend`
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None

    @property
    def collects(self) -> bool:
        """Whether scores or logits are kept."""
        return self.scores is not None or self.logits is not None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each live sequence, with its prompt and the padding before it."""
        return [self.prompt_length + self.generated[b] for b in self.live]

    @property
    def limits(self) -> list[int]:
        """Drafts that each live sequence can use: one less than it may still grow, as the target adds a token."""
        return [
            max(self.max_length - length - 1, 0) if self.unfinished(b) else 0
            for b, length in zip(self.live, self.lengths)
        ]

    def _common_length(self) -> int | None:
        """The length of all sequences where it is one and none has left: slices can then replace indices."""
        generated = self.generated[0]
        if len(self.live) == self.batch_size and all(count == generated for count in self.generated):
            return self.prompt_length + generated
        return None

    def last(self, width: int) -> torch.Tensor:
        """The last `width` tokens of each live sequence, int64 [rows, width]."""
        if (length := self._common_length()) is not None:
            return self.tokens[:, length - width : length]
        if width == 1 and self.device.type == "cpu":  # torch's calls take longer on so few numbers
            return torch.tensor([[self.newest[b]] for b in self.live])
        lengths = to_device(self.lengths, torch.int64, self.device)
        return self.tokens[self._index[:, None], lengths[:, None] + torch.arange(-width, 0, device=self.device)]

    def token_lists(self) -> list[list[int]]:
        """The tokens of each live sequence without padding."""
        rows = self.tokens[self._index].tolist()
        if self.prompt_mask is None:
            return [row[:length] for row, length in zip(rows, self.lengths)]
        masks = self.prompt_mask[self._index].tolist()
        return [
            [token for token, real in zip(row, mask) if real] + row[self.prompt_length : length]
            for row, mask, length in zip(rows, masks, self.lengths)
        ]

    def uniforms(self, depth: torch.Tensor | None) -> torch.Tensor:
        """The random numbers that tokens are drawn by: float64 [rows, width].

        depth: int64 [rows, width], how many tokens stand between each one and the sequence's last token; None: the next
            token of each.
        """
        offset = np.zeros((len(self.live), 1), np.int64) if depth is None else depth.cpu().numpy()
        positions = np.array(self.lengths)[:, None] + offset
        return self._uniforms(self.live, positions).to(self.device)

    def write(self, tokens: torch.Tensor, offset: int = 0) -> None:
        """Writes `tokens` [rows, width] behind each live sequence, `offset` positions later, without counting them."""
        needed = self._reserve(offset + tokens.shape[1])
        self._written = max(self._written, offset + tokens.shape[1])
        if (length := self._common_length()) is not None:
            self.tokens[:, length + offset : needed] = tokens
            return
        starts = to_device(self.lengths, torch.int64, self.device) + offset
        columns = starts[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.tokens[self._index[:, None], columns] = tokens

    def _reserve(self, columns: int) -> int:
        """Makes room for so many columns behind the longest sequence. Returns the columns that are needed in all."""
        needed = max(self.lengths) + columns
        if needed > self.tokens.shape[1]:
            self.tokens = pad(self.tokens, (0, max(needed - self.tokens.shape[1], 64)), value=self.padding)
        return needed

    @property
    def needs_scores(self) -> bool:
        """Whether a processor changes the logits, or the output collects them. Else their argmax is enough."""
        return bool(self.processors) or self.collects

    def process(self, logits: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Scores after the processors: [rows, width, vocabulary] in float32, or a wider dtype that a processor returns.

        `logits[:, i]` is of the token `offset + i` positions behind each sequence's last one. Drafted tokens before it
        must have been written with `write`.
        """
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
            counts = [scores.shape[1] * self.unfinished(b) for b in self.live]
            for length, pairs in self._by_length(counts, offset).items():
                live, position = zip(*pairs)
                rows = [self.live[row] for row in live]
                whole = before.new_zeros(self.batch_size, before.shape[-1])
                whole[rows] = before[live, position]
                processed = group(self._ids(length), whole)[rows]
                scores = scores.to(torch.promote_types(scores.dtype, processed.dtype))  # a user's may return float64
                scores[live, position] = processed.to(scores.dtype)
        return scores

    def extend(
        self,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None,
        counts: torch.Tensor | None,
        scores=None,
        logits=None,
        read: list[list[int]] | None = None,
    ) -> tuple[list[list[int]], list[int], list[int]]:
        """Appends to each unfinished live sequence its first `accepted + 1` of `tokens` int64 [rows, width], or fewer
        where it stops before. Takes one transfer to the host, whatever the batch.

        accepted, counts: int64 [rows], drafts accepted (see `verify`) and proposed; None for no drafts. scores, logits:
        [rows, width, vocabulary] of these positions, where they are collected. read: `tokens` where the host has read
        them.

        Returns the tokens appended to each sequence, and how many drafts each had accepted and proposed.
        """
        if self.pads_finished and any(self.stopped_at):
            has_ended = [[self.stopped_at[b] is not None] for b in self.live]
            tokens = torch.where(torch.tensor(has_ended, device=self.device), self.padding, tokens)
        hits, proposed, ids = self._on_host(tokens, accepted, counts, read)
        kept = []
        for b, length, hit, row in zip(self.live, self.lengths, hits, ids):
            keep = min(hit + 1, self.max_length - length) if self.unfinished(b) else 0
            if self.stopped_at[b] is None:
                ends = next((i + 1 for i in range(keep) if row[i] in self.eos), None)
                if ends or length + keep == self.max_length:
                    keep = ends or keep
                    self._stop(b, length + keep)
            kept.append(keep)
        for collected, values in ((self.scores, scores), (self.logits, logits)):
            if collected is not None:
                self._collect(collected, values, kept)
        if self.criteria:
            self.write(tokens)
            self._apply_criteria(kept)
        new = [row[:count] for row, count in zip(ids, kept)]
        width = max(tokens.shape[1], self._written)  # a drafter may have written more than was verified
        if self.device.type == "cpu":
            self._reserve(width)
            whole = self.tokens.numpy()
            for b, length, some in zip(self.live, self.lengths, new):
                whole[b, length : length + width] = some + [self.padding] * (width - len(some))
        else:
            if min(kept) < width:
                tokens, keep = pad(tokens, (0, width - tokens.shape[1])), to_device(kept, torch.int64, self.device)
                tokens = torch.where(torch.arange(width, device=self.device) < keep[:, None], tokens, self.padding)
            self.write(tokens)
        self._written = 0
        for b, some in zip(self.live, new):
            if some:
                self.generated[b] += len(some)
                self.newest[b] = some[-1]
        return new, list(map(min, hits, kept)), proposed

    def _on_host(self, tokens, accepted, counts, read) -> tuple[list[int], list[int], list[list[int]]]:
        """`accepted`, `counts` and `tokens`, as in `extend`, in lists."""
        if accepted is None:
            nothing = [0] * len(tokens)
            return nothing, nothing, tokens.tolist() if read is None else read
        if self.device.type == "cpu":
            return accepted.tolist(), counts.tolist(), tokens.tolist()
        rows = torch.cat([accepted[:, None], counts[:, None], tokens], 1).tolist()
        return [row[0] for row in rows], [row[1] for row in rows], [row[2:] for row in rows]

    def unfinished(self, b: int) -> bool:
        """Whether sequence b of the batch still grows."""
        if self.end_one_by_one:
            return self.stopped_at[b] is None
        length = self.prompt_length + self.generated[b]
        return length < self.max_length and (self._running > 0 or length < max(self.stopped_at))

    def _stop(self, b: int, length: int) -> None:
        """Sequence b ends with `length` tokens, its prompt among them, or earlier than it was to."""
        self._running -= self.stopped_at[b] is None
        self.stopped_at[b] = length

    def select(self, rows: list[int]) -> None:
        """Only these sequences (indices into `live`) go on."""
        self.live = [self.live[row] for row in rows]
        self._index = to_device(self.live, torch.int64, self.device)

    def finish(self) -> torch.Tensor:
        """The finished ids, int64 [batch, longest sequence], padded on the right; collected scores are cut to match."""
        columns = self.final_columns()
        for collected in (self.scores, self.logits):
            if collected is not None:
                del collected[columns:]
        return self.tokens[:, : self.prompt_length + columns]

    def final_columns(self) -> int:
        """Generated columns of the output, once all sequences have stopped."""
        return max(self.generated) if self.end_one_by_one else max(self.stopped_at) - self.prompt_length

    def _without_ends(self, processor, scores: torch.Tensor, offset: int) -> torch.Tensor:
        """`scores` [rows, width, vocabulary] with -inf at the end-of-sequence tokens that come too early."""
        missing = [MIN_LENGTH[type(processor)](processor) - offset - length for length in self.lengths]
        if max(missing) <= 0:
            return scores
        short = torch.arange(scores.shape[1]) < torch.tensor(missing)[:, None]
        ends = processor.eos_token_id.flatten()
        ends = ends[(ends >= 0) & (ends < scores.shape[-1])]  # an id of -1 stands for none
        scores = scores.clone()
        scores[..., ends] = scores[..., ends].masked_fill(short[..., None].to(scores.device), -torch.inf)
        return scores

    def _constrain(self, processor, scores: torch.Tensor, offset: int) -> None:
        """Applies `prefix_allowed_tokens_fn` to `scores` in place, sequence by sequence. The function may fail on ids
        that it has excluded itself, so it is not asked what follows a drafted token that it excludes."""
        allowed = allowed_tokens_fn(processor)
        for row, (b, length) in enumerate(zip(self.live, self.lengths)):
            own = processors_of.PrefixConstrainedLogitsProcessor(lambda _, ids, b=b: allowed(b, ids), num_beams=1)
            for position in range(scores.shape[1]) if self.unfinished(b) else ():
                column = length + offset + position
                scores[row, position] = own(self._ids(column)[b : b + 1], scores[row, position][None])[0]
                drafted = self.tokens[b, column : column + 1]
                if scores[row, position, drafted].isneginf().any():
                    break

    def _by_length(self, counts: list[int], offset: int = 0) -> dict[int, list[tuple[int, int]]]:
        """Length -> the (row, position) pairs whose token has so many tokens before it, shortest first."""
        pairs: dict[int, list[tuple[int, int]]] = {}
        for row, (length, count) in enumerate(zip(self.lengths, counts)):
            for position in range(count):
                pairs.setdefault(length + offset + position, []).append((row, position))
        return dict(sorted(pairs.items()))

    def _ids(self, length: int) -> torch.Tensor:
        if length > self.tokens.shape[1]:
            self.tokens = pad(self.tokens, (0, length - self.tokens.shape[1]), value=self.padding)
        return self.tokens[:, :length]

    def _collect(self, collected: list[torch.Tensor], values: torch.Tensor, kept: list[int]) -> None:
        if values.shape[1] == 1 and self._common_length() is not None and all(kept):
            collected.append(values[:, 0].clone())
            return
        for length, pairs in self._by_length(kept).items():
            step = length - self.prompt_length
            if step == len(collected):
                collected.append(values.new_zeros(self.batch_size, values.shape[-1]))
            row, position = zip(*pairs)
            collected[step][[self.live[r] for r in row]] = values[row, position]

    def _apply_criteria(self, kept: list[int]) -> None:
        """Shortens `kept` where other criteria than length and end-of-sequence stop a sequence, and marks it."""
        for length, pairs in self._by_length(kept).items():
            scores = None if self.scores is None else tuple(self.scores[: length + 1 - self.prompt_length])
            stops = self.criteria(self._ids(length + 1), scores).tolist()
            for row, position in pairs:
                b, end = self.live[row], length + 1
                if not stops[b] or (self.stopped_at[b] is not None and self.stopped_at[b] <= end):
                    continue
                self._stop(b, end)
                if self.end_one_by_one:
                    kept[row] = position + 1
                    for step in chain(*((x or ())[end - self.prompt_length :] for x in (self.scores, self.logits))):
                        step[b] = 0
