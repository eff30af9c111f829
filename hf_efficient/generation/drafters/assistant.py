"""Drafts from a smaller model with the same tokenizer."""

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.drafters.base import Drafter, Proposal
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.sequences import Sequences


class AssistantDrafter(Drafter):
    """Lets `model` continue every row, over a `PagedCache` of its own.

    It drafts `model.generation_config.num_assistant_tokens` tokens (20 when unset), and a row stops early after a token
    the draft itself gave less than `assistant_confidence_threshold` probability (0.4 when unset, 0 never stops): the
    two settings transformers' own assisted generation reads.

    Args:
        model: a decoder-only causal LM with the target's tokenizer.
        do_sample: draw the drafts (from the processed distribution) instead of taking the likeliest.
        generation_config: of the run; its `prefill_chunk_size` holds for the draft's prompt too.
        tokenizers: the target's and the draft's, both needed where the vocabulary sizes in the configs differ (padded
            embeddings); their vocabularies must be equal.
    """

    def __init__(self, model, do_sample: bool, generation_config, tokenizers=(None, None)):
        self.model, self.generation_config = model, generation_config
        self.do_sample = self.draws = do_sample
        self.tokenizers = tokenizers
        settings = {**model.generation_config._get_default_generation_params(), **_set_values(model.generation_config)}
        self.num_tokens = self.max_tokens = int(settings["num_assistant_tokens"])
        self.threshold = settings["assistant_confidence_threshold"] or 0.0
        if self.num_tokens < 1:
            raise ValueError(
                f"num_assistant_tokens={self.num_tokens} in the assistant's generation_config: expected at least 1"
            )

    def check(self, model) -> None:
        target, draft = (m.config.get_text_config(decoder=True).vocab_size for m in (model, self.model))
        if all(tokenizer is not None for tokenizer in self.tokenizers):
            ours, theirs = (tokenizer.get_vocab() for tokenizer in self.tokenizers)
            if ours != theirs:
                raise ValueError(
                    f"the target's tokenizer ({len(ours)} tokens) and the assistant's ({len(theirs)} tokens) differ: "
                    "speculation needs an assistant with the same vocabulary and token ids. Use such a model, or "
                    "prompt_lookup_num_tokens without an assistant, or a model without enable_speculation, whose "
                    "universal assisted decoding translates between tokenizers (batch size 1)"
                )
        elif target != draft:
            raise ValueError(
                f"the target has vocab_size={target}, the assistant vocab_size={draft}: speculation needs the same "
                "tokenizer for both. If it is the same and only the embeddings are padded differently, say so with "
                "generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)"
            )
        self.vocabulary = target
        self.relative_cost = self.model.num_parameters() / max(model.num_parameters(), 1)

    def begin(self, sequences: Sequences, hidden=None) -> None:
        config = self.model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        self.sequences = sequences
        self.runner = RaggedModel(
            self.model,
            PagedCache(self.model.config),
            sequences.max_length - sequences.prompt_length,
            limit and limit - 1,
        )
        device = self.model.device
        prompts = sequences.tokens[sequences.live, : sequences.prompt_length].to(device)
        mask = None if sequences.prompt_mask is None else sequences.prompt_mask[sequences.live].to(device)
        ones = torch.ones_like(prompts) if mask is None else mask.long()
        positions = (ones.cumsum(1) - 1).clamp(min=0, max=limit and limit - 1)
        kwargs = {"attention_mask": mask, "position_ids": positions}
        if self.runner.limits_logits:
            kwargs["logits_to_keep"] = 1
        self.runner.prefill(prompts, self.generation_config, kwargs)
        self.cached = [0] * len(prompts)  # generated tokens of each row that the draft's cache holds

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        width = min(self.num_tokens, max(limits), nodes)
        if width == 0:
            return None
        sequences, device = self.sequences, self.model.device
        done = [length - sequences.prompt_length for length in sequences.lengths]
        # All rows feed equally many tokens the draft has not seen; one with fewer repeats some of its last.
        pending = max(total - cached for total, cached in zip(done, self.cached))
        first = [total - pending for total in done]
        self.runner.rewind(first)
        fed = sequences.last(pending).to(device)
        limit = torch.tensor(limits, device=sequences.device)
        confident = torch.ones_like(limit, dtype=torch.bool)
        counts, tokens, distributions = torch.zeros_like(limit), [], []
        for step in range(width):
            logits = self.runner(fed, first, keep=1)[..., : self.vocabulary].to(sequences.device)
            if logits.shape[-1] < self.vocabulary:
                missing = self.vocabulary - logits.shape[-1]
                logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
            scores = sequences.process(logits, offset=step)[:, 0]
            if self.do_sample:
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
        probabilities = torch.stack(distributions, 1) if self.do_sample else None
        return Proposal(torch.cat(tokens, 1), counts, probabilities)

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        totals = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        # the last token of a row is the target's own and was never fed
        self.cached = [min(cached, total - 1) for cached, total in zip(self.cached, totals)]

    def select(self, rows: list[int]) -> None:
        self.cached = [self.cached[row] for row in rows]
        self.runner.select(rows)


def _set_values(generation_config) -> dict:
    return {
        name: value
        for name in ("num_assistant_tokens", "assistant_confidence_threshold")
        if (value := getattr(generation_config, name)) is not None
    }
