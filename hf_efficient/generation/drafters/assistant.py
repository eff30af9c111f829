"""Drafts from a smaller model with the same tokenizer."""

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation import model_state
from hf_efficient.generation.drafters.base import MAX_NODES, Drafter, Proposal
from hf_efficient.generation.drafters.draft_heads import best_first
from hf_efficient.generation.left_padding import is_left_padded
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.replay import pool
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.token_tree import ancestors
from hf_efficient.generation.speculation.verification import largest


_BEAM = 4  # nodes of a tree continued at each depth
UNKNOWN = 2**31  # max_new_tokens of a draft that counts in other tokens
_BRANCHES = 4  # children of a node that are considered


class AssistantDrafter(Drafter):
    """Lets `model` continue every row, over a `PagedCache` of its own. In a sampled run it draws its drafts.

    It drafts `model.generation_config.num_assistant_tokens` tokens (20 when unset), and a row stops early after a token
    the draft itself gave less than `assistant_confidence_threshold` probability (0.4 when unset, 0 never stops): the
    two settings transformers' own assisted generation reads.

    Args:
        model: a decoder-only causal LM with the target's tokenizer.
        tokenizers: the target's and the draft's, both needed where the vocabulary sizes in the configs differ (padded
            embeddings); their vocabularies must be equal.
        tree: propose a tree of up to so many tokens, 1 to 63, instead of one continuation, and draw none: at each depth the 4
            most probable nodes are continued, and the most probable of all are proposed (Li et al. 2024, "EAGLE-2"). Still
            one continuation where logits processors read the ids, or the draft's attention takes no trees (`RaggedModel`).
    """

    draws = True

    tree: int | None = None

    def __init__(self, model, tokenizers=(None, None), tree: int | None = None):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model={type(model).__name__}: expected a transformers model")
        check_tree(tree)
        self.model, self.tokenizers, self.tree = model, tokenizers, tree
        self.draws = tree is None
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
        tokens = None if max_new_tokens == UNKNOWN else prompts.shape[1] + max_new_tokens + MAX_NODES + 1
        kwargs = {"attention_mask": mask, "position_ids": None}
        if is_left_padded(prompts, kwargs):
            kept = self._take(len(prompts), tokens)
        else:
            kept = pool.PoolEntry.of(PagedCache(self.model.config))
        self._borrowed = kept
        self.runner = RaggedModel(self.model, kept.cache, max_new_tokens, last, None, kept.captured, kept.is_capturable)
        prompts = prompts.to(self.model.device)
        mask = None if mask is None else mask.to(self.model.device)
        ones = torch.ones_like(prompts) if mask is None else mask.long()
        kwargs = {"attention_mask": mask, "position_ids": (ones.cumsum(1) - 1).clamp(min=0, max=last)}
        if self.runner.limits_logits:
            kwargs["logits_to_keep"] = 1
        self.runner.prefill(prompts, self.sequences.generation_config, kwargs)

    def _take(self, rows: int, tokens: int | None) -> pool.PoolEntry:
        return pool.take(self.model, rows, tokens, None, model_state.current(self.model))

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        width = min(self.max_tokens, max(limits), nodes)
        if width == 0:
            return None
        sequences, device = self.sequences, self.model.device
        do_sample = self.draws and sequences.generation_config.do_sample
        done = [length - sequences.prompt_length for length in sequences.lengths]
        # All rows feed equally many tokens the draft has not seen; one with fewer repeats some of its last.
        pending = max(total - cached for total, cached in zip(done, self.cached))
        first = [max(total - pending, 0) for total in done]  # a row that has ended may stay, and be shorter
        self.runner.rewind(first)
        fed = sequences.last(pending).to(device)
        limit = torch.tensor(limits, device=sequences.device)
        confident = torch.ones_like(limit, dtype=torch.bool)
        counts, tokens, chances, distributions = torch.zeros_like(limit), [], [], []
        for step in range(width):
            scores = self._scores(fed, first, step)[:, 0]
            if pending > min(done):
                self.runner.rewind([total + step for total in done])
            if self.tree and not sequences.processors_read_ids and self.runner.takes_trees:
                self.cached = done
                return self._grow(scores, done, limits, min(self.tree, nodes))
            if do_sample:
                distribution = scores.softmax(-1)
                token = torch.multinomial(distribution, 1)
                distributions.append(distribution)
            else:
                token = largest(scores)[:, None]
            tokens.append(token)
            chances.append((scores.gather(1, token)[:, 0] - scores.logsumexp(-1)).exp())
            counts += confident & (limit > step)
            first = [total + step for total in done]
            fed = token.to(device)
            if step + 1 == width:
                break
            if self.threshold > 0:
                confident &= (chances[-1] >= self.threshold) & (limit > step + 1)
                if not confident.any():
                    break
            if sequences.processors_read_ids:
                sequences.write(token, offset=step)
        self.cached = [total + len(tokens) - 1 for total in done]
        probabilities = torch.stack(distributions, 1) if do_sample else None
        confidence = torch.stack(chances, 1).cumprod(1) if self.tree else None
        return Proposal(torch.cat(tokens, 1), counts, probabilities, confidence=confidence)

    def _scores(self, fed: torch.Tensor, first: list[int], offset: int, keep: int = 1, tree=None) -> torch.Tensor:
        """Processed scores [rows, keep, target vocabulary] after the last `keep` columns of `fed` (as in `RaggedModel`), the
        `offset`-th after each row's last token."""
        logits = self.runner(fed, first, keep=keep, tree=tree)[..., : self.vocabulary].to(self.sequences.device)
        if logits.shape[-1] < self.vocabulary:
            missing = self.vocabulary - logits.shape[-1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return self.sequences.process(logits, offset)

    def _grow(self, scores: torch.Tensor, done: list[int], limits: list[int], nodes: int) -> Proposal | None:
        """A tree from the scores [rows, vocabulary] after each row's last token, which the cache holds, then as now. Each
        depth is one forward of all that is continued, and of the row's last token."""
        rows, device = len(done), scores.device
        branches, first = min(_BRANCHES, scores.shape[-1]), [total - 1 for total in done]
        chances, likely = scores.softmax(-1)[:, None], scores.new_ones(rows, 1)
        above = at = torch.full((rows, 1), -1, device=device)  # what is continued: numbers as candidates, and as read
        fed, read = self.sequences.last(1), above[:, :0]
        tokens, confidence, parents, depths = [], [], [], []
        for depth in range(1, min(self.max_tokens, max(limits)) + 1):
            best, choice = chances.topk(branches, -1)
            numbered = len(depths)
            tokens.append(choice.flatten(1))
            confidence.append((best * likely[..., None]).flatten(1))
            parents.append(above[..., None].expand_as(choice).flatten(1))
            depths += [depth] * tokens[-1].shape[1]
            if depth == min(self.max_tokens, max(limits)):
                break
            likely, chosen = confidence[-1].topk(min(_BEAM, confidence[-1].shape[1]), -1)
            above = numbered + chosen
            fed = torch.cat([fed, tokens[-1].gather(1, chosen)], 1)
            read = torch.cat([read, at.gather(1, chosen // branches)], 1)
            at = torch.arange(read.shape[1] - chosen.shape[1], read.shape[1], device=device).expand_as(chosen)
            self.runner.rewind(first)
            here = fed.to(self.model.device)
            chances = self._scores(here, first, depth, chosen.shape[1], ancestors(read)).softmax(-1)
        self.runner.rewind(done)
        candidates = (torch.cat(part, 1).cpu().numpy() for part in (tokens, confidence, parents))
        return best_first(*candidates, np.array(depths), limits, nodes, self.sequences.device)

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        totals = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        # the last token of a row is the target's own and was never fed
        self.cached = [min(cached, total - 1) for cached, total in zip(self.cached, totals)]
        self._end_with_the_rows()

    def _end_with_the_rows(self) -> None:
        if not any(map(self.sequences.unfinished, self.sequences.live)):
            pool.give_back(self._borrowed, self.runner.captured)
            self.runner = self.sequences = self._borrowed = None  # the drafter may stay, its cache need not

    def select(self, rows: list[int]) -> None:
        self.cached = [self.cached[row] for row in rows]
        self.runner.select(rows)


def check_tree(tree: int | None) -> None:
    if tree is not None and (type(tree) is not int or not 1 <= tree <= MAX_NODES):
        raise ValueError(f"tree={tree!r}: must be an integer from 1 to {MAX_NODES}, or None")


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
