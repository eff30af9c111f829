"""Draft heads: what they propose, what they are trained on, and that the output stays the target's."""

import copy

import numpy as np
import pytest
import torch
from helpers import TINY_MODELS, assert_close, assert_same_tensors, left_padded_batch, rms_error_ratio, tiny_model
from table import REFUSALS
from test_drafters import append, sequences_of
from transformers import AutoModelForCausalLM

from hf_efficient import EagleHead, MedusaHeads, Speculation, WeightOnlyConfig, enable_speculation
from hf_efficient.generation.drafters import eagle_chain, eagle_tree
from hf_efficient.generation.drafters.medusa import static_tree
from hf_efficient.generation.speculation.token_tree import best_first, trees_of
from hf_efficient.generation.training import distill as training
from hf_efficient.generation.training.rows import Row
from hf_efficient.kernels.replay import function, recorder
from hf_efficient.kernels.replay.recorder import interpreter


NEW = 24
KINDS = (EagleHead, MedusaHeads)


@pytest.fixture(scope="module")
def target():
    return enable_speculation(tiny_model("llama", eos_token_id=None))


@torch.no_grad()
def hidden_of(target, tokens: torch.Tensor, mask=None) -> torch.Tensor:
    """What heads read of the target, [rows, length, 64 * (1 + layers)]."""
    output = target.model(tokens, attention_mask=mask, output_hidden_states=True)
    layers = EagleHead.layers_read(target.config.num_hidden_layers)
    return torch.cat([output.last_hidden_state, *(output.hidden_states[layer + 1] for layer in layers)], -1)


@pytest.fixture(scope="module")
def text(target):
    """The batch, what plain greedy generation makes of it, and that with hidden states as training rows."""
    batch = left_padded_batch()
    plain = target.generate(**batch, max_new_tokens=NEW, do_sample=False)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, NEW), value=1)
    hidden = hidden_of(target, plain, mask)
    prompts = batch["attention_mask"].sum(1).tolist()
    rows = [Row(plain[b, 11 - prompt :], hidden[b, 11 - prompt : -1], prompt) for b, prompt in enumerate(prompts)]
    return batch, plain, rows


@pytest.fixture(scope="module")
def trained(target, text, tmp_path_factory):
    """Heads of each kind that know the text by heart, more or less."""
    heads = {}
    for kind in KINDS:
        torch.manual_seed(0)
        heads[kind] = kind.for_model(target, draft_tokens=120)
        training.distill(heads[kind], target, text[2], tmp_path_factory.mktemp("heads"), 40, 1e-2, seed=0)
        training.measure(heads[kind], target, text[2])
    return heads


def generate(target, inputs, heads, adaptive=False, **options):
    heads = Speculation(heads, adaptive=adaptive)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **options}
    return target.generate(**inputs, assistant_model=heads, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 4, 32])
def test_greedy_output_is_that_of_plain_generation(kind, nodes, target, text, trained):
    batch, plain, _ = text
    single = {key: value[1:2] for key, value in batch.items()}
    for heads in (kind.for_model(target, 128), trained[kind])[nodes < 32 :]:
        heads.nodes, heads.beam = nodes, min(nodes, 6)
        outputs = generate(target, single, heads), generate(target, batch, heads, True), generate(target, batch, heads)
        for output, expected in zip(outputs, (plain[1:2], plain, plain)):
            assert output.sequences.tolist() == expected.tolist()
    assert output.tokens_per_step > {1: 1.3, 4: 1.5, 32: 1.8}[nodes]


