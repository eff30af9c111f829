"""What comes out of every verification that claims to be lossless has the target's distribution, and the test that says
so rejects wrong rules.

Pearson's chi-square over the joint distribution of three tokens, 40 000 rows at a fixed seed. Right: the probability
of a statistic as large is above 1e-4 (so one in 10 000 of such tests would fail by chance; at this seed none does).
Wrong: it is below 1e-12."""

import functools
import math

import pytest
import torch
from draft_models import Observer, drafting, fixed, perturbed
from helpers import tiny_model

from hf_efficient import Speculation, enable_speculation
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.verification import TypicalAcceptance, verify


VOCABULARY, ROWS = 6, 40_000
RIGHT, WRONG = 1e-4, 1e-12
CHAIN = [-1, 0]
TREES = ([-1, -1, -1, 0, 0, 1], [-1, 0, -1, 0, 2, 1])  # rows of one batch may have different ones, also three deep


def p_value(counts: torch.Tensor, expected: torch.Tensor, constraints: int = 1) -> float:
    """How probable a chi-square statistic at least as large is. `counts` and `expected` (any scale) over the same
    cells, with sums fixed in `constraints` groups. Cells expected fewer than 5 times are pooled; impossible ones must
    be empty."""
    counts, expected = counts.double(), expected.double() * (counts.sum() / expected.double().sum())
    assert counts[expected == 0].sum() == 0, "what has probability 0 was generated"
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected).square() / expected).sum()
    degrees = torch.tensor(len(counts) - constraints, dtype=torch.float64)
    return torch.special.gammaincc(degrees / 2, statistic / 2).item()


def likeliest_texts(logits_of, start: list[int], new: int) -> dict[tuple, float]:
    """Text -> probability, of `new` tokens after `start`, each of the two most probable ones at temperature 1.5.
    logits_of(int64 [rows, length]) gives what follows, float [rows, vocabulary]."""
    texts = {tuple(start): 1.0}
    for _ in range(new):
        with torch.no_grad():
            best = (logits_of(torch.tensor(list(texts))).double() / 1.5).topk(2)
        following = zip(texts.items(), best.indices.tolist(), best.values.softmax(-1).tolist())
        texts = {
            (*text, token): chance * share
            for (text, chance), tokens, shares in following
            for token, share in zip(tokens, shares)
        }
    return texts


def texts_p_value(found: torch.Tensor, expected: dict[tuple, float]) -> float:
    """`p_value` of texts [rows, length]; another one than those of `expected` raises KeyError."""
    cells = {text: cell for cell, text in enumerate(expected)}
    counts = torch.bincount(torch.tensor([cells[tuple(row)] for row in found.tolist()]), minlength=len(cells))
    return p_value(counts, torch.tensor(list(expected.values())))


