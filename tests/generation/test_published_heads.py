"""Draft heads in the layouts that others publish: their logits, what they guess, and that the output stays the
target's."""

import itertools
import json

import pytest
import torch
import transformers
from draft_models import fixed
from helpers import assert_close, left_padded_batch, needs_transformers, tiny_model
from native_loop import transformers_loop
from published_heads import (
    Reference,
    dflash,
    dflash_of_speculators,
    dflash_states,
    eagle,
    eagle3,
    hydra,
    hydra_logits,
    medusa,
    speculators,
)
from safetensors.torch import load_file
from test_drafters import append, sequences_of
from test_speculative_distribution import RIGHT, models, transitions_p_value
from torch.nn.functional import pad, silu

from hf_efficient import BestOf, DraftHeads, MedusaHeads, enable_speculation
from hf_efficient.generation.drafters import eagle_tree, published_dflash
from hf_efficient.generation.speculation.token_tree import product_trees


SUMS = "float32 sums in another order"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EAGLES = {
    "EAGLE": lambda folder: eagle(folder, 64, 128),
    "EAGLE with its own embeddings": lambda folder: eagle(folder, 64, 128, own_embeddings=True),
    "EAGLE-3": lambda folder: eagle3(folder, 64, 128, 50),
    "EAGLE-3 of SpecForge": lambda folder: eagle3(folder, 64, 128, 128, [0, 2, 4], LLAMA3),
    "EAGLE-3 of speculators": lambda folder: speculators(folder, 32, 128, 40, 64),
}
READS = {"EAGLE-3": (1, 2, 2), "EAGLE-3 of SpecForge": (0, 2, 4), "EAGLE-3 of speculators": (0, 1, 4)}
ALL = {
    **EAGLES,
    "Medusa": lambda folder: medusa(folder, 64, 128, 3, 1),
    "Medusa in its target": lambda folder: medusa(folder, 64, 128, 3, 2, "medusa_head."),
    "Hydra": lambda folder: hydra(folder, 64, 128),
    "DFlash": lambda folder: dflash(folder, 64, 128, [1, 4], 6),
    "DFlash of speculators": lambda folder: dflash_of_speculators(folder, 64, 128, 40, [1, 4], 6),
    "DFlash with a window": lambda folder: dflash(folder, 64, 128, [1, 4], 6, 3),
}
ROWS = [[5, 9, 30, 77, 12, 4, 99, 100], [8, 3, 21, 54, 60], [17, 90, 91, 92, 13, 14]]


@pytest.fixture(scope="module")
def target():
    return enable_speculation(tiny_model("llama", eos_token_id=None, num_hidden_layers=6))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {name: make(folder / str(i)) for i, (name, make) in enumerate(ALL.items())}


def angles(name: str) -> torch.Tensor:
    """Radians a position, of each pair of numbers of a head."""
    base, half = (5000.0, 8) if name == "EAGLE-3 of SpecForge" else (10000.0, 8)
    plain = base ** -(torch.arange(half) / half)
    if name != "EAGLE-3 of SpecForge":
        return plain
    turns = 64 * plain / (2 * torch.pi)  # in the original length: at least 4 stay, at most 1 are slowed down by 8
    share = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    return share * plain + (1 - share) * plain / 8


@torch.no_grad()
def states_of(target, row: list[int], layers) -> tuple[torch.Tensor, torch.Tensor]:
    """What its end gives [length, 64], and the layers [length, layers, 64]."""
    output = target.model(torch.tensor([row]), output_hidden_states=True)
    inner = [output.hidden_states[layer + 1][0] for layer in layers]
    return output.last_hidden_state[0], torch.stack(inner, 1) if inner else torch.zeros(len(row), 0, 64)


def begin(heads, states: list[torch.Tensor], generated: int) -> None:
    """The drafter after `generated` tokens of each of `ROWS` came one by one, with a draft before each but the first;
    `states` [length - 1, ...] are what it reads. Prompts are padded on the left."""
    prompts = [row[: len(row) - generated] for row in ROWS]
    pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(pads, prompts)])
    batch = torch.tensor([[0] * n + prompt for n, prompt in zip(pads, prompts)])
    sequences = sequences_of(batch, mask, torch.tensor([row[-generated] for row in ROWS]))
    begins = [pad(read[: len(prompt)], (0, 0, n, 0)) for read, prompt, n in zip(states, prompts, pads)]
    heads.begin(sequences, torch.stack(begins))
    for back in range(generated - 1, 0, -1):
        heads.propose([4] * 3, 63)
        new = append(sequences, torch.tensor([[row[-back]] for row in ROWS]))
        heads.accept(new, torch.stack([read[-back] for read in states])[:, None])