@pytest.mark.parametrize("kind", KINDS)
def test_finished_sequences_leave_and_pages_are_read(kind, target, text, trained):
    batch, plain, _ = text
    single = {key: value[1:2] for key, value in batch.items()}
    end = plain[0, 11 + 5].item()
    options = {"eos_token_id": end, "pad_token_id": 0}
    expected = target.generate(**batch, max_new_tokens=NEW, do_sample=False, **options)
    for attention in ("flash_paged", "sdpa"):
        target.set_attn_implementation(attention)
        assert generate(target, batch, trained[kind], **options).sequences.tolist() == expected.tolist()
        assert generate(target, single, trained[kind]).sequences.tolist() == plain[1:2].tolist()


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_every_architecture_keeps_its_output(architecture):
    """Scaled embeddings, capped or biased heads, learned positions, sliding windows, experts."""
    model = enable_speculation(tiny_model(architecture, eos_token_id=None))
    model.set_attn_implementation("eager" if (architecture, "sdpa") in REFUSALS else "sdpa")
    batch = left_padded_batch()
    plain = model.generate(**batch, max_new_tokens=12, do_sample=False).tolist()
    for kind in KINDS:
        heads = kind.for_model(model, 128)
        assert generate(model, batch, heads, max_new_tokens=12).sequences.tolist() == plain


