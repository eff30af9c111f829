"""The compiled order of codes against torch's operators, bit for bit."""

import pytest
import torch

from hf_efficient.kernels.linear import lines
from hf_efficient.kernels.linear.codes import pack_codes, unpack_codes


SHAPES = ((16, 32), (33, 100), (5, 7), (48, 256), (1, 40))


@pytest.mark.parametrize(("bits", "stored"), [(2, 2), (2, 4), (3, 3), (3, 4), (3, 8), (4, 4), (4, 8), (8, 8)])
def test_the_words_of_torchs_operators(bits, stored, tier):
    for n, k in SHAPES:
        qweight = pack_codes(torch.randint(2**bits, (n, k), dtype=torch.uint8), bits)
        words = lines.pack_lines(qweight, bits, k, stored)
        codes = unpack_codes(qweight, bits, k)
        assert torch.equal(words, lines.lines_of(codes, stored)), (n, k)
        assert torch.equal(lines.unpack_lines(words, stored, n, k), codes), (n, k)
        wider = torch.cat((qweight, qweight), 1)  # rows that are part of longer ones, and columns apart
        assert torch.equal(lines.pack_lines(wider[:, : qweight.shape[1]], bits, k, stored), words)
        assert torch.equal(lines.pack_lines(qweight.t().contiguous().t(), bits, k, stored), words)


@pytest.mark.parametrize(("stored", "added"), [(8, 128), (2, 1)])
def test_numbers_below_zero(stored, added, tier):
    numbers = torch.randint(-added, (2**stored - added), (35, 90), dtype=torch.int8)
    words = lines.pack_lines(numbers, 8, 90, stored, added=added)
    assert torch.equal(words, lines.lines_of((numbers.short() + added).to(torch.uint8), stored))


def test_bytes_as_they_are_and_the_way_without_a_compiler(monkeypatch, tier):
    codes = torch.randint(256, (21, 50), dtype=torch.uint8)
    words = lines.pack_lines(codes, 8, 50, 8, has_signs=False)
    columns = words.view(torch.uint8).view(2, 13, 16, 4)[..., [0, 2, 1, 3]]  # pairs stand in the halves of a word
    stored = columns.permute(0, 2, 1, 3).reshape(32, 52)
    assert torch.equal(stored[:21, :50], codes) and not stored[21:].any() and not stored[:, 50:].any()
    monkeypatch.setattr(lines, "function", lambda: None)
    assert torch.equal(lines.pack_lines(codes, 8, 50, 8, has_signs=False), words)
    numbers = codes.view(torch.int8)
    without = lines.pack_lines(numbers, 8, 50, 8, added=128)
    monkeypatch.undo()
    assert torch.equal(lines.pack_lines(numbers, 8, 50, 8, added=128), without)
