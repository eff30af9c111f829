"""Drafts from a smaller model with the same tokenizer."""

import torch
from transformers import PreTrainedModel

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.drafters.base import Drafter, Proposal
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.sequences import Sequences


class AssistantDrafter(Drafter):
    """Lets `model` continue every row, over a `PagedCache` of its own. In a sampled run it draws its drafts.

    It drafts `model.generation_config.num_assistant_tokens` tokens (20 when unset), and a row stops early after a token
    the draft itself gave less than `assistant_confidence_threshold` probability (0.4 when unset, 0 never stops): the
    two settings transformers' own assisted generation reads.

    Args:
        model: a decoder-only causal LM with the target's tokenizer.
        tokenizers: the target's and the draft's, both needed where the vocabulary sizes in the configs differ (padded
            embeddings); their vocabularies must be equal.
    """

    draws = True

    def __init__(self, model, tokenizers=(None, None)):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model={type(model).__name__}: expected a transformers model")
        self.model, self.tokenizers = model, tokenizers
        self.max_tokens, self.threshold = draft_settings(model)

    def check(self, model) -> None:
        RaggedModel.check(self.model, 1, "assistant_model")
        target, draft = (m.config.get_text_config(decoder=True).vocab_size for m in (model, self.model))
        if all(tokenizer is not None for tokenizer in self.tokenizers):
            if difference := first_difference(*self.tokenizers):
                raise ValueError(
                    f"the tokenizers differ: {difference}. A draft with another tokenizer is a "
                    "TranslatedDrafter(model, tokenizer, assistant_tokenizer)"
                )
        elif target != draft:
            raise ValueError(
                f"the target has vocab_size={target}, the assistant vocab_size={draft}: speculation needs the same "
                "tokenizer for both. If they differ, or only the embeddings are padded differently, say so with "
                "generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)"
            )
        self.vocabulary = target
        self.relative_cost = self.model.num_parameters() / max(model.num_parameters(), 1)

    def begin(self, sequences: Sequences, hidden=None) -> None:
        self.sequences = sequences
        prompts = sequences.tokens[sequences.live, : sequences.prompt_length]
        mask = None if sequences.prompt_mask is None else sequences.prompt_mask[sequences.live]
        self._read_prompts(prompts, mask, sequences.max_length - sequences.prompt_length)
        self.cached = [0] * len(prompts)  # generated tokens of each row that the draft's cache holds

    def _read_prompts(self, prompts: torch.Tensor, mask: torch.Tensor | None, max_new_tokens: int) -> None:
        """prompts int64 [rows, columns], and their mask or None, go into a new cache of the draft."""
        RaggedModel.check(self.model, len(prompts), "assistant_model")
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        last = limit and limit - 1
        self.runner = RaggedModel(self.model, PagedCache(self.model.config), max_new_tokens, last)
        prompts = prompts.to(self.model.device)
        mask = None if mask is None else mask.to(self.model.device)
        ones = torch.ones_like(prompts) if mask is None else mask.long()
        kwargs = {"attention_mask": mask, "position_ids": (ones.cumsum(1) - 1).clamp(min=0, max=last)}
        if self.runner.limits_logits:
            kwargs["logits_to_keep"] = 1
        self.runner.prefill(prompts, self.sequences.generation_config, kwargs)

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        width = min(self.max_tokens, max(limits), nodes)
        if width == 0:
            return None
        sequences, device = self.sequences, self.model.device
        do_sample = sequences.generation_config.do_sample
        done = [length - sequences.prompt_length for length in sequences.lengths]
        # All rows feed equally many tokens the draft has not seen; one with fewer repeats some of its last.
        pending = max(total - cached for total, cached in zip(done, self.cached))
        first = [max(total - pending, 0) for total in done]  # a row that has ended may stay, and be shorter
        self.runner.rewind(first)
        fed = sequences.last(pending).to(device)
        limit = torch.tensor(limits, device=sequences.device)
        confident = torch.ones_like(limit, dtype=torch.bool)
        counts, tokens, distributions = torch.zeros_like(limit), [], []
        for step in range(width):
            logits = self.runner(fed, first, keep=1)[..., : self.vocabulary].to(sequences.device)
            if pending > min(done):
                self.runner.rewind([total + step for total in done])
            if logits.shape[-1] < self.vocabulary:
                missing = self.vocabulary - logits.shape[-1]
                logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
            scores = sequences.process(logits, offset=step)[:, 0]
            if do_sample:
                distribution = scores.softmax(-1)
                token = torch.multinomial(distribution, 1)
                distributions.append(distribution)
            else:
                token = scores.argmax(-1, keepdim=True)
            tokens.append(token)
            counts += confident & (limit > step)
            first = [total + step for total in done]
            fed = token.to(device)
            if step + 1 == width:
                break
            if self.threshold > 0:
                probability = scores.gather(1, token)[:, 0] - scores.logsumexp(-1)
                confident &= (probability.exp() >= self.threshold) & (limit > step + 1)
                if not confident.any():
                    break
            if sequences.processors_read_ids:
                sequences.write(token, offset=step)
        self.cached = [total + len(tokens) - 1 for total in done]
        probabilities = torch.stack(distributions, 1) if do_sample else None
        return Proposal(torch.cat(tokens, 1), counts, probabilities)

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        totals = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        # the last token of a row is the target's own and was never fed
        self.cached = [min(cached, total - 1) for cached, total in zip(self.cached, totals)]
        self._end_with_the_rows()

    def _end_with_the_rows(self) -> None:
        if not any(map(self.sequences.unfinished, self.sequences.live)):
            self.runner = self.sequences = None  # the drafter may stay, its cache need not

    def select(self, rows: list[int]) -> None:
        self.cached = [self.cached[row] for row in rows]
        self.runner.select(rows)


def draft_settings(model, max_tokens: int = 20) -> tuple[int, float]:
    """How many tokens `model` drafts at most, and below which probability of a token a row stops: what its
    `generation_config` says, or `max_tokens`, and what transformers has by default."""
    given = model.generation_config
    tokens, threshold = given.num_assistant_tokens, given.assistant_confidence_threshold
    tokens = max_tokens if tokens is None else int(tokens)
    if tokens < 1:
        raise ValueError(f"num_assistant_tokens={tokens} in the assistant's generation_config: expected at least 1")
    default = given._get_default_generation_params()["assistant_confidence_threshold"]
    return tokens, default if threshold is None else threshold


def first_difference(target, assistant) -> str | None:
    """In which token, the smallest by id, two tokenizers differ, as text; None when they have the same tokens."""
    ours, theirs = target.get_vocab(), assistant.get_vocab()
    if ours == theirs:
        return None
    tokens = [{index: token for token, index in vocabulary.items()} for vocabulary in (ours, theirs)]
    index = min(i for i in tokens[0].keys() | tokens[1].keys() if tokens[0].get(i) != tokens[1].get(i))
    named = [f"{part[index]!r}" if index in part else "no token" for part in tokens]
    return f"token {index} is {named[0]} for the target ({len(ours)} tokens) and {named[1]} for the assistant ({len(theirs)})"