def test_a_compressed_output_head_is_asked_for_its_rows(target, tmp_path):
    target.save_pretrained(tmp_path)
    config = WeightOnlyConfig(bits=8, group_size=32, quantize_lm_head=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    assert type(model.lm_head) is not torch.nn.Linear
    heads = MedusaHeads.for_model(model, 50)
    heads.draft_tokens.copy_(torch.randperm(128)[:50])
    heads.check(model)
    hidden = torch.randn(3, 64)
    expected = model.lm_head(hidden)[:, heads.draft_tokens]
    assert_close(heads.logits(hidden), expected, 1e-3, 1e-2, "the kernel's own sums and scales of float32")


class TestEagle:
    def begin(self, heads, target, rows: list[list[int]], generated: int, drafting: bool = False):
        """The drafter after `generated` tokens of each row were made one by one, with a draft before each or not; rows
        are padded on the left."""
        hidden = [hidden_of(target, torch.tensor([row[:-1]]))[0] for row in rows]
        width = max(map(len, rows)) - generated
        pads = [width - len(row) + generated for row in rows]
        prompts = torch.tensor([[0] * n + row[: len(row) - generated] for n, row in zip(pads, rows)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads])
        first = torch.tensor([row[-generated] for row in rows])
        sequences = sequences_of(prompts, mask, first)
        heads.check(target)
        cut = [states[: len(row) - generated] for states, row in zip(hidden, rows)]
        heads.begin(sequences, torch.stack([torch.nn.functional.pad(c, (0, 0, n, 0)) for c, n in zip(cut, pads)]))
        for back in range(generated - 1, 0, -1):
            if drafting:
                heads.propose([4] * len(rows), 4)
            new = append(sequences, torch.tensor([[row[-back]] for row in rows]))
            heads.accept(new, torch.stack([states[-back] for states in hidden])[:, None])
        return sequences

    ROWS = [[5, 9, 30, 77, 12, 4, 99, 100], [8, 3, 21, 54, 60], [17, 90, 91, 92, 13, 14]]

    @pytest.mark.parametrize("parts", [False, True])
    @torch.no_grad()
    def test_a_chain_is_what_training_unrolled(self, parts, target, trained, monkeypatch):
        """Reading the cache gives what one pass over the whole text gives, guess for guess; also prompts that are read
        in parts, and tokens that are too many to be captured."""
        heads = trained[EagleHead]
        if parts:
            monkeypatch.setattr(eagle_tree, "PADDED_WIDTH", 2)
            monkeypatch.setattr(eagle_tree, "PREFILL_TOKENS", 3)
            monkeypatch.setattr(eagle_chain, "MAX_CAPTURED_TOKENS", 0)
        heads.nodes, heads.beam = 4, 1
        for generated, drafting in ((1, False), (3, False), (3, True)):
            self.begin(heads, target, self.ROWS, generated, drafting)
            proposal = heads.propose([4, 4, 4], 4)
            for b, row in enumerate(self.ROWS):
                chain = [node for node in range(4) if proposal.parents[b, node] == node - 1]
                draft = proposal.tokens[b, chain].tolist()
                tokens = torch.tensor([row + draft])
                hidden = hidden_of(target, tokens[:, :-1])
                hidden[:, len(row) - 1 :] = 0.0  # what the target has not seen
                likely = 1.0
                for depth, guesses in enumerate(heads.unroll(tokens, hidden, len(draft))):
                    logits = heads.logits(guesses[0, len(row) - 1 + depth]) / heads.temperatures[depth]
                    likely = likely * logits.softmax(-1).max()
                    assert heads.draft_tokens[logits.argmax()] == draft[depth]
                    reason = "float32 sums in another order"
                    assert_close(proposal.confidence[b, chain[depth]], likely, 1e-4, 1e-4, reason)

    @torch.no_grad()
    def test_a_chain_without_the_host_is_that_of_the_loop(self, target, trained, monkeypatch):
        """Siblings too, at every depth; it ends where the last guess is unlikely, by the calls before."""
        monkeypatch.setattr(eagle_tree, "MIN_REACH", 0.0)
        heads = copy.deepcopy(trained[EagleHead])
        heads.nodes, heads.beam = 63, 1
        found = []
        for patched in (False, True):
            if patched:
                monkeypatch.setattr(eagle_tree.EagleLayer, "_chains", False)
            for limits in ([4, 2, 1], [5, 5, 5], [1, 1, 1]):
                self.begin(heads, target, self.ROWS, 3)
                found.append(heads.propose(limits, 63))
        for proposals in zip(found[:3], found[3:]):
            for chain, loop in zip(*map(trees_of, proposals), strict=True):
                assert (chain.tokens, chain.parents) == (loop.tokens, loop.parents)
                assert chain.confidence == pytest.approx(loop.confidence, rel=1e-4), "float32 sums in another order"
        monkeypatch.undo()
        monkeypatch.setattr(eagle_tree, "MIN_REACH", 1.1)
        assert heads.propose([5, 5, 5], 63).width == eagle_tree.BRANCHES, "one depth"

    @torch.no_grad()
    @pytest.mark.parametrize("beam", [4, 1])
    def test_sequences_do_not_touch_each_other(self, beam, target, trained, monkeypatch):
        monkeypatch.setattr(eagle_tree, "MIN_REACH", 0.0)  # the depth of all rows follows the surest one
        heads = trained[EagleHead]
        heads.nodes, heads.beam = 16, beam
        self.begin(heads, target, self.ROWS, 2)
        heads.select([0, 2])
        batch = heads.propose([3, 5], 63)
        for b, row in enumerate((self.ROWS[0], self.ROWS[2])):
            self.begin(heads, target, [row], 2)
            alone = heads.propose([(3, 5)[b]], 63)
            count = int(alone.counts)
            assert batch.counts[b] == count == 16
            assert batch.tokens[b].tolist() == alone.tokens[0].tolist()
            assert batch.parents[b].tolist() == alone.parents[0].tolist()
            reason = "float32 sums in another order"
            assert_close(batch.confidence[b], alone.confidence[0], 1e-4, 1e-4, reason)

    @pytest.mark.parametrize("beam", [4, 1])
    @torch.no_grad()
    def test_captures_follow_the_weights_and_stay_out_of_copies(self, beam, target, trained, monkeypatch):
        heads = copy.deepcopy(trained[EagleHead])
        heads.nodes, heads.beam = 16, beam
        proposals = []
        for step in range(3):
            if step == 2:  # the same without a capture
                heads = copy.deepcopy(heads)
                monkeypatch.setattr(function, "interpreter", lambda: None)
            self.begin(heads, target, self.ROWS, 2)
            proposals.append(heads.propose([3, 5, 4], 16))
            (cache,) = heads._captures.values()
            kept = sum(len(each._captures) for each in cache._captures.values())
            assert kept == (2 if step < 2 and recorder.interpreter() is not None else 0), (
                "of tokens accepted, and of a depth"
            )
            if step == 0:
                heads.output_norm.mul_(-1)
        first, changed, plain = proposals
        assert not torch.equal(first.tokens, changed.tokens)
        assert torch.equal(changed.tokens, plain.tokens) and torch.equal(changed.parents, plain.parents)
        assert_close(changed.confidence, plain.confidence, 1e-5, 1e-5, "float32 sums in another order")

    @torch.no_grad()
    def test_it_starts_from_least_squares(self, target, text):
        heads = EagleHead.for_model(target, 128)
        heads.bind(target)
        rows = text[2] * 20  # more examples than unknowns, with noise
        examples = [(row.tokens, row.hidden + 0.5 * torch.randn(row.hidden.shape)) for row in rows]
        heads.fit(examples)

        def error(size):
            total = 0.0
            for tokens, hidden in examples:
                x = heads.inputs(heads.embed(tokens[1:-1]), hidden[:-1, :size])
                total += (x - hidden[1:, :64] / heads.output_norm).square().sum().item()
            return total

        for fuse, size in ((heads.fuse, 64), (heads.fuse_target, 128)):
            best, kept = error(size), fuse.clone()
            for _ in range(5):
                fuse.copy_(kept + 0.01 * torch.randn(fuse.shape))
                assert error(size) > best
            fuse.copy_(kept)
        assert error(128) < 0.99 * error(64), "what an inner layer gave says more"
        tokens, hidden = examples[0]
        x = heads.inputs(heads.embed(tokens[1:]), hidden)
        expected = torch.nn.functional.rms_norm(x, (64,), heads.output_norm, 1e-6)
        guesses = next(heads.unroll(tokens[None], hidden[None], 1))
        assert_close(guesses[0, 1:], expected[:-1], 1e-6, 1e-5, "the silent layer adds zeros")

    def test_a_proposal_is_a_tree_best_first_within_the_limits(self, target, trained, monkeypatch):
        heads = trained[EagleHead]
        heads.nodes, heads.beam = 63, 6
        sequences = self.begin(heads, target, self.ROWS, 1)
        with monkeypatch.context() as patch:
            patch.setattr(eagle_tree, "MIN_REACH", 1.0)
            assert (heads.propose([5, 1, 0], 20).parents[:, :8] == -1).all(), "nothing is sure enough to go on from"
        proposal = heads.propose([5, 1, 0], 20)
        assert proposal.tokens.shape == (3, 20) and proposal.tokens.device == sequences.device
        assert proposal.counts.tolist() == [20, 8, 0], "eight children of the root are considered"
        parents, confidence = proposal.parents[0], proposal.confidence
        assert (parents < torch.arange(20)).all() and (parents >= -1).all()
        assert (confidence[0, 1:] <= confidence[0, :-1]).all() and (confidence <= 1).all()
        assert (proposal.parents[1, :8] == -1).all()
        siblings = list(zip(parents.tolist(), proposal.tokens[0].tolist()))
        assert len(set(siblings)) == 20
        assert heads.propose([0, 0, 0], 20) is None


class TestMedusa:
    def test_untrained_heads_predict_what_the_target_predicted(self, target):
        heads = MedusaHeads.for_model(target, 128)
        heads.check(target)
        hidden = torch.randn(2, 64)
        said = target.lm_head(hidden)
        assert_close(heads.logits(heads(hidden))[:, 3], said, 1e-6, 1e-5, "the same product, of the same numbers")

    def test_static_tree_takes_the_paths_that_are_right_most_often(self):
        nodes = list(zip(*(values.tolist() for values in static_tree([[0.6, 0.2, 0.1], [0.5, 0.3]], 6))))
        # rank, parent, depth of paths that are right with 0.6, 0.6 * 0.5, 0.2, 0.6 * 0.3; then twice 0.1
        assert nodes[:4] == [(0, -1, 1), (0, 0, 2), (1, -1, 1), (1, 0, 2)]
        assert sorted(nodes[4:]) == [(0, 2, 2), (2, -1, 1)]
        assert len(static_tree([[0.6, 0.2], [0.5]], 50)[0]) == 4

    def test_confidence_is_the_product_along_the_path(self, target, trained):
        heads = trained[MedusaHeads]
        heads.check(target)
        heads.nodes = 12
        heads.begin(sequences_of(torch.tensor([[5, 6]]), first=torch.tensor([7])), torch.randn(1, 2, 64))
        proposal = heads.propose([4], 12)
        likely = heads.logits(heads(heads._hidden)) / torch.tensor(heads.temperatures)[:, None]
        likely = likely.softmax(-1)[0]
        for node in range(12):
            path = [node]
            while proposal.parents[0, path[0]] >= 0:
                path.insert(0, int(proposal.parents[0, path[0]]))
            at = [(heads.draft_tokens == proposal.tokens[0, n]).nonzero().item() for n in path]
            product = torch.stack([likely[depth, place] for depth, place in enumerate(at)]).prod()
            assert_close(proposal.confidence[0, node], product.detach(), 1e-5, 1e-6, "the same factors")


def test_best_first_keeps_parents_before_children():
    tokens = np.arange(6)[None]
    confidence = np.array([[0.5, 0.4, 0.45, 0.1, 0.4, 0.39]])
    parents = np.array([[-1, -1, 0, 0, 1, 2]])
    proposal = best_first(tokens, confidence, parents, np.array([1, 1, 2, 2, 2, 3]), [2], 4, "cpu")
    assert proposal.tokens.tolist() == [[0, 2, 1, 4]] and proposal.parents.tolist() == [[-1, 0, -1, 2]]
    assert proposal.counts.tolist() == [4]


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_goes_on_after_an_interruption(kind, target, text, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 4)
    rows = text[2] * 3  # three batches an epoch

    def run(folder, steps=10):
        torch.manual_seed(0)
        heads = kind.for_model(target, 128)
        folder.mkdir(exist_ok=True)
        return heads, training.distill(heads, target, rows, folder, steps, 1e-2, seed=3)

    first = training._loss
    start = kind.for_model(target, 128)
    start.bind(target)
    before = first(start, target, rows[:8], 3).item()
    whole, loss = run(tmp_path / "whole")
    assert loss < before
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return first(*arguments)

    monkeypatch.setattr(training, "_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    resumed, same = run(tmp_path / "parts")
    assert len(calls) == 7 + 6, "steps 5 to 10 were made after the four kept ones"
    assert same == loss
    assert_same_tensors(resumed.state_dict(), whole.state_dict())
    with pytest.raises(ValueError, match="holds another training"):
        run(tmp_path / "parts", steps=11)


def test_an_eagle_head_learns_one_guess_first_and_medusa_heads_all_along(target):
    eagle_head, medusa = (kind.for_model(target, 128) for kind in KINDS)
    progress = (0.0, 0.49, 0.5, 0.99)
    assert [eagle_head.trained_depth(share) for share in progress] == [1, 1, 3, 3]
    assert [medusa.trained_depth(share) for share in progress] == [4] * 4, "each head learns from its own guesses alone"


@pytest.mark.parametrize("bits, least, most", [(8, 1e-4, 0.02), (4, 0.02, 0.2)])
def test_matrices_of_an_eagle_head_in_few_bits(bits, least, most, target, text, trained):
    """They change what is guessed a little, and the output not at all; taken back they leave nothing."""
    batch, plain, _ = text
    heads = copy.deepcopy(trained[EagleHead])
    dense = generate(target, batch, heads)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    products = {
        name: heads.multiply(x[:, : getattr(heads, name).shape[1]], name) for name in ("attention_in", "mlp_in")
    }
    heads.bits = bits
    rounded = generate(target, batch, heads)
    assert torch.equal(rounded.sequences, plain) and torch.equal(dense.sequences, plain)
    assert rounded.accepted_tokens.sum() > 0.8 * dense.accepted_tokens.sum() > 0
    functions = [f for cache in heads._captures.values() for f in cache._captures.values()]
    if interpreter() is not None:
        assert all(f._can_capture for f in functions) and any(f._captures for f in functions)
    for name, product in products.items():
        error = rms_error_ratio(heads.multiply(x, name), product)
        assert least < error < most, (name, error)
    heads.bits = None
    assert torch.equal(generate(target, batch, heads).accepted_tokens, dense.accepted_tokens)
    heads.bits = 3
    with pytest.raises(ValueError, match="bits=3 of the draft heads: must be 8, 4 or None"):
        generate(target, batch, heads)
    heads.bits, heads.beam = None, 0
    with pytest.raises(ValueError, match="beam=0 of the draft heads: must be an integer of at least 1"):
        generate(target, batch, heads)
    heads.beam, heads.nodes = None, 64
    with pytest.raises(ValueError, match="nodes=64 of the draft heads: must be an integer from 1 to 63"):
        generate(target, batch, heads)