@pytest.mark.parametrize("name", EAGLES)
@torch.no_grad()
def test_eagle_heads_guess_what_their_definition_says(name, target, folders, monkeypatch):
    """Rows of three lengths in one batch, after one and after three generated tokens, four guesses deep."""
    monkeypatch.setattr(eagle_tree, "MIN_REACH", 0.0)
    heads, layers = DraftHeads.from_pretrained(folders[name]), READS.get(name, ())
    heads.check(target)
    assert heads.reads_layers == layers
    heads.nodes, heads.beam = 63, 1
    tensors = load_file(folders[name] / "model.safetensors")
    config = json.loads((folders[name] / "config.json").read_text())
    reference = Reference(tensors, config, target.model.embed_tokens.weight, target.lm_head.weight, angles(name))
    states = [states_of(target, row[:-1], layers) for row in ROWS]
    for generated in (1, 3):
        begin(heads, [torch.cat([hidden, inner.flatten(1)], -1) for hidden, inner in states], generated)
        proposal = heads.propose([4] * 3, 63).chain()
        for b, row in enumerate(ROWS):
            guesses, logits = reference.chain(row, *states[b], 4)
            assert_close(heads.logits(heads._root[0][b, -1]), logits[0], 1e-4, 1e-3, SUMS)
            assert proposal.tokens[b].tolist() == guesses.tolist()
            assert_close(proposal.confidence[b], logits.softmax(-1).amax(-1).cumprod(0), 1e-3, 1e-3, SUMS)


@pytest.mark.parametrize("name", ["Medusa", "Medusa in its target"])
@torch.no_grad()
def test_medusa_heads_guess_what_their_definition_says(name, target, folders):
    heads = DraftHeads.from_pretrained(folders[name])
    heads.check(target)
    assert heads.max_tokens == 3 and isinstance(heads, MedusaHeads)
    (path,) = folders[name].glob("*.safetensors")
    tensors = {key.removeprefix("medusa_head."): value for key, value in load_file(path).items()}
    hidden, blocks = torch.randn(2, 64), 1 if name == "Medusa" else 2
    expected = []
    for head in range(3):
        x = hidden
        for block in range(blocks):
            linear = f"{head}.{block}.linear"
            x = x + silu(x @ tensors[f"{linear}.weight"].T + tensors[f"{linear}.bias"])
        expected.append(x @ tensors[f"{head}.{blocks}.weight"].T)
    expected = torch.stack(expected, 1)
    assert_close(heads.scores(hidden), expected, 1e-5, 1e-4, SUMS)
    heads.begin(sequences_of(torch.tensor([[5, 6], [6, 7]]), first=torch.tensor([7, 8])), hidden[:, None])
    proposal = heads.propose([3, 3], 12)
    for b in range(2):
        for node in range(int(proposal.counts[b])):
            path = [node]
            while proposal.parents[b, path[0]] >= 0:
                path.insert(0, int(proposal.parents[b, path[0]]))
            likely = expected[b].softmax(-1)
            product = torch.stack([likely[depth, proposal.tokens[b, n]] for depth, n in enumerate(path)]).prod()
            assert_close(proposal.confidence[b, node], product, 1e-4, 1e-4, SUMS)