def transitions(everything: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft as Markov chains of order 1: transition probabilities [VOCABULARY, VOCABULARY] of each. Unless
    `everything` may be said, there is a token that only the draft, and one that only the target would say."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 1.2
    draft = target + torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    if not everything:
        target[:, 2] = draft[:, 5] = float("-inf")
    return target.softmax(-1), draft.softmax(-1)


def guesses(last: torch.Tensor, draft: torch.Tensor, parents: list[int], drawn: bool) -> Proposal:
    """What follows `last` [rows] by the draft's transition probabilities: siblings drawn without replacement, or else
    the most probable ones."""
    tokens, distributions, left = [], [], {}
    for parent in parents:
        distribution = left[parent] if parent in left else draft[last if parent < 0 else tokens[parent]]
        token = torch.multinomial(distribution, 1) if drawn else distribution.argmax(-1, keepdim=True)
        tokens.append(token[:, 0])
        distributions.append(distribution)
        left[parent] = torch.nn.functional.normalize(distribution.scatter(1, token, 0.0), p=1.0)
    chain = parents == list(range(-1, len(parents) - 1))
    return Proposal(
        torch.stack(tokens, 1),
        torch.full_like(last, len(parents)),
        torch.stack(distributions, 1) if drawn else None,
        None if chain else torch.tensor(parents).expand(len(last), -1),
    )


def joined(first: Proposal, second: Proposal) -> Proposal:
    parts = zip(vars(first).values(), vars(second).values())
    return Proposal(*(None if a is None else torch.cat([a, b]) for a, b in parts))


def proposal(shape: str, drawn: bool, draft: torch.Tensor) -> Proposal:
    last = torch.zeros(ROWS, dtype=torch.int64)
    if shape == "chain":
        return guesses(last, draft, CHAIN, drawn)
    return joined(*(guesses(last[::2], draft, parents, drawn) for parents in TREES))


def three_tokens(rule, proposal: Proposal, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Counts [VOCABULARY**3] of the first three tokens after token 0, and the accepted drafts a row. Rows that got
    fewer go on by the target itself, as the next step would."""
    fed = torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), proposal.tokens], 1)
    tokens, accepted, *_ = rule(target[fed].log(), proposal)
    text = [tokens[:, 0]]
    for place in (1, 2):
        own = torch.multinomial(target[text[-1]], 1)[:, 0]
        text.append(torch.where(accepted >= place, tokens[:, place], own))
    code = (text[0] * VOCABULARY + text[1]) * VOCABULARY + text[2]
    return torch.bincount(code, minlength=VOCABULARY**3), accepted.double().mean().item()


def exact(target: torch.Tensor) -> torch.Tensor:
    return (target[0][:, None, None] * target[:, :, None] * target[None]).flatten()


def lossless(scores: torch.Tensor, proposal: Proposal):
    return verify(scores, proposal, do_sample=True)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("drawn", [False, True], ids=["most probable", "drawn"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_lossless_verifications_leave_the_distribution_of_the_target(shape, drawn, cut):
    torch.manual_seed(0)
    target, draft = transitions(everything=False)
    offered = proposal(shape, drawn, draft)
    if cut:  # rows with fewer guesses, some with none: the rest is padding
        offered.counts = torch.arange(ROWS) % (offered.tokens.shape[1] + 1)
    counts, accepted = three_tokens(lossless, offered, target)
    assert p_value(counts, exact(target)) > RIGHT
    assert 0.2 < accepted < 1.8, "some accepted, some rejected"


def by_definition(keep=lambda p, q: p / q, rest=lambda p, q: (p - q).clamp(min=0), renormalised=True):
    """Rejection sampling written down node by node, with its parts to be exchanged: the probability to keep a draft,
    and the distribution after a rejection."""

    def rule(scores: torch.Tensor, proposal: Proposal):
        target, (rows, width) = scores.softmax(-1), proposal.tokens.shape
        parents = torch.arange(-1, width - 1).expand(rows, -1) if proposal.parents is None else proposal.parents
        at, p = torch.full((rows,), -1), target[:, 0]
        accepted, kept = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, width + 1, dtype=torch.int64)
        for node in range(width):
            token, q = proposal.tokens[:, node, None], proposal.probabilities[:, node]
            asked = at == parents[:, node]
            keeps = asked & (torch.rand(rows) < keep(p.gather(1, token), q.gather(1, token))[:, 0])
            left = rest(p, q)
            left = torch.nn.functional.normalize(left, p=1.0) if renormalised else left
            p = torch.where(keeps[:, None], target[:, node + 1], torch.where(asked[:, None], left, p))
            kept = torch.where(keeps[:, None], kept.scatter(1, accepted[:, None], token), kept)
            at, accepted = torch.where(keeps, node, at), accepted + keeps
        return kept.scatter(1, accepted[:, None], torch.multinomial(p + 1e-12, 1)), accepted  # p may be all zeros

    return rule


def misreported(scores: torch.Tensor, proposal: Proposal):
    """A drafter that says of a sibling what it was drawn from before the earlier ones were taken out, as it stood."""
    first = (proposal.parents[:, :, None] == proposal.parents[:, None]).int().argmax(-1)  # sibling of each node
    index = first[..., None].expand(-1, -1, VOCABULARY)
    told = Proposal(proposal.tokens, proposal.counts, proposal.probabilities.gather(1, index), proposal.parents)
    return lossless(scores, told)


def cut_by_what_was_drawn(scores: torch.Tensor, proposal: Proposal):
    """Drafting ends *before* a token that the draft itself finds unlikely. (After it is right.)"""
    found = proposal.probabilities.gather(-1, proposal.tokens[..., None])[..., 0]
    counts = (found > 0.3).int().cumprod(1).sum(1)
    return lossless(scores, Proposal(proposal.tokens, counts, proposal.probabilities, proposal.parents))


def typical(scores: torch.Tensor, proposal: Proposal):
    return verify(scores, proposal, do_sample=True, acceptance=TypicalAcceptance())


WRONG_RULES = {
    "accepts always": (by_definition(keep=lambda p, q: torch.ones_like(p)), ("chain", "tree")),
    "accepts with p instead of p / q": (by_definition(keep=lambda p, q: p), ("chain", "tree")),
    "resamples from p": (by_definition(rest=lambda p, q: p), ("chain", "tree")),
    "does not renormalise for the next sibling": (by_definition(renormalised=False), ("tree",)),
    "does not renormalise the draft's siblings": (misreported, ("tree",)),
    "cuts by what was drawn": (cut_by_what_was_drawn, ("chain", "tree")),
    "typical acceptance": (typical, ("chain", "tree")),
}


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_same_test_rejects_wrong_rules(shape):
    target, draft = transitions(everything=True)
    torch.manual_seed(0)
    counts, _ = three_tokens(by_definition(), proposal(shape, True, draft), target)
    assert p_value(counts, exact(target)) > RIGHT, "the definition itself"
    for name, (rule, shapes) in WRONG_RULES.items():
        if shape in shapes:
            torch.manual_seed(0)
            counts, _ = three_tokens(rule, proposal(shape, True, draft), target)
            assert p_value(counts, exact(target)) < WRONG, name


def test_typical_acceptance_is_lossy_for_the_most_probable_too():
    target, draft = transitions(everything=True)
    for shape in ("chain", "tree"):
        torch.manual_seed(0)
        counts, _ = three_tokens(typical, proposal(shape, False, draft), target)
        assert p_value(counts, exact(target)) < WRONG


# --- through generate() ---

WARPERS = {
    "temperature": dict(temperature=1.7, top_k=0),
    "top_k": dict(top_k=2),
    "top_p": dict(top_k=0, top_p=0.5),
    "min_p": dict(top_k=0, min_p=0.3),
    "all": dict(temperature=1.6, top_k=6, top_p=0.9, min_p=0.1),
}
NEVER = 9  # an end of sequence that is no token


@functools.cache
def models():
    """Target and draft over 8 tokens: a layer that sees two tokens, so that the next one depends on two."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, sliding_window=2)
    tokens = dict(vocab_size=8, max_position_embeddings=1024, eos_token_id=NEVER, pad_token_id=None)
    target = enable_speculation(tiny_model("mistral", **sizes, **tokens))
    target.generation_config.pad_token_id = NEVER
    return target, drafting(perturbed(target, 0.2), 3)


def following(model, texts: torch.Tensor, warpers: dict) -> torch.Tensor:
    """Probabilities [rows, 8] of the next token, by plain generation."""
    options = dict(do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
    return model.generate(texts, **options, **warpers).scores[0].softmax(-1)


def sampled(prompts: torch.Tensor, new: int, **options):
    torch.manual_seed(0)
    options = dict(options, do_sample=True, max_new_tokens=new, return_dict_in_generate=True)
    return models()[0].generate(prompts, **options)


@pytest.mark.parametrize("warper", WARPERS)
def test_warpers_act_on_both_distributions(warper):
    """Of three tokens the second is drafted: it is kept as often as the two warped distributions overlap, and the text
    is distributed as the warped target's."""
    (target, draft), warpers, rows = models(), WARPERS[warper], 8_000
    texts, probabilities, overlap = torch.tensor([[3, 4, 5, 3, 4, 5]]), torch.ones(1), 0.0
    prompts = texts.expand(rows, -1)
    for place in range(3):
        p = following(target, texts, warpers)
        if place == 1:
            overlap = (probabilities @ torch.minimum(p, following(draft, texts, warpers)).sum(-1)).item()
            unwarped = (probabilities @ torch.minimum(p, following(draft, texts, dict(top_k=0))).sum(-1)).item()
        probabilities = (probabilities[:, None] * p).flatten()
        texts = torch.cat([texts.repeat_interleave(8, 0), torch.arange(8).repeat(len(texts))[:, None]], 1)
    output = sampled(prompts, 3, assistant_model=draft, **warpers)
    codes = output.sequences[:, -3:] @ torch.tensor([64, 8, 1])
    assert p_value(torch.bincount(codes, minlength=8**3), probabilities) > RIGHT
    kept = sum(output.acceptance_by_position)
    interval = 3.89 * math.sqrt(overlap * (1 - overlap) / rows)  # as improbable as `RIGHT`
    assert abs(kept - overlap) < interval < abs(unwarped - overlap), (kept, overlap, unwarped)


class Guesses(Observer):
    """A tree by transition probabilities that know nothing of the target."""

    max_tokens = 2

    def __init__(self, draws: bool, sure: bool):
        self.draws, self.sure = draws, sure
        self.table = (torch.randn(8, 8, generator=torch.Generator().manual_seed(3)) * 1.5).softmax(-1)

    def propose(self, limits, nodes):
        last = self.sequences.last(1)[:, 0]
        offered = guesses(last, self.table, TREES[0], self.draws)
        offered.counts = torch.where(torch.tensor(limits) > 1, 6, torch.tensor(limits) * 3)
        if self.sure:
            above = torch.cat([last[:, None], offered.tokens], 1).gather(1, offered.parents + 1)
            offered.confidence = self.table[above, offered.tokens]
            offered.confidence[:, 3:] *= offered.confidence.gather(1, offered.parents[:, 3:])
        return offered


LONG_RUNS = {
    "assistant": lambda: models()[1],
    "tree of the assistant": lambda: fixed(AssistantDrafter(models()[1], tree=6)),
    "drawn tree": lambda: fixed(Guesses(True, False)),
    "drawn tree that is sure": lambda: Guesses(True, True),
    "most probable tree": lambda: fixed(Guesses(False, True)),
}


def transitions_p_value(drafter, rows: int, warpers: dict) -> float:
    """Of 30 tokens of `rows` rows. Rows run apart and end at different steps; draft lengths adapt unless told
    otherwise."""
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    transition = following(models()[0], pairs, warpers)
    prompts = torch.randint(8, (rows, 4), generator=torch.Generator().manual_seed(1))
    output = sampled(prompts, 30, assistant_model=drafter, **warpers)
    assert 0.2 < output.accepted_tokens.sum() / output.row_steps.sum() < 2, "some accepted, some rejected"
    text = output.sequences[:, 2:]
    states = (text[:, :-2] * 8 + text[:, 1:-1]).flatten()
    visits = torch.bincount(states, minlength=64)[:, None]
    counts = torch.bincount(states * 8 + text[:, 2:].flatten(), minlength=512)
    return p_value(counts, (visits * transition).flatten(), constraints=64)


@pytest.mark.parametrize("drafter", LONG_RUNS)
def test_long_calls_have_the_transition_probabilities_of_the_target(drafter):
    """25 500 draws: as many as show what typical acceptance does (below)."""
    warpers = WARPERS["all"] if drafter == "assistant" else {"top_k": 0}
    assert transitions_p_value(LONG_RUNS[drafter](), 850, warpers) > RIGHT


def test_typical_acceptance_is_seen_in_a_long_run_too():
    lossy = Speculation(Guesses(True, False), acceptance=TypicalAcceptance(), adaptive=False)
    assert transitions_p_value(lossy, 850, {"top_k": 0}) < WRONG
