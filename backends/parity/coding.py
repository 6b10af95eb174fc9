"""The code of parity: sums of products in the field of 256 elements, which is XOR for the first row of parity.

Row ``r`` of a stripe's parity is the sum over its members ``m`` of ``coefficient(r, m)`` times the member's block. The
coefficients are a Cauchy matrix whose columns are scaled so that row 0 has ones: each square part of it has an inverse,
so that any ``losses`` blocks of a stripe can be rebuilt (Blömer et al. 1995). A sum is built up block by block, in any
order. Products are looked up two bytes at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x11D
_STRIDE = 32 << 10
"""Products are looked up this many pairs of bytes at a time, so that their indices stay in the processor's cache."""
_TABLES = 64
"""Tables of products that are kept, each of 128 KiB."""


def coefficient(row: int, member: int, losses: int) -> int:
    """Return the factor of a member's block in a row of parity, of ``losses`` rows."""
    point = losses + member
    return _divide(point, row ^ point)  # row 0 has a one for every member


def add_product(total: memoryview, block: memoryview, factor: int) -> None:
    """Add ``factor`` times ``block`` to ``total``. Both are flat, of bytes, and of the same length."""
    into, data = np.frombuffer(total, np.uint8), np.frombuffer(block, np.uint8)
    if factor == 1:
        np.bitwise_xor(into, data, out=into)
        return
    if not factor:
        return
    table, even = _products(factor), len(data) & ~1
    pairs, sums = data[:even].view(np.uint16), into[:even].view(np.uint16)
    for start in range(0, len(pairs), _STRIDE):
        part = slice(start, start + _STRIDE)
        sums[part] ^= np.take(table, pairs[part], mode="clip")  # in any other mode it copies
    if even < len(data):
        into[even] ^= table[data[even]] & 0xFF


def rebuild_factors(
    member: int, lost: Sequence[int], rows: Sequence[int], kept: Sequence[int], losses: int
) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Return the factors that the blocks of a stripe are to be multiplied with, so that their sum is the block of
    ``member``: of the ``rows`` of parity, and of the members ``kept``, whose blocks are there.

    ``lost`` are the members whose blocks are missing, ``member`` among them; there are as many ``rows``.
    """
    matrix = [[coefficient(row, each, losses) for row in rows] for each in lost]
    solution = _solve(matrix, [int(each == member) for each in lost])
    of_rows = dict(zip(rows, solution, strict=True))
    of_members = {}
    for each in kept:
        factor = 0
        for row, own in of_rows.items():
            factor ^= _multiply(own, coefficient(row, each, losses))
        of_members[each] = factor
    return of_rows, of_members


def _solve(matrix: list[list[int]], right: list[int]) -> list[int]:
    """Solve a square system of equations, by elimination; it has one solution."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(len(rows)):
        pivot = next(number for number in range(at, len(rows)) if rows[number][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [_divide(value, rows[at][at]) for value in rows[at]]
        for number, row in enumerate(rows):
            if number != at and (factor := row[at]):
                pairs = zip(row, rows[at], strict=True)
                rows[number] = [value ^ _multiply(factor, own) for value, own in pairs]
    return [row[-1] for row in rows]


@cache
def _powers() -> tuple[list[int], list[int]]:
    """Return the powers of 2 in the field, twice over, and the logarithms to base 2."""
    powers, logarithms, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value <<= 1
        if value > 0xFF:
            value ^= _POLYNOMIAL
    return powers, logarithms


def _multiply(one: int, other: int) -> int:
    powers, logarithms = _powers()
    return powers[logarithms[one] + logarithms[other]] if one and other else 0


def _divide(one: int, other: int) -> int:
    powers, logarithms = _powers()
    return powers[logarithms[one] - logarithms[other] + 255] if one else 0


@lru_cache(_TABLES)
def _products(factor: int) -> NDArray[np.uint16]:
    """Return the product of ``factor`` with each pair of bytes."""
    single = np.array([_multiply(factor, value) for value in range(256)], np.uint16)
    return (single[:, None] << np.uint16(8) | single).ravel()
