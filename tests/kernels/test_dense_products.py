"""Products of captured forwards with weights that are not quantized."""

import pytest
import torch
import torch.nn.functional as F

from hf_efficient.kernels.replay.recorder import Capture, interpreter


pytestmark = [
    pytest.mark.native_loop,
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(interpreter() is None, reason="no C++ kernels: no compiler, or another CPU"),
]


@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [
        *((1, 7, 64), (3, 4, 40), (6, 33, 100), (23, 64, 96), (27, 71, 96), (75, 97, 64), (70, 83, 38), (65, 20, 2100)),
        (420, 33, 544),  # AMX lays out the weight
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_dense_products(rows, columns, width, has_bias, tier):
    x, weight = torch.randn(rows, width).bfloat16(), torch.randn(columns, width).bfloat16()
    bias = torch.randn(columns).bfloat16() if has_bias else None
    capture = Capture(lambda: F.linear(x, weight, bias))
    assert len(capture._steps) == 1
    capture.output.fill_(float("nan"))
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    # float32 sums of exact products, rounded once
    torch.testing.assert_close(capture.replay().double(), expected, rtol=2**-8, atol=1e-4)
    # a row has the same bits alone and among others; from where rows or W are laid out, among that many and more
    least = 24 if "bf16" in tier or tier == "amx" else 64
    few, compared = (least, rows // least * least) if rows >= least else (1, rows)
    alone = [Capture(lambda some=some: F.linear(some, weight, bias)).replay() for some in x[:compared].split(few)]
    assert torch.equal(torch.cat(alone), capture.replay()[:compared])
    parts = [None if part is None else part[:64].float() for part in (x, weight[:64], bias)]  # of more rows torch's
    expected = expected[:64, :64]
    capture = Capture(lambda: F.linear(*parts))
    assert len(capture._steps) == 1
    capture.output.fill_(float("nan"))
    torch.testing.assert_close(capture.replay().double(), expected, rtol=1e-5, atol=1e-5)
    alone = [Capture(lambda row=row: F.linear(row, *parts[1:])).replay() for row in parts[0].split(1)]
    assert torch.equal(torch.cat(alone), capture.output)


@pytest.mark.parametrize("rows, width", [(1, 64), (5, 96), (70, 64), (70, 38), (330, 1632), (250, 2112)])
def test_products_of_one_x(rows, width, tier):
    """They run together, as many as fit, and give what they give alone. 330 rows of 1632 are more than AMX takes at
    once of rows that share a weight's layout, 250 of 2112 more than it lays out at once."""
    x = torch.randn(rows, width).bfloat16()
    weights = [torch.randn(columns, width).bfloat16() for columns in (33, 7, 96, 1, 64, 40)]
    biases = [torch.randn(len(weight)).bfloat16() if i % 2 else None for i, weight in enumerate(weights)]
    capture = Capture(lambda: [F.linear(x, *parts) for parts in zip(weights, biases)])
    assert len(capture._steps) == 1
    for y in capture.output:
        y.fill_(float("nan"))
    for y, weight, bias in zip(capture.replay(), weights, biases):
        assert torch.equal(y, Capture(lambda weight=weight, bias=bias: F.linear(x, weight, bias)).replay())
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        # float32 sums of exact products, rounded once
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("rows", [8, 512])
def test_a_product_that_is_the_weight_of_the_next(rows, tier):
    """Both of one x, and a third whose result may lie where a weight was that nobody needs any more."""
    x, weight = torch.randn(rows, 64).bfloat16(), torch.randn(64, 64).bfloat16()

    def forward():
        similar = F.linear(x, F.linear(x, weight))
        return similar, F.linear(x, x[:8] * 2), F.linear(x, weight[:rows])

    capture = Capture(forward)
    x.copy_(torch.randn(rows, 64))
    for y, expected in zip(capture.replay(), forward()):
        # sums of up to 64 products of numbers of about 8, rounded to 8 bits at both products
        torch.testing.assert_close(y, expected, rtol=2**-6, atol=2)
