"""Writing what was gathered as a file of ``torch.save``."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from tierfall.core.types.errors import BackendError


def save_torch(value: object, unfinished: Path, path: Path) -> list[str]:
    """Write a value to ``unfinished``, which is to become ``path``, and return what is worth knowing of the file.

    Raises BackendError where torch cannot write it, and what lies behind that where torch hides it.
    """
    try:
        with open(unfinished, "xb") as file:  # by its name torch would call what is in it
            torch.save(value, file)
    except RuntimeError as error:  # what torch makes of a full disk or Ctrl-C, among others
        if (first := first_cause(error)) is not None:
            raise first from None
        why = str(error).splitlines()[0]
        raise BackendError(f"export to {path}: torch.save could not write it: {why}") from error
    return _why_not_plain(unfinished)


def first_cause(error: RuntimeError) -> BaseException | None:
    """Return what torch's own error hides, if anything: having failed to write, it fails again to end the file."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, KeyboardInterrupt):
        first = first.__context__
    return first if isinstance(first, OSError | KeyboardInterrupt) else None


def _why_not_plain(path: Path) -> list[str]:
    """Find out whether ``torch.load`` takes the file as it comes, by trying; nothing of its tensors is read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        return [
            "torch.load takes it with weights_only=False alone, since it holds more than tensors and plain values, "
            "such as the random state of NumPy; --only names the parts to export"
        ]
    return []
