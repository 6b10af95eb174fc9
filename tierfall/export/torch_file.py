"""Writes a state as a file of ``torch.save``."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from tierfall.core.types.errors import BackendError


def save_torch(value: object, unfinished: Path, path: Path) -> list[str]:
    """Write a value to ``unfinished``, which is renamed to ``path`` later; returns notes for the user.

    Raises BackendError if torch cannot write it, or the OSError or KeyboardInterrupt that torch's error hides.
    """
    try:
        with open(unfinished, "xb") as file:  # torch would record the temporary name in the file
            torch.save(value, file)
    except RuntimeError as error:  # also for a full disk, or Ctrl-C
        if (first := first_cause(error)) is not None:
            raise first from None
        why = str(error).splitlines()[0]
        raise BackendError(f"export to {path}: torch.save could not write it: {why}") from error
    return _why_not_plain(unfinished)


def first_cause(error: RuntimeError) -> BaseException | None:
    """Return the OSError or interrupt that torch's error hides: after a failed write, closing the file fails too."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, KeyboardInterrupt):
        first = first.__context__
    return first if isinstance(first, OSError | KeyboardInterrupt) else None


def _why_not_plain(path: Path) -> list[str]:
    """Try whether ``torch.load`` accepts the file by default; no tensor is read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        return [
            "torch.load accepts it only with weights_only=False, since it contains more than tensors and plain values, "
            "such as the random state of NumPy; --only names the parts to export"
        ]
    return []
