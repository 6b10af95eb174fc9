"""What the golden runs hold: states without chance in them, and the comparison with what was read."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch

RUN = "golden"
STEPS = (100, 200)
PINNED = 100
TAGS = ("first",)
SEED = 7


def _counting(count: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int64)


def state_of(step: int) -> dict[str, Any]:
    """Every dtype that is stored in a way of its own, every kind of value, aliases and empty tensors."""
    bits = _counting(64, step).to(torch.uint8)
    tied = torch.sin(_counting(24, step).double()).float().reshape(4, 6)
    return {
        "model": {
            "embedding": tied,
            "head": tied,
            "half": _counting(33, step).to(torch.float16) / 7,
            "brain": _counting(31, step).to(torch.bfloat16) / 3,
            "double": torch.tensor([math.pi, -0.0, math.inf, -math.inf, math.nan]),
            "complex64": torch.complex(_counting(5, step).float(), -_counting(5, 1).float()),
            "complex128": torch.complex(_counting(3, step).double(), _counting(3, 2).double()),
            "float8": bits.clone().view(torch.float8_e4m3fn),
            "float8_e5m2": bits.clone().view(torch.float8_e5m2),
            "bool": _counting(9, step) % 2 == 0,
            "int8": _counting(11, step).to(torch.int8),
            "uint16": _counting(7, step).to(torch.uint16),
            "scalar": torch.tensor(step),
            "empty": torch.empty(0, 3),
            "strided": _counting(12, step).reshape(3, 4).t(),
        },
        "values": {
            "step": step,
            "none": None,
            "floats": [0.1, math.inf, math.nan, -0.0],
            "large": 10**40,
            "text": "Grüße, \u2603 \x00",
            "bytes": bytes(range(256)),
            "tuple": (1, (2.5, "x"), []),
            "set": {1, 2, 3},
            "keys": {0: "int", True: "bool", "a.b/c%": "text", None: "none", (1, 2): "tuple"},
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
            "device": torch.device("cpu"),
            "array": np.arange(6, dtype=np.float64).reshape(2, 3) + step,
            "number": np.float32(1.5),
        },
        "long": "tierfall " * 7400,
    }


def seed() -> None:
    """Set the random state that the golden run was saved with."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def difference(found: Any, expected: Any, path: str = "state") -> str | None:
    """Name the first place where two states differ in type or in any bit; None where they are the same."""
    if type(found) is not type(expected):
        return f"{path}: {type(found).__name__}, expected {type(expected).__name__}"
    match expected:
        case torch.Tensor():
            same = _same_tensor(found, expected)
        case np.ndarray() | np.generic():
            same = found.dtype == expected.dtype and found.shape == expected.shape
            same = same and found.tobytes() == expected.tobytes()
        case dict():
            if list(found) != list(expected) or [*map(type, found)] != [*map(type, expected)]:
                return f"{path}: keys {list(found)}, expected {list(expected)}"
            return _first(difference(found[k], expected[k], f"{path}[{k!r}]") for k in expected)
        case list() | tuple():
            if len(found) != len(expected):
                return f"{path}: {len(found)} items, expected {len(expected)}"
            pairs = zip(found, expected, strict=True)
            return _first(difference(f, e, f"{path}[{i}]") for i, (f, e) in enumerate(pairs))
        case float():
            same = repr(found) == repr(expected)
        case _:
            same = found == expected
    return None if same else f"{path}: {found!r}, expected {expected!r}"


def _first(differences: Any) -> str | None:
    return next((each for each in differences if each is not None), None)


def _same_tensor(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return torch.equal(raw(found), raw(expected))