@pytest.mark.parametrize(
    ("name", "window"), [("DFlash", None), ("DFlash with a window", 3), ("DFlash of speculators", None)]
)
@torch.no_grad()
def test_a_dflash_block_is_what_its_definition_says(name, window, target, folders, monkeypatch):
    monkeypatch.setattr(published_dflash, "FIRST_TOKENS", 6)  # the context grows
    heads = DraftHeads.from_pretrained(folders[name])
    heads.check(target)
    heads.nodes = 63
    assert heads.max_tokens == 5 and heads.reads_layers == (1, 4)
    tensors = load_file(folders[name] / "model.safetensors")
    states = [states_of(target, row[:-1], (1, 4)) for row in ROWS]
    for generated in (1, 3):
        begin(heads, [torch.cat([hidden, inner.flatten(1)], -1) for hidden, inner in states], generated)
        proposal = heads.propose([5, 3, 5], 63)
        for b, row in enumerate(ROWS):
            block = tensors.get("embed_tokens.weight", target.model.embed_tokens.weight)[[row[-1]] + [7] * 5]
            read = dflash_states(tensors, states[b][1], block, angles(name), window)[1:]
            likely = (read @ tensors.get("lm_head.weight", target.lm_head.weight).T).softmax(-1).topk(8)
            assert proposal.counts[b] == 63
            first = likely.indices[: (5, 3, 5)[b], 0]
            first = (first + tensors["d2t"][first] if "d2t" in tensors else first).tolist()
            chain = proposal.chain()
            found = chain.tokens[b, : chain.counts[b]].tolist()
            assert found == first[: len(found)] and found
            product = likely.values[:, 0].cumprod(0)[: len(found)]
            assert_close(chain.confidence[b, : len(found)], product, 1e-4, 1e-4, SUMS)
    with pytest.raises(ValueError, match=r"layers \[1, 4\] \(from 0\) of its target, and LlamaForCausalLM has 2"):
        heads.check(tiny_model("llama"))


@needs_transformers("5.23", "a DFlash drafter")
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_dflash_states_are_those_of_transformers(window, target, folders, tmp_path):
    """Its own drafter has the same layers, with two other names. It is read as it saves itself."""
    sizes = {key: getattr(DraftHeads.from_pretrained(folders["DFlash"]).config, key) for key in published_dflash.SIZES}
    kinds = ["full_attention" if window is None else "sliding_attention", "full_attention"]
    sizes |= dict(layer_types=kinds, sliding_window=window or 2048, rope_parameters=dict(rope_theta=10000.0))
    sizes |= dict(target_layer_ids=[1, 4], rms_norm_eps=1e-5, block_size=6, mask_token_id=7)
    sizes["rope_parameters"]["rope_type"] = "default"
    del sizes["vocab_size"]
    model = transformers.AutoModel.from_config(transformers.MuseGlimmerAssistantConfig(**sizes)).eval()
    names = {new: old for old, new in published_dflash.RENAMED.items()}
    tensors = load_file(folders["DFlash"] / "model.safetensors")
    model.load_state_dict({names.get(key, key): value for key, value in tensors.items()})
    model.save_pretrained(tmp_path)
    heads = DraftHeads.from_pretrained(tmp_path)
    heads.check(target)
    states = [states_of(target, row[:-1], (1, 4)) for row in ROWS]
    begin(heads, [torch.cat([hidden, inner.flatten(1)], -1) for hidden, inner in states], 3)
    actual = heads.states(torch.tensor([row[-1:] for row in ROWS]))
    for b, row in enumerate(ROWS):
        block = target.model.embed_tokens.weight[[row[-1]] + [7] * 5]
        cache = transformers.cache_utils.DFlashCache(config=model.config)  # by which masks of windows are made
        cache.set_previous_accepted_tokens(len(row) - 1)
        read = states[b][1].flatten(1)[None]
        output = model(noise_embeds=block[None], context_hidden_states=read, past_key_values=cache)
        assert_close(actual[b], output.last_hidden_state[0], 1e-5, 1e-4, SUMS)
    batch = left_padded_batch()
    plain = target.generate(**batch, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(**batch, max_new_tokens=12, do_sample=False, assistant_model=heads), plain)
    with pytest.raises(ValueError, match="mask_token_id=7 must be an integer from 0 to 5"):
        heads.check(tiny_model("llama", vocab_size=6, num_hidden_layers=6))


@torch.no_grad()
def test_hydra_heads_guess_what_their_definition_says(target, folders):
    heads = DraftHeads.from_pretrained(folders["Hydra"])
    heads.check(target)
    heads.nodes = 63
    tensors = load_file(folders["Hydra"] / "hydra_lm_head.safetensors")
    states, embeddings = [states_of(target, row[:-1], ())[0] for row in ROWS], target.model.embed_tokens.weight
    for generated in (1, 3):
        begin(heads, states, generated)
        proposal = heads.propose([3] * 3, 63)
        assert proposal.counts.tolist() == [63] * 3 and (proposal.parents >= 8).any()
        for b, row in enumerate(ROWS):
            for node in range(63):
                path, at = [], node
                while at >= 0:
                    path, at = [int(proposal.tokens[b, at]), *path], int(proposal.parents[b, at])
                likely = torch.ones(())
                for head, token in enumerate(path):
                    read = embeddings[[row[-1], *path[:head]]]
                    likely = likely * hydra_logits(tensors, head, states[b][-1], read).softmax(-1)[token]
                assert_close(proposal.confidence[b, node], likely, 1e-4, 1e-4, SUMS)


