"""Writes a state as a file of ``torch.save``."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tierfall.core.types.errors import BackendError


def save_torch(value: object, unfinished: Path, path: Path) -> dict[int, str]:
    """Write a value to ``unfinished``, which is renamed to ``path`` later; returns the numbers that torch gives to the
    storages of its tensors, by their addresses.

    Raises BackendError if torch cannot write it, or the OSError or KeyboardInterrupt that torch's error hides.
    """
    found: dict[int, str] = {}

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            """Watch what torch's subclass of this writes in place of a storage."""
            number: Any = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                written = number(self, value)
                if written is not None:
                    found[getattr(value, "_untyped_storage", value).data_ptr()] = written[2]
                return written

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    try:
        with open(unfinished, "xb") as file:  # torch would record the temporary name in the file
            module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
            torch.save(value, file, pickle_module=module)
    except RuntimeError as error:  # also for a full disk, or Ctrl-C
        if (first := first_cause(error)) is not None:
            raise first from None
        why = str(error).splitlines()[0]
        raise BackendError(f"export to {path}: torch.save could not write it: {why}") from error
    found.pop(0, None)  # of no bytes
    return found


def add_member(unfinished: Path, name: str, data: Iterable[memoryview]) -> None:
    """Add a member, which torch.load does not read, to the zip file that torch.save has written."""
    with zipfile.ZipFile(unfinished, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        with archive.open(zipfile.ZipInfo(f"{folder}/{name}"), "w", force_zip64=True) as member:
            for part in data:
                member.write(part)


def first_cause(error: RuntimeError) -> BaseException | None:
    """Return the OSError or interrupt that torch's error hides: after a failed write, closing the file fails too."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, KeyboardInterrupt):
        first = first.__context__
    return first if isinstance(first, OSError | KeyboardInterrupt) else None


def why_not_plain(path: Path) -> list[str]:
    """Return a note unless ``torch.load`` accepts the file by default; no tensor is read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        return [
            "torch.load accepts it only with weights_only=False, since it contains more than tensors and plain values, "
            "such as the random state of NumPy; --only names the parts to export"
        ]
    return []
