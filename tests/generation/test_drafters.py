"""What prompt lookup and draft models propose, asked directly."""

import pytest
import torch
from draft_models import perturbed
from helpers import left_padded_batch, tiny_model
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from hf_efficient import BestOf, Speculation, TokenRecycling, enable_speculation
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.drafters.prompt_lookup import PromptLookup
from hf_efficient.generation.drafters.suffix_automaton import SuffixAutomaton, Walk
from hf_efficient.generation.sequences import Sequences


def sequences_of(input_ids, attention_mask=None, first=None, max_length=64, do_sample=False) -> Sequences:
    """Sequences after the target's first token (`first` [rows], int64)."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    config = GenerationConfig(do_sample=do_sample)
    sequences = Sequences(input_ids, attention_mask, 0, LogitsProcessorList(), criteria, generation_config=config)
    append(sequences, first[:, None])
    return sequences


def advance(drafter, sequences: Sequences, proposal, accepted: list[int]) -> list[list[int]]:
    """Each sequence continues with so many of its drafts and a token of the target's own. Returns what it got."""
    own = torch.arange(20, 20 + len(accepted))
    tokens = torch.cat([proposal.tokens, own[:, None]], 1)
    tokens[torch.arange(len(own)), torch.tensor(accepted)] = own
    new = append(sequences, tokens, torch.tensor(accepted))
    drafter.accept(new)
    return new


def append(sequences: Sequences, tokens: torch.Tensor, accepted=None) -> list[list[int]]:
    accepted = torch.zeros(len(tokens), dtype=torch.int64) if accepted is None else accepted
    return sequences.extend(tokens, accepted, accepted)[0]