def test_drafters_that_read_different_layers_draft_together(target, folders):
    names = ("EAGLE-3", "EAGLE-3 of SpecForge", "Medusa", "DFlash")
    best = BestOf(*(DraftHeads.from_pretrained(folders[name]) for name in names))
    best.check(target)
    assert best.hidden_layers == (1, 2, 0, 4)
    hidden = torch.tensor([[9.0, 1, 2, 0, 4]])
    found = [best._part(drafter, hidden).tolist() for drafter in best.drafters]
    assert found == [[[9, 1, 2, 2]], [[9, 0, 2, 4]], [[9]], [[9, 1, 4]]]
    batch = left_padded_batch()
    plain = target.generate(**batch, max_new_tokens=12, do_sample=False)
    assert target.generate(**batch, max_new_tokens=12, do_sample=False, assistant_model=best).tolist() == plain.tolist()


def test_product_trees_hold_the_most_probable_paths():
    chances = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)).sort(-1, descending=True).values / 4
    tokens = torch.arange(24).view(2, 3, 4)
    proposal = product_trees(tokens.numpy(), chances.numpy(), [3, 2], 20, "cpu")
    for b, limit in enumerate((3, 2)):
        paths = {}  # of all lengths -> probability
        for depth in range(1, limit + 1):
            for ranks in itertools.product(range(4), repeat=depth):
                path = tuple(int(tokens[b, level, rank]) for level, rank in enumerate(ranks))
                paths[path] = torch.stack([chances[b, level, rank] for level, rank in enumerate(ranks)]).prod().item()
        best = dict(sorted(paths.items(), key=lambda item: -item[1])[:20])
        found = {}
        for node in range(int(proposal.counts[b])):
            path, at = (), node
            while at >= 0:
                path, at = (int(proposal.tokens[b, at]), *path), int(proposal.parents[b, at])
            found[path] = proposal.confidence[b, node].item()
        assert found == pytest.approx(best)


@pytest.fixture(scope="module")
def plain_calls(target):
    """Arguments of `generate()` and what it gives: for one sequence, for 8 that leave the batch one by one, and for
    these as long as they can be."""
    batch, options = left_padded_batch((5, 11, 8, 3, 9, 4, 7, 6)), dict(max_new_tokens=20, do_sample=False)
    last = {key: value[7:] for key, value in batch.items()}
    with transformers_loop():
        plain = target.generate(**batch, **options)
        ends = dict(**batch, **options, eos_token_id=plain[3, 15:18].tolist(), pad_token_id=0)
        return [(last | options, plain[7:]), (ends, target.generate(**ends)), (batch | options, plain)]


@pytest.mark.parametrize("name", ALL)
def test_greedy_output_is_that_of_plain_generation(name, target, folders, plain_calls):
    heads = DraftHeads.from_pretrained(folders[name])
    for options, expected in plain_calls:
        output = target.generate(**options, assistant_model=fixed(heads), return_dict_in_generate=True)
        assert output.sequences.tolist() == expected.tolist()
    assert output.accepted_tokens.sum() > 0, "something is drafted and accepted"


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "Medusa", "Hydra", "DFlash"])
def test_sampled_output_has_the_distribution_of_the_target(name, tmp_path):
    """Trees of 12 nodes over 8 tokens; 12 000 draws."""
    make = {
        "EAGLE": lambda: eagle(tmp_path, 32, 8),
        "EAGLE-3": lambda: eagle3(tmp_path, 32, 8, 6, [0]),
        "Medusa": lambda: medusa(tmp_path, 32, 8, 2, 1),
        "Hydra": lambda: hydra(tmp_path, 32, 8, 2),
        "DFlash": lambda: dflash(tmp_path, 32, 8, [0], 4),
    }
    heads = DraftHeads.from_pretrained(make[name]())
    heads.nodes = 12
    models()
    assert transitions_p_value(fixed(heads), 400, {"top_k": 0}) > RIGHT
