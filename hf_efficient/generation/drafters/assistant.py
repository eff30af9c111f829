"""Drafts from a smaller model with the same tokenizer."""

import numpy as np
import torch
from transformers import GenerationMixin

from hf_efficient.generation import model_state
from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.drafters.draft_model import (
    check_draft,
    check_tree,
    draft_settings,
    encoder_arguments,
    first_difference,
)
from hf_efficient.generation.ragged_kinds import ragged_model
from hf_efficient.generation.replay.pool import PoolEntry, ReplayPool
from hf_efficient.generation.sequences import Sequences, is_left_padded
from hf_efficient.generation.speculation.proposal import MAX_NODES, Proposal
from hf_efficient.generation.speculation.sampling import argmax
from hf_efficient.generation.speculation.token_tree import ancestors, best_first


_BEAM = 4  # nodes of a tree that are continued at each depth
_BRANCHES = 4  # children of a node that are considered
UNLIMITED = 2**31  # max_new_tokens of a draft with another tokenizer: the target's tokens say nothing about its own


class AssistantDrafter(Drafter):
    """Lets a smaller `model` continue every sequence, over a `PagedCache` of its own. In a sampled run it samples its
    drafts.

    As in transformers' assisted generation, `model.generation_config` sets the length of a draft:
    `num_assistant_tokens` (20 if unset), and fewer after a token whose probability by the draft is below
    `assistant_confidence_threshold` (0.4 if unset; 0 never stops).

    Args:
        model: a decoder-only causal LM with the target's tokenizer.
        tokenizers: the target's and the draft's, with equal vocabularies. Needed if the vocabulary sizes in the configs
            differ (padded embeddings).
        tree: propose a tree of at most this many tokens, 1 to 63, without sampling: at each depth the 4 most probable
            nodes are continued, and the most probable of all are proposed (Li et al. 2024, "EAGLE-2"). A single
            continuation is proposed if logits processors read the ids, or if the draft's attention takes no trees.
            None: always a single continuation.

    Raises TypeError if `model` is no transformers model with `generate()`, ValueError for another `tree`.
    """

    draws = True
    tree: int | None = None

    def __init__(self, model, tokenizers=(None, None), tree: int | None = None):
        if not isinstance(model, GenerationMixin):
            raise TypeError(f"model={type(model).__name__}: expected a transformers model that can generate")
        check_tree(tree)
        self.model, self.tokenizers, self.tree = model, tokenizers, tree
        self.draws = tree is None
        self.max_tokens, self.threshold = draft_settings(model)

    def check(self, model) -> None:
        check_draft(self.model, target=model)
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
        self.cached = [0] * len(prompts)  # generated tokens of each sequence in the draft's cache

    def _read_prompts(self, prompts: torch.Tensor, mask: torch.Tensor | None, max_new_tokens: int) -> None:
        """Runs `prompts` int64 [rows, columns], with their mask or None, over a cache of the draft's own."""
        check_draft(self.model, len(prompts))
        config = self.model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
        last = limit and limit - 1
        tokens = None if max_new_tokens == UNLIMITED else prompts.shape[1] + max_new_tokens + MAX_NODES + 1
        kwargs = encoder_arguments(self.model, self.sequences)
        source_tokens = None if kwargs is None else kwargs["encoder_outputs"].last_hidden_state.shape[1]
        if is_left_padded(prompts, {"attention_mask": mask}):
            self._pool, is_reusable = self._replay_pool()
            entry = self._pool.take(
                self.model.config, len(prompts), tokens, is_reusable=is_reusable, source_tokens=source_tokens
            )
        else:
            self._pool, entry = None, PoolEntry.growing(self.model.config)
        self._entry = entry
        self.runner = ragged_model(
            self.model, entry.cache, max_new_tokens, last, None, entry.captured, entry.is_capturable
        )
        prompts = prompts.to(self.model.device)
        mask = None if mask is None else mask.to(self.model.device)
        ones = torch.ones_like(prompts) if mask is None else mask.long()
        if kwargs is None:
            kwargs = {"attention_mask": mask, "position_ids": (ones.cumsum(1) - 1).clamp(min=0, max=last)}
        elif mask is not None:
            kwargs["decoder_attention_mask" if self.model.config.is_encoder_decoder else "attention_mask"] = mask
        if self.runner.limits_logits:
            kwargs["logits_to_keep"] = 1
        self.runner.prefill(prompts, self.sequences.generation_config, kwargs)

    def _replay_pool(self) -> tuple[ReplayPool, bool]:
        """The pool of the draft's captured forwards, and whether later calls can replay them."""
        return model_state.current(self.model).pool, True

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        width = min(self.max_tokens, max(limits), nodes)
        if width == 0:
            return None
        sequences, device = self.sequences, self.model.device
        do_sample = self.draws and sequences.generation_config.do_sample
        done = [length - sequences.prompt_length for length in sequences.lengths]
        # All sequences feed equally many tokens that the draft has not read; one with fewer repeats its last ones.
        pending = max(total - cached for total, cached in zip(done, self.cached))
        first = [max(total - pending, 0) for total in done]  # a finished sequence may stay, and be shorter
        self.runner.rewind(first)
        fed = sequences.last(pending).to(device)
        limit = torch.tensor(limits, device=sequences.device)
        confident = torch.ones_like(limit, dtype=torch.bool)
        counts, tokens, confidences, distributions = torch.zeros_like(limit), [], [], []
        reads_scores = self.tree or do_sample or self.threshold > 0 or sequences.needs_scores
        for step in range(width):
            logits, token = self._logits(fed, first), None
            if not reads_scores:
                token = argmax(logits) if self.runner.argmax is None else self.runner.argmax[:, -1:].clone()
                token = token.to(sequences.device)
            scores = sequences.process(logits, step)[:, 0] if token is None else None
            if pending > min(done):
                self.runner.rewind([total + step for total in done])
            if self.tree and not sequences.processors_read_ids and self.runner.takes_trees:
                self.cached = done
                return self._grow(scores, done, limits, min(self.tree, nodes))
            if do_sample:
                distribution = scores.softmax(-1)
                token = torch.multinomial(distribution, 1)
                distributions.append(distribution)
            elif token is None:
                token = argmax(scores)[:, None]
            tokens.append(token)
            if self.threshold > 0 or self.tree:  # a sum over the vocabulary, which takes as long as small layers
                confidences.append((scores.gather(1, token)[:, 0] - scores.logsumexp(-1)).exp())
            counts += confident & (limit > step)
            first = [total + step for total in done]
            fed = token.to(device)
            if step + 1 == width:
                break
            if self.threshold > 0:
                confident &= (confidences[-1] >= self.threshold) & (limit > step + 1)
                if not confident.any():
                    break
            if sequences.processors_read_ids:
                sequences.write(token, offset=step)
        self.cached = [total + len(tokens) - 1 for total in done]
        probabilities = torch.stack(distributions, 1) if do_sample else None
        confidence = torch.stack(confidences, 1).cumprod(1) if self.tree else None
        return Proposal(torch.cat(tokens, 1), counts, probabilities, confidence=confidence)

    def _logits(self, fed: torch.Tensor, first: list[int], keep: int = 1, tree=None) -> torch.Tensor:
        """Logits [rows, keep, target vocabulary] of what follows the last `keep` columns of `fed`. Else as in
        `RaggedModel`."""
        logits = self.runner(fed, first, keep=keep, tree=tree)
        missing = self.vocabulary - logits.shape[-1]
        if missing < 0:
            logits, self.runner.argmax = logits[..., : self.vocabulary], None
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits.to(self.sequences.device)

    def _grow(self, scores: torch.Tensor, done: list[int], limits: list[int], nodes: int) -> Proposal | None:
        """A tree, from the scores [rows, vocabulary] of each sequence's next token. Each depth is one forward of the
        sequence's last token and all nodes that are continued. The cache ends as it was."""
        rows, device = len(done), scores.device
        branches, first = min(_BRANCHES, scores.shape[-1]), [total - 1 for total in done]
        # of the nodes that are continued: distribution of the next token, probability of the path, index among the
        # candidates (`above`) and among the tokens of the forward (`at`)
        following, likely = scores.softmax(-1)[:, None], scores.new_ones(rows, 1)
        above = at = torch.full((rows, 1), -1, device=device)
        fed, read = self.sequences.last(1), above[:, :0]  # the tokens of the forward, and their parents among them
        tokens, confidence, parents, depths = [], [], [], []
        for depth in range(1, min(self.max_tokens, max(limits)) + 1):
            best, choice = following.topk(branches, -1)
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
            on_device = fed.to(self.model.device)
            logits = self._logits(on_device, first, chosen.shape[1], ancestors(read))
            following = self.sequences.process(logits, depth).softmax(-1)
        self.runner.rewind(done)
        candidates = (torch.cat(part, 1).cpu().numpy() for part in (tokens, confidence, parents))
        return best_first(*candidates, np.array(depths), limits, nodes, self.sequences.device)

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        totals = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        # the last token of a sequence is the target's own, which the draft has not read
        self.cached = [min(cached, total - 1) for cached, total in zip(self.cached, totals)]
        self._release_if_finished()

    def _release_if_finished(self) -> None:
        if not any(map(self.sequences.unfinished, self.sequences.live)):
            if self._pool is not None:
                self._pool.put(self._entry, self.runner.captured)
            self.runner = self.sequences = self._entry = self._pool = None  # the drafter outlives the call

    def select(self, rows: list[int]) -> None:
        self.cached = [self.cached[row] for row in rows]
        self.runner.select(rows)
