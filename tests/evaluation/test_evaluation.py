import json
import math
import types

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from report_content import content

from hf_efficient.evaluation import environment, latency, memory, perplexity, report, samples


def test_windows_do_not_overlap_and_have_no_special_tokens():
    tokens = perplexity.windows(tiny_tokenizer(), "abcdefghij", count=3, length=3)
    assert tokens.tolist() == [[68, 69, 70], [71, 72, 73], [74, 75, 76]]
    with pytest.raises(ValueError, match="10 tokens; 4 windows of 3 tokens need 12"):
        perplexity.windows(tiny_tokenizer(), "abcdefghij", count=4, length=3)


def test_negative_log_likelihood_is_the_mean_over_predicted_tokens():
    model = tiny_model("llama")
    tokens = torch.randint(3, 128, (2, 9))
    with torch.no_grad():
        log_p = model(tokens).logits[:, :-1].double().log_softmax(-1)
    expected = -log_p.gather(-1, tokens[:, 1:, None])[..., 0].mean(-1)
    nll = perplexity.negative_log_likelihood(model, tokens, progress=False)
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=0)
    assert perplexity.perplexity(nll) == pytest.approx(math.exp(expected.mean()), rel=1e-5)


def test_paired_difference_sees_less_noise_than_the_windows_have():
    reference = torch.tensor([1.0, 5.0, 3.0, 2.0]).double()
    mean, error = perplexity.paired_difference(reference + torch.tensor([0.1, 0.1, 0.1, 0.2]), reference)
    assert mean == pytest.approx(0.125)
    assert error == pytest.approx(0.025)


def test_weight_bytes_counts_tied_weights_once():
    model = tiny_model("llama_tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    named = sum(p.numel() * 4 for p in model.parameters())  # .parameters() yields a tied weight once
    assert memory.weight_bytes(model) == named + sum(b.numel() * b.element_size() for b in model.buffers())


def test_peak_memory_follows_an_allocation():
    before = memory.peak_memory_bytes(torch.device("cpu"))
    torch.zeros(before // 4 + 16_000_000).add_(1)  # more float32 bytes than the peak so far
    assert memory.peak_memory_bytes(torch.device("cpu")) > before


def test_generation_speed_separates_the_first_token(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock.now)

    def generate(tokens):
        clock.now += 2.0 + 0.5 * (tokens - 1)
        return tokens

    speed = latency.generation_speed(generate, batch_size=3, new_tokens=11, repeats=2, progress=False)
    assert speed["time_to_first_token_s"] == {"median": 2.0, "min": 2.0, "max": 2.0, "runs": 2}
    assert speed["tokens_per_second"]["median"] == pytest.approx(6.0)
    assert speed["result"] == 11


def test_environment_names_versions_and_hardware():
    described = environment.describe()
    assert described["versions"]["torch"] == torch.__version__
    assert described["hardware"]["cores"] >= 1
    json.dumps(described)


WIKITEXT = """{{Infobox|a={{nested}}}}<!-- hidden -->
'''Anarchism''' is a [[political theory|philosophy]] for [[self-governance]].<ref name="x">cited</ref> It &amp; others.
{| class="wikitable"
|-
| cell
|}
== Heading ==
[[File:a.jpg|thumb|a [[linked]] caption]]See [https://example.org the site]."""


def test_wikitext_becomes_plain_text():
    lines = [line for line in samples._plain_text(WIKITEXT).split("\n") if line.strip()]
    assert lines == ["Anarchism is a philosophy for self-governance. It & others.", "See the site."]


def test_sample_text_refuses_an_unknown_split():
    with pytest.raises(ValueError, match="split='test' is not one of"):
        samples.sample_text("test")


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    def fail(partial):
        (partial / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        samples._publish(tmp_path / "made", fail)
    assert list(tmp_path.iterdir()) == []


def test_report_compares_with_the_first_variant():
    base, small = content()["variants"]
    assert base["weights_ratio"] == 1 and base["nll_difference"] == 0
    assert small["weights_ratio"] == pytest.approx(0.4)
    assert small["speed_ratio"] == {"one_prompt": pytest.approx(2.5), "batch": pytest.approx(2.5)}
    assert small["perplexity"] == pytest.approx(math.exp(3.35))
    assert small["nll_difference"] == pytest.approx(0.25)


def test_report_files_hold_the_measured_numbers(tmp_path):
    paths = report.write(content(), tmp_path / "out", "A card.")
    assert [path.name for path in paths] == ["model_card.md", "plot.png", "report.json", "report.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [path.name for path in paths]
    card, _, stored, text = (path.read_bytes() for path in paths)
    assert json.loads(stored)["variants"][1]["weight_bytes"] == 80
    for part in (b"31.0 / 31.0", b"1.50 / 1.50", b"28.50", b"(2.50\xc3\x97)"):
        assert part in text
    assert card == b"A card."
    assert paths[1].read_bytes().startswith(b"\x89PNG")