def test_drafts_that_were_not_verified_leave_no_token_behind():
    """A drafter writes three tokens, one is verified; a sequence that ends gets padding behind its last token."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(64), EosTokenCriteria(9)])
    sequences = Sequences(torch.ones(2, 3, dtype=torch.int64), None, 0, LogitsProcessorList(), criteria)
    sequences.write(torch.full((2, 3), 7))
    append(sequences, torch.tensor([[5], [9]]))
    assert sequences.tokens[:, 3:7].tolist() == [[5, 0, 0, 0], [9, 0, 0, 0]]


class TestSuffixAutomaton:
    @pytest.mark.parametrize("vocabulary", [1, 2, 4, 12])
    def test_holds_what_followed_every_suffix(self, vocabulary):
        """Against a search of the whole row, token by token."""
        generator = torch.Generator().manual_seed(vocabulary)
        row, automaton = [], SuffixAutomaton()
        for token in torch.randint(vocabulary, (30,), generator=generator).tolist():
            row.append(token)
            automaton.append(token)
            for longest in (None, 1, 3):
                for n in range(min(len(row) - 1, longest or len(row)), -1, -1):
                    suffix = row[len(row) - n :]
                    ends = [end for end in range(n, len(row)) if row[end - n : end] == suffix]
                    if ends:
                        break
                state = automaton.match(longest)
                assert automaton.length[automaton.link[state]] < n <= automaton.length[state] if n else state == 0
                assert set(automaton.following[state]) == {row[end] for end in ends}
                for following, reached in automaton.following[state].items() if n else ():
                    after = [end + 1 for end in ends if row[end] == following]
                    assert (automaton.count[reached], automaton.latest[reached]) == (len(after), after[-1])

    def test_long_periods_take_linear_time(self):
        for row in ([1] * 3000, [1, 2, 3] * 1000, [*range(1000)] * 3):
            automaton = SuffixAutomaton()
            for token in row:
                automaton.append(token)
            state, period = automaton.match(), len(set(row))
            assert len(automaton.link) < 2 * len(row)
            assert automaton.length[state] == len(row) - period
            assert list(automaton.following[state]) == [row[-period]]


class TestPromptLookup:
    def begin(self, rows: list[list[int]], num_tokens=4, max_ngram=None, drafter=None) -> PromptLookup:
        """The last token of each row is the target's; rows are padded on the left with 0."""
        width = max(map(len, rows)) - 1
        prompts = torch.tensor([[0] * (width - len(row) + 1) + row[:-1] for row in rows])
        mask = torch.tensor([[0] * (width - len(row) + 1) + [1] * (len(row) - 1) for row in rows])
        drafter = drafter or PromptLookup(num_tokens, max_ngram)
        drafter.begin(sequences_of(prompts, mask, torch.tensor([row[-1] for row in rows])))
        return drafter

    def test_proposes_what_followed_the_longest_suffix(self):
        # after "4 5 6" came 7; after the more recent lone "6" came 9
        row = [4, 5, 6, 7, 8, 6, 9, 1, 4, 5, 6]
        proposal = self.begin([row]).propose([10], 63)
        assert proposal.tokens.tolist() == [[7, 8, 6, 9]] and proposal.counts.tolist() == [4]
        assert proposal.probabilities is None and proposal.parents is None
        for max_ngram, first in ((1, 9), (2, 7), (3, 7)):
            assert self.begin([row], max_ngram=max_ngram).propose([10], 63).tokens[0, 0] == first

    def test_sequences_with_one_prompt_look_into_each_other(self):
        """Against a search of the longest suffix of each row in the others, for texts that part and meet again."""
        rows = [[1, 2, 3, 40], [1, 2, 3, 40], [1, 2, 9, 40]]
        drafter = self.begin(rows)
        new = [[30, 31, 32, 33, 34], [50, 30, 31], [50, 30, 31]]
        drafter.accept(new)
        proposal = drafter.propose([3, 3, 3], 63)
        assert proposal.counts.tolist() == [0, 3, 0] and proposal.tokens[1].tolist() == [32, 33, 34]
        drafter.accept([[60], [32, 61], [60]])
        assert drafter.propose([3, 3, 3], 63) is None, "61 stands nowhere else"
        drafter.accept([[61, 62], [40, 30, 31, 32], [60]])
        drafter.select([1, 0])
        assert drafter.propose([2, 2], 63).tokens[0].tolist() == [33, 34]
        assert self.begin(rows, max_ngram=2).propose([3, 3, 3], 63) is None

    def test_a_repeat_stirs_it_once(self):
        """Of 8 tokens, then of 12: each is said once, by a drafter that has built nothing yet."""
        drafter = self.begin([[*range(1, 20), 30], [*range(1, 20), 30], [50, 51, 52, 53]])
        assert not drafter.stirs(), "prompts repeat each other, which is nothing new"
        noted = []
        for number in range(14):
            drafter.accept([[3 + number], [80 + number], []])
            noted.append(drafter.stirs())
        assert [number for number, stirred in enumerate(noted) if stirred] == [7, 11]
        drafter.select([2, 1])
        drafter.accept([[60], [15]])
        assert not drafter.stirs() and all(len(row.length) == 1 for row in drafter.rows)
        drafter.accept([[50], [*range(3, 11)]])
        assert drafter.stirs(), "what the first sequence said counts for the second, which had its prompt"
        proposal = drafter.propose([4, 4], 63)
        assert proposal.tokens.tolist() == [[51, 52, 53, 60], [11, 12, 13, 14]]
        assert not drafter.stirs()

    @pytest.mark.parametrize("copying, stirred", [(1, []), (2, [7, 11])])
    def test_one_sequence_of_eight_stirs_nothing(self, copying, stirred):
        """The others would wait for the verification of its drafts."""
        prompts = [[*range(20 * row, 20 * row + 15)] for row in range(8)]
        drafter, noted = self.begin(prompts), []
        for step in range(13):
            drafter.accept([[prompts[row][step] if row < copying else 200 + 20 * row + step] for row in range(8)])
            noted.append(drafter.stirs())
        assert [step for step, repeated in enumerate(noted) if repeated] == stirred

    @pytest.mark.parametrize("vocabulary", [2, 4, 9])
    def test_walks_find_the_longest_suffix(self, vocabulary):
        """Of one text in another that grows, too, token by token, against a search."""
        generator = torch.Generator().manual_seed(vocabulary)
        text, own, automaton = [], [], SuffixAutomaton()
        walk = Walk(automaton)
        for theirs, ours in torch.randint(vocabulary, (60, 2), generator=generator).tolist():
            text.append(theirs)
            automaton.append(theirs)
            own.append(ours)
            walk.settle()
            walk.advance(ours)
            spans = {tuple(text[i:j]) for i in range(len(text)) for j in range(i, len(text) + 1)}
            longest = max(n for n in range(len(own) + 1) if tuple(own[len(own) - n :]) in spans)
            assert walk.matched <= longest and tuple(own[len(own) - walk.matched :]) in spans
            ends = [i for i in range(len(text) + 1) if text[i - walk.matched : i] == own[len(own) - walk.matched :]]
            assert set(automaton.following[walk.state]) == {text[i] for i in ends if i < len(text)}

    def test_sequences_without_a_match_propose_nothing(self):
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
        drafter.accept([[4, 1]])
        proposal = drafter.propose([9], 63)
        assert proposal.tokens[0, 0] == 4, "the most recent 1 comes first"
        assert drafter.propose([0], 63) is None

    def test_several_continuations_make_a_tree(self):
        # "1 2" was followed by 3, twice by 4 and last by 5
        row = [1, 2, 4, 6, 1, 2, 3, 7, 1, 2, 4, 6, 1, 2, 5, 8, 1, 2]
        proposal = self.begin([row], num_tokens=5).propose([2], 63)
        tokens, parents = proposal.tokens[0].tolist(), proposal.parents[0].tolist()
        assert proposal.counts.tolist() == [5]
        roots = [token for token, parent in zip(tokens, parents) if parent == -1]
        assert roots[:2] == [5, 4] or roots[:2] == [4, 5]
        after = {(tokens[parent], token) for token, parent in zip(tokens, parents) if parent >= 0}
        assert after <= {(4, 6), (5, 8), (3, 7)} and len(after) >= 2, "two tokens deep, no more"
        single = self.begin([row], num_tokens=5).propose([9], 1)
        assert single.tokens.tolist() == [tokens[:1]] and single.parents is None

    def test_trees_are_in_order_and_occurred_before(self):
        generator = torch.Generator().manual_seed(0)
        rows, limits = torch.randint(3, (6, 60), generator=generator).tolist(), [9, 9, 9, 3, 1, 0]
        proposal = self.begin(rows, num_tokens=12, max_ngram=2).propose(limits, 10)
        counts = proposal.counts.tolist()
        assert counts[:4] == [10] * 4 and counts[4] in (1, 2, 3) and counts[5] == 0
        parts = (proposal.tokens, proposal.parents, proposal.confidence)
        for row, count, limit, tokens, parents, chances in zip(rows, counts, limits, *(x.tolist() for x in parts)):
            pairs, paths = set(zip(row, row[1:])), {-1: row[-1:]}
            for node, (token, parent) in enumerate(zip(tokens[:count], parents[:count])):
                paths[node] = [*paths[parent], token]
                assert parent < node and len(paths[node]) <= limit + 1
                assert tuple(paths[node][-2:]) in pairs
                assert chances[node] < (chances[parent] if parent >= 0 else 1)
            assert len({tuple(path) for path in paths.values()}) == count + 1, "siblings differ"
            assert chances == sorted(chances, reverse=True) and not any(chances[count:])

    def test_confidence_follows_what_was_right(self):
        row = [1, 9, 2, 9, 3, 9, 4, 9]
        drafter = self.begin([row], max_ngram=1)
        before = drafter.propose([9], 1).confidence.item()
        for token in range(10, 40):
            drafter.accept([[token, 9]])  # 9 never goes on as it did
        wrong = self.begin([row], drafter=drafter).propose([9], 1).confidence.item()
        assert wrong < 0.4 * before, "what was learned stays for the next run"
        for _ in range(300):
            drafter.accept([[1, 9]])
        right = self.begin([row], drafter=drafter).propose([9], 1).confidence.item()
        assert right > 2 * wrong

    @pytest.mark.parametrize("arguments", [(0,), (-1,), (2.0,), (True,), (3, 0), (3, 1.5)])
    def test_refuses_other_numbers(self, arguments):
        name = "num_tokens" if len(arguments) == 1 else "max_ngram"
        with pytest.raises(ValueError, match=rf"{arguments[-1]!r} \({name} of PromptLookup\): expected an integer"):
            PromptLookup(*arguments)


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
        drafter = AssistantDrafter(model)
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
            rows = [row + new for row, new in zip(rows, advance(drafter, sequences, proposal, accepted))]
            if len(kept) < len(rows):
                rows = [rows[row] for row in kept]
                sequences.select(kept)
                drafter.select(kept)

    @torch.no_grad()
    def test_finished_sequences_may_stay(self, model):
        batch, end = left_padded_batch((5, 9, 7)), EosTokenCriteria(eos_token_id=2)
        criteria = StoppingCriteriaList([MaxLengthCriteria(64), end])
        sequences = Sequences(**batch, pad_token_id=0, processors=LogitsProcessorList(), criteria=criteria)
        append(sequences, torch.tensor([[11], [2], [13]]))
        drafter = AssistantDrafter(model)
        drafter.check(model)
        drafter.begin(sequences)
        for _ in range(2):
            for step in range(9):
                drafter.accept(append(sequences, torch.tensor([[20 + step], [3], [40 + step]])))
            proposal = drafter.propose([9, 0, 9], 63)
            rows = sequences.token_lists()
            assert proposal.counts.tolist() == [3, 0, 3]
            assert proposal.tokens[[0, 2]].tolist() == self.greedy(model, [rows[0], rows[2]], 3)

    @torch.no_grad()
    def test_trees_hold_the_most_probable_nodes(self, model):
        sequences = sequences_of(**left_padded_batch((5, 9, 7)), first=torch.tensor([11, 12, 13]))
        drafter = AssistantDrafter(model, tree=10)
        drafter.check(model)
        drafter.begin(sequences)
        for limits in ([9, 9, 9], [9, 1, 0], [2, 9, 9]):
            proposal = drafter.propose(limits, 63)
            for row, ids in enumerate(sequences.token_lists()):
                paths = []
                for node in range(int(proposal.counts[row])):
                    above = int(proposal.parents[row, node])
                    assert above < node
                    tokens = (paths[above][0] if above >= 0 else []) + [int(proposal.tokens[row, node])]
                    scores = model(torch.tensor([ids + tokens[:-1]]), use_cache=False).logits[0, -1].softmax(-1)
                    chance = (paths[above][1] if above >= 0 else 1.0) * scores[tokens[-1]].item()
                    # float32 attention in another order of summation, several probabilities multiplied
                    assert proposal.confidence[row, node].item() == pytest.approx(chance, rel=1e-3)
                    if node == 0:
                        assert tokens[0] == int(scores.argmax())
                    paths.append((tokens, chance))
                depth = max((len(tokens) for tokens, _ in paths), default=0)
                assert depth <= min(3, limits[row]) and len(paths) == (0, 4, 10, 10)[min(3, limits[row])]
                assert [chance for _, chance in paths] == sorted((chance for _, chance in paths), reverse=True)
            advance(drafter, sequences, proposal, (proposal.counts > 0).long().tolist())

    def test_bad_trees_are_refused(self, model):
        for tree in (0, 64, 4.0, True):
            with pytest.raises(ValueError, match="must be an integer from 1 to 63"):
                AssistantDrafter(model, tree=tree)

    @torch.no_grad()
    def test_stops_where_it_is_unsure(self, model):
        batch = left_padded_batch((6, 6))
        model.generation_config.assistant_confidence_threshold = 1.0  # never sure
        drafter = AssistantDrafter(model)
        drafter.check(model)
        drafter.begin(sequences_of(**batch, first=torch.tensor([9, 10])))
        proposal = drafter.propose([9, 9], 63)
        assert proposal.tokens.shape == (2, 1) and proposal.counts.tolist() == [1, 1]
        assert drafter.propose([0, 0], 63) is None

    @torch.no_grad()
    def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(self, model):
        batch = left_padded_batch((6, 4))
        sequences = sequences_of(**batch, first=torch.tensor([9, 10]), do_sample=True)
        drafter = AssistantDrafter(model)
        drafter.check(model)
        drafter.begin(sequences)
        proposal = drafter.propose([9, 9], 63)
        for row, (prompt, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"])):
            ids = prompt[mask.bool()].tolist() + [9 + row] + proposal.tokens[row].tolist()
            expected = model(torch.tensor([ids]), use_cache=False).logits[0, -4:-1].softmax(-1)
            # float32 attention in another order of summation
            torch.testing.assert_close(proposal.probabilities[row], expected, rtol=1e-4, atol=1e-6)

    def test_default_settings_are_those_of_transformers(self, llama):
        drafter = AssistantDrafter(llama)
        assert drafter.max_tokens == 20 and drafter.threshold == 0.4

    @pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 1}])
    def test_output_with_trees_is_that_of_plain_generation(self, model, sampling):
        target, batch = enable_speculation(tiny_model("qwen3")), left_padded_batch()
        target.set_attn_implementation(model.config._attn_implementation)
        draft = perturbed(model, 0.1)
        plain = target.generate(**batch, max_new_tokens=14, do_sample=False)
        steps = []
        for tree in (None, 12):
            speculation = Speculation(AssistantDrafter(draft, tree=tree), adaptive=False)
            options = dict(max_new_tokens=14, assistant_model=speculation, return_dict_in_generate=True, **sampling)
            output = target.generate(**batch, **options)
            assert torch.equal(output.sequences, plain)
            steps.append(output.num_steps)
        assert steps[1] < steps[0] or sampling["do_sample"], "a tree holds more; not where one token is left"
        if model.config._attn_implementation == "flash_paged":
            both = Speculation(BestOf(AssistantDrafter(draft, tree=6), TokenRecycling()), adaptive=False)
            assert torch.equal(target.generate(**batch, **{**options, "assistant_model": both}).sequences, plain)
            options["assistant_model"] = Speculation(AssistantDrafter(draft, tree=12), adaptive=False)
            target.generate(**batch, **options, repetition_penalty=1.1)
