"""The random state of the process: Python, NumPy, torch on the CPU and on every CUDA device in use.

It consists of plain values and tensors of constant sizes, so that it never changes an image's layout.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tierfall.core.types.errors import RestoreError

ENTRY = "rng"


def capture() -> dict[str, Any]:
    """The current random state; every tensor in it is a copy."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "state": torch.from_numpy(np.fromiter(internal, dtype=np.int64)),
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def apply(state: Any) -> None:
    """Set a random state that ``capture`` returned; RestoreError for anything else."""
    try:
        _apply_python(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            for index, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(saved, index)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise RestoreError(
            f"restore: the random state in the checkpoint does not fit this process ({error}); "
            "leave it out with only=[...], or put your own entry 'rng' into the state"
        ) from error


def _apply_python(saved: Any) -> None:
    internal = tuple(saved["state"].tolist())
    random.setstate((saved["version"], internal, saved["gauss"]))
