"""Randomised orthonormal Hadamard transforms along the last dimension, of any size. They spread an outlier column over
all columns (QuIP#, https://arxiv.org/abs/2402.04396; QuaRot, https://arxiv.org/abs/2404.00456).

The transform of K = odd * 2^m columns is a Kronecker product of small matrices. Powers of two take Sylvester's
matrices; the odd part takes the Paley matrix of order odd * 2^j (entries +-1) where one exists, else the Hartley matrix
of order odd (entries of magnitude up to sqrt(2)). Where the odd part exceeds 512, each of `odd` blocks of 2^m columns
is transformed alone.
"""

import math
from functools import lru_cache

import torch


_LARGEST_ODD = 512  # order of a Hartley matrix; with larger odd parts columns are transformed in blocks
_LARGEST_PALEY = 256  # order: a larger product costs more than the mixing gains
_PREFERRED = 64  # order: matrices up to this size are joined into one product


def random_signs(columns: int, seed: int = 0) -> torch.Tensor:
    """int8 [columns] of +-1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (columns,), generator=generator, dtype=torch.int8) * 2 - 1


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """x [..., K] @ R with the orthonormal R = diag(signs) H [K, K], in the dtype of x.

    It is computed in float32, for float64 in that. A weight [N, K] is rotated alike: rotate(x) @ rotate(W)^T = x @ W^T.

    Raises:
        ValueError: `signs` is not [K].
    """
    check(x, signs)
    return _transform(x * signs, transposed=False)


def unrotate_weight(weight: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """weight [..., K] @ R^T: the inverse of `rotate`.

    Raises:
        ValueError: `signs` is neither [K] nor, for stacked weights, [..., 1, K].
    """
    check(weight, signs)
    return _transform(weight, transposed=True) * signs


def check(x: torch.Tensor, signs: torch.Tensor) -> None:
    """Raises ValueError if `signs` has not one sign for each column of x."""
    if signs.shape[-1:] != x.shape[-1:]:
        raise ValueError(f"signs {tuple(signs.shape)} do not fit {x.shape[-1]} columns: expected ({x.shape[-1]},)")


def _transform(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    blocks, matrices = _constants(x.shape[-1], dtype, x.device)
    y = x.to(dtype).unflatten(-1, (blocks, -1))
    for matrix in matrices:  # transforms the leading factor and moves it to the end: the last one restores the order
        y = y.unflatten(-1, (matrix.shape[0], -1)).transpose(-1, -2) @ (matrix.t() if transposed else matrix)
        y = y.flatten(-2)
    return y.flatten(-2).to(x.dtype)


@torch.compiler.assume_constant_result
def _constants(columns: int, dtype: torch.dtype, device: torch.device) -> tuple[int, list[torch.Tensor]]:
    return constants(columns, dtype, device)


@lru_cache(maxsize=64)
def constants(columns: int, dtype: torch.dtype, device: torch.device) -> tuple[int, list[torch.Tensor]]:
    """`factors` with the matrices in place of their orders. The first matrix holds the scale, so that the others are
    exact."""
    blocks, orders = factors(columns)
    with torch.inference_mode(False), torch.no_grad():
        matrices = [_unnormalized(order) for order in orders]
        if matrices:
            matrices[0] = matrices[0] / math.sqrt(columns // blocks)
        return blocks, [matrix.to(device, dtype) for matrix in matrices]


def factors(columns: int) -> tuple[int, tuple[int, ...]]:
    """(blocks, orders): the transform of `columns` is block diagonal with as many equal blocks, each the Kronecker
    product of matrices of these orders."""
    power = columns & -columns
    odd, blocks, orders = columns // power, 1, ()
    if odd > _LARGEST_ODD:
        blocks = odd
    elif odd > 1:
        candidates = [odd << j for j in range(2, power.bit_length()) if odd << j <= _LARGEST_PALEY]
        paley = [order for order in candidates if _paley_prime(order)]
        orders = (max((n for n in paley if n <= _PREFERRED), default=min(paley, default=odd)),)
        power //= max(1, orders[0] // odd)
    exponent = power.bit_length() - 1
    parts = -(-exponent // (_PREFERRED.bit_length() - 1))
    return blocks, orders + tuple(1 << (exponent + part) // parts for part in range(parts))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _paley_prime(order: int) -> int | None:
    """The prime from which Paley's first (3 modulo 4) or second (1 modulo 4) construction makes this order, if any."""
    if order % 4 == 0 and _is_prime(order - 1):
        return order - 1
    if order % 4 == 0 and order // 2 % 4 == 2 and _is_prime(order // 2 - 1):
        return order // 2 - 1
    return None


def _unnormalized(order: int) -> torch.Tensor:
    """float64 [order, order], M M^T = order * I."""
    if order & (order - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(order.bit_length() - 1):
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
        return matrix
    index = torch.arange(order)
    prime = _paley_prime(order)
    if prime is None:
        angle = index.outer(index).remainder(order).double() * (2 * math.pi / order)
        return angle.cos() + angle.sin()
    quadratic = torch.full((prime,), -1.0, dtype=torch.float64)  # the Legendre symbol
    quadratic[torch.arange(prime).square() % prime] = 1.0
    quadratic[0] = 0.0
    index = torch.arange(prime)
    core = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    core[0, 0] = 0.0
    core[1:, 1:] = quadratic[(index[:, None] - index) % prime]
    eye = torch.eye(prime + 1, dtype=torch.float64)
    if prime % 4 == 3:
        core[1:, 0] = -1.0
        return core + eye
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    return torch.kron(core, pair) + torch.kron(eye, torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64))
