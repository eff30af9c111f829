import pytest
import torch
from helpers import left_padded_batch, tiny_model
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.drafters.prompt_lookup import PromptLookupDrafter
from hf_efficient.generation.sequences import Sequences


def sequences_of(input_ids, attention_mask=None, first=None, max_length=64) -> Sequences:
    """Sequences after the target's first token (`first` [rows], int64)."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    sequences = Sequences(input_ids, attention_mask, 0, LogitsProcessorList(), criteria)
    append(sequences, first[:, None])
    return sequences


def append(sequences: Sequences, tokens: torch.Tensor, accepted=None) -> list[list[int]]:
    accepted = torch.zeros(len(tokens), dtype=torch.int64) if accepted is None else accepted
    return sequences.extend(tokens, accepted, accepted)[0]


class TestPromptLookup:
    def begin(self, rows: list[list[int]], num_tokens=4, max_ngram=2) -> PromptLookupDrafter:
        """The last token of each row is the target's; rows are padded on the left with 0."""
        width = max(map(len, rows)) - 1
        prompts = torch.tensor([[0] * (width - len(row) + 1) + row[:-1] for row in rows])
        mask = torch.tensor([[0] * (width - len(row) + 1) + [1] * (len(row) - 1) for row in rows])
        drafter = PromptLookupDrafter(num_tokens, max_ngram)
        drafter.begin(sequences_of(prompts, mask, torch.tensor([row[-1] for row in rows])))
        return drafter

    def test_proposes_what_followed_the_longest_suffix(self):
        # after "5 6" came 7; after the more recent lone "6" came 9
        drafter = self.begin([[5, 6, 7, 8, 6, 9, 1, 5, 6]])
        proposal = drafter.propose([10], 63)
        assert proposal.tokens.tolist() == [[7, 8, 6, 9]] and proposal.counts.tolist() == [4]
        assert proposal.probabilities is None
        assert self.begin([[5, 6, 7, 8, 6, 9, 1, 5, 6]], max_ngram=1).propose([10], 63).tokens[0, 0] == 9

    def test_rows_without_a_match_propose_nothing(self):
        drafter = self.begin([[1, 2, 3, 4], [7, 8, 9, 7], [5, 6, 5, 6, 5]])
        proposal = drafter.propose([10, 10, 3], 63)
        assert proposal.counts.tolist() == [0, 4, 3]
        assert proposal.tokens.tolist()[1] == [8, 9, 7, 8], "the copy may run into its own output"
        assert proposal.tokens.tolist()[2][:3] == [6, 5, 6]
        drafter.select([0])
        assert drafter.propose([10], 63) is None

    def test_padding_is_never_matched(self):
        drafter = self.begin([[3, 0], [1, 2, 3, 4, 5, 6]])
        assert drafter.propose([10, 10], 63) is None

    def test_learns_the_output(self):
        drafter = self.begin([[1, 2, 3]], num_tokens=2)
        assert drafter.propose([9], 63) is None
        drafter.accept([[1]])
        assert drafter.propose([9], 63).tokens.tolist() == [[2, 3]]
        drafter.accept([[4, 1]])  # the most recent "1" wins
        assert drafter.propose([9], 63).tokens.tolist() == [[4, 1]]
        assert drafter.propose([0], 63) is None

    @pytest.mark.parametrize("arguments", [(0,), (-1,), (2.0,), (True,), (3, 0)])
    def test_refuses_other_numbers(self, arguments):
        with pytest.raises(ValueError, match="expected an integer of at least 1"):
            PromptLookupDrafter(*arguments)


class TestAssistant:
    @pytest.fixture(params=["eager", "sdpa", "flash_paged"])
    def model(self, request):
        model = tiny_model("qwen3")
        model.set_attn_implementation(request.param)
        model.generation_config.num_assistant_tokens = 3
        model.generation_config.assistant_confidence_threshold = 0.0
        return model

    def greedy(self, model, rows: list[list[int]], steps: int) -> list[list[int]]:
        """What `model` says after each row, without batch, padding or cache."""
        rows = [list(row) for row in rows]
        for row in rows:
            for _ in range(steps):
                logits = model(torch.tensor([row]), use_cache=False).logits
                row.append(int(logits[0, -1].argmax()))
        return [row[-steps:] for row in rows]

    @torch.no_grad()
    def test_drafts_the_greedy_continuation_whatever_was_accepted(self, model):
        batch = left_padded_batch((5, 9, 7))
        prompts = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"])]
        sequences = sequences_of(**batch, first=torch.tensor([11, 12, 13]))
        drafter = AssistantDrafter(model, False, model.generation_config)
        drafter.check(model)
        drafter.begin(sequences)
        rows = [prompt + [token] for prompt, token in zip(prompts, [11, 12, 13])]
        # all, none, some accepted; then two rows at different lengths; then a row near its end; then one alone
        for accepted, kept, limits in (
            ([3, 0, 1], [0, 1, 2], [9, 9, 9]),
            ([3, 0, 3], [0, 2], [9, 9, 9]),
            ([0, 3], [0, 1], [1, 9]),
            ([2, 1], [1], [9, 9]),
            ([1], [0], [9]),
            ([2], [0], [9]),
            ([0], [0], [9]),
        ):
            proposal = drafter.propose(limits, 63)
            expected = self.greedy(model, rows, 3)
            assert proposal.counts.tolist() == [min(3, limit) for limit in limits]
            for got, want, limit in zip(proposal.tokens.tolist(), expected, limits):
                assert got[:limit] == want[:limit]
            accepted = torch.tensor(accepted)
            own = torch.arange(20, 20 + len(rows))  # what the target says after the accepted drafts
            tokens = torch.cat([proposal.tokens, own[:, None]], 1)
            tokens[torch.arange(len(rows)), accepted] = own
            new = append(sequences, tokens, accepted)
            rows = [row + tail for row, tail in zip(rows, new)]
            drafter.accept(new)
            if len(kept) < len(rows):
                rows = [rows[row] for row in kept]
                sequences.select(kept)
                drafter.select(kept)

    @torch.no_grad()
    def test_stops_where_it_is_unsure(self, model):
        batch = left_padded_batch((6, 6))
        model.generation_config.assistant_confidence_threshold = 1.1  # never sure
        drafter = AssistantDrafter(model, False, model.generation_config)
        drafter.check(model)
        drafter.begin(sequences_of(**batch, first=torch.tensor([9, 10])))
        proposal = drafter.propose([9, 9], 63)
        assert proposal.tokens.shape == (2, 1) and proposal.counts.tolist() == [1, 1]
        assert drafter.propose([0, 0], 63) is None

    @torch.no_grad()
    def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(self, model):
        batch = left_padded_batch((6, 4))
        sequences = sequences_of(**batch, first=torch.tensor([9, 10]))
        drafter = AssistantDrafter(model, True, model.generation_config)
        drafter.check(model)
        drafter.begin(sequences)
        proposal = drafter.propose([9, 9], 63)
        for row, (prompt, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"])):
            ids = prompt[mask.bool()].tolist() + [9 + row] + proposal.tokens[row].tolist()
            expected = model(torch.tensor([ids]), use_cache=False).logits[0, -4:-1].softmax(-1)
            # float32 attention in another order of summation
            torch.testing.assert_close(proposal.probabilities[row], expected, rtol=1e-4, atol=1e-6)

    def test_default_settings_are_those_of_transformers(self):
        model = tiny_model("llama")
        drafter = AssistantDrafter(model, False, model.generation_config)
        assert drafter.num_tokens == 20 and drafter.threshold == 0.4
