"""Drafts from a model with another tokenizer."""

import torch

from hf_efficient.generation.drafters.assistant import UNLIMITED, AssistantDrafter
from hf_efficient.generation.drafters.draft_model import check_decoder_only, check_draft, first_difference
from hf_efficient.generation.drafters.translation import Translation
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.sampling import argmax


MIN_OVERLAP = 0.5  # share of the smaller vocabulary that must be common for drafts token by token
_CHUNK = 32  # tokens of one forward: of layers with a window no more can be rewound where a sequence has fewer to read


class TranslatedDrafter(AssistantDrafter):
    """Lets a model with another tokenizer continue every sequence, over a cache of its own. Settings are those of
    `AssistantDrafter`. Neither method changes the target's output.

    - method "tokens": the draft's probabilities are restricted to the tokens that both vocabularies have, and the
      target's tokens are drafted one by one, sampled in sampled calls (Timor et al. 2025, "Accelerating LLM Inference
      with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", token-level intersection).
    - method "text": the draft continues greedily in its own tokens, and the target's tokenizer reads that text. For
      vocabularies with little in common.

    Args:
        model: a decoder-only causal LM.
        tokenizer, assistant_tokenizer: the target's and the draft's.
        method: None takes "tokens" if both vocabularies share half of the smaller one, else "text".

    Raises ValueError for a missing tokenizer, another method, and in `check` for vocabularies without a common token.
    """

    def __init__(self, model, tokenizer, assistant_tokenizer, method: str | None = None):
        super().__init__(model)
        for name, given in (("tokenizer", tokenizer), ("assistant_tokenizer", assistant_tokenizer)):
            if not callable(getattr(given, "decode", None)) or not callable(given):
                raise ValueError(
                    f"{name}={given!r}: drafting with another vocabulary needs the tokenizers of both models"
                )
        if method not in (None, "tokens", "text"):
            raise ValueError(f"method={method!r}: must be 'tokens', 'text' or None")
        self.tokenizers, self.method = (tokenizer, assistant_tokenizer), method

    def check(self, model) -> None:
        check_draft(self.model)
        check_decoder_only(self.model, "TranslatedDrafter")
        target, draft = (m.config.get_text_config(decoder=True).vocab_size for m in (model, self.model))
        self.translation = translation = Translation(*self.tokenizers, target, draft)
        if translation.overlap == 0 and self.method != "text":
            names = [f"{t.convert_ids_to_tokens(0)!r}, {t.convert_ids_to_tokens(1)!r}, ..." for t in self.tokenizers]
            raise ValueError(
                f"the target's tokenizer ({names[0]}) and the assistant's ({names[1]}) have no token in common: "
                "take an assistant of the same language, or draft in text: TranslatedDrafter(..., method='text')"
            )
        self.by_tokens = self.method == "tokens" or (self.method is None and translation.overlap >= MIN_OVERLAP)
        self.draws = self.by_tokens
        pairs = torch.tensor(sorted(translation.draft_of.items())).view(-1, 2)
        self.target_ids, self.draft_ids, self.vocabulary = pairs[:, 0], pairs[:, 1], target
        self.relative_cost = self.model.num_parameters() / max(model.num_parameters(), 1)

    def begin(self, sequences: Sequences, hidden=None) -> None:
        self.sequences = sequences
        done = [length - sequences.prompt_length for length in sequences.lengths]
        rows = [(row[: len(row) - count], row[len(row) - count :]) for row, count in zip(sequences.token_lists(), done)]
        prompts = [self.translation.prompt(prompt) for prompt, _ in rows]
        width = max(map(len, prompts))
        begin = [[0] * (width - len(prompt)) for prompt in prompts]
        ids = torch.tensor([pad + prompt for pad, prompt in zip(begin, prompts)])
        mask = torch.tensor([pad + [1] * len(prompt) for pad, prompt in zip(begin, prompts)])
        self._read_prompts(ids, None if mask.all() else mask, UNLIMITED)
        self.last = [prompt[-1] for prompt in prompts]
        self.before = [prompt[-Translation.CONTEXT :] for prompt, _ in rows]  # the last target tokens of each sequence
        self.rows: list[list[int]] = [[] for _ in rows]  # each answer in the draft's tokens
        self.held: list[list[int]] = [[] for _ in rows]  # what the draft's cache holds of it, with drafts
        self.accept([new for _, new in rows])

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        width = min(self.max_tokens, max(limits), nodes)
        if width == 0:
            return None
        return (self._tokens if self.by_tokens else self._text)(self._catch_up(), limits, width)

    def _catch_up(self) -> torch.Tensor:
        """The draft's logits after each sequence, [rows, draft vocabulary]."""
        pending = []
        for last, row, held in zip(self.last, self.rows, self.held):
            same = next((i for i, (a, b) in enumerate(zip(row, held)) if a != b), min(len(row), len(held)))
            pending.append([last, *row][min(same, len(row) - 1) + 1 :])
        logits: list = [None] * len(pending)
        longest = max(map(len, pending))
        for start in range(0, longest, _CHUNK):
            chunks = [tokens[start : start + _CHUNK] for tokens in pending]
            width = max(map(len, chunks))
            first = [len(row) - len(tokens) + min(start, len(tokens)) for row, tokens in zip(self.rows, pending)]
            self.runner.rewind(first)
            fed = [chunk + [0] * (width - len(chunk)) for chunk in chunks]
            out = self.runner(torch.tensor(fed, device=self.model.device), first)
            for row, (chunk, tokens) in enumerate(zip(chunks, pending)):
                if chunk and start + len(chunk) == len(tokens):
                    logits[row] = out[row, len(chunk) - 1]
        self.runner.rewind([len(row) for row in self.rows])
        self.held = [list(row) for row in self.rows]
        return torch.stack(logits)

    def _feed(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """Adds drafted tokens [rows] of the draft's vocabulary to its cache, as the `step`-th after each sequence."""
        for held, token in zip(self.held, tokens.tolist()):
            held.append(token)
        return self.runner(tokens[:, None].to(self.model.device), [len(row) + step for row in self.rows], keep=1)[:, 0]

    def _tokens(self, logits: torch.Tensor, limits: list[int], width: int) -> Proposal | None:
        """Drafts among the tokens that both vocabularies have."""
        sequences, device = self.sequences, self.sequences.device
        target_ids, draft_ids = self.target_ids.to(device), self.draft_ids.to(device)
        known = torch.full((self.vocabulary,), -1, device=device).scatter_(0, target_ids, draft_ids)
        limit = torch.tensor(limits, device=device)
        going, counts, tokens, distributions = limit > 0, torch.zeros_like(limit), [], []
        for step in range(width):
            common = logits.to(device)[:, draft_ids]
            scores = common.new_full((len(limits), self.vocabulary), float("-inf")).index_copy_(1, target_ids, common)
            scores = sequences.process(scores[:, None], offset=step)[:, 0]
            possible = scores.amax(-1).isfinite()  # not where the processors leave none of the common tokens
            scores = torch.where(possible[:, None], scores, 0.0)
            log_probabilities = scores.log_softmax(-1)
            if sequences.generation_config.do_sample:
                distributions.append(log_probabilities.exp())
                token = torch.multinomial(distributions[-1], 1)
            else:
                token = argmax(scores)[:, None]
            going = going & possible
            tokens.append(token)
            counts += going
            probability = log_probabilities.gather(1, token)[:, 0].exp()
            following = known[token[:, 0]]
            going = going & (following >= 0) & (probability >= self.threshold) & (limit > step + 1)
            if step + 1 == width or not going.any():
                break
            if sequences.processors_read_ids:
                sequences.write(token, offset=step)
            logits = self._feed(following.clamp(min=0), step)
        return Proposal(torch.cat(tokens, 1), counts, torch.stack(distributions, 1) if distributions else None)

    def _text(self, logits: torch.Tensor, limits: list[int], width: int) -> Proposal | None:
        ends = self.tokenizers[1].eos_token_id
        going, drafts = [limit > 0 for limit in limits], [[] for _ in limits]
        for step in range(width):
            probability, token = logits.float().softmax(-1).max(-1)
            for row, (choice, sure) in enumerate(zip(token.tolist(), (probability >= self.threshold).tolist())):
                if going[row]:
                    drafts[row].append(choice)
                    going[row] = sure and choice != ends
            if step + 1 == width or not any(going):
                break
            logits = self._feed(token, step)
        guesses = []
        for last, row, draft, limit in zip(self.last, self.rows, drafts, limits):
            is_end = draft[-1:] == [ends]
            guess = self.translation.back([last, *row], draft[: len(draft) - is_end], is_end) if draft else []
            guesses.append(guess[: min(limit, width)])
        counts = [len(guess) for guess in guesses]
        if not any(counts):
            return None
        filled = [guess + [0] * (max(counts) - len(guess)) for guess in guesses]
        return Proposal(*(torch.tensor(values, device=self.sequences.device) for values in (filled, counts)))

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        for b, new in enumerate(tokens):
            self.rows[b] = self.translation.extend(self.rows[b], self.before[b], new, self.by_tokens)
            self.before[b] = (self.before[b] + new)[-Translation.CONTEXT :]
        self._release_if_finished()

    def select(self, rows: list[int]) -> None:
        for name in ("last", "before", "rows", "held"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        self.runner.select(rows)


def drafter_of(model, tokenizers) -> AssistantDrafter:
    """The drafter for a draft model; tokenizers: the target's and its own, None where not given."""
    if None not in tokenizers and first_difference(*tokenizers):
        return TranslatedDrafter(model, *tokenizers)
    return AssistantDrafter(model, tokenizers)
