"""The contract that every checkpointing system of the comparison is put behind, and one rule for what is durable."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks import bare
from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a system may write: a folder on disk, one in memory, and whether direct I/O works in the first."""

    folder: Path
    memory: Path
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process that measures one system is given on its command line."""

    size_bytes: int
    key: str
    place: Place
    device: str

    def words(self) -> list[str]:
        place = [str(self.place.folder), str(self.place.memory), str(int(self.place.direct))]
        return [str(self.size_bytes), self.key, *place, self.device]

    @classmethod
    def parse(cls, words: list[str]) -> Task:
        size_bytes, key, folder, memory, direct, device = words
        place = Place(folder=Path(folder), memory=Path(memory), direct=bool(int(direct)))
        return cls(size_bytes=int(size_bytes), key=key, place=place, device=device)


class System(ABC):
    """One way to save a state and to get it back.

    A save is ``save`` and then ``wait``: the training thread may go on when the first returns, and the files survive a
    power cut when the second does. ``load`` fills the tensors of the state that are there.
    """

    key: ClassVar[str]
    """What the command line and the JSON call it."""
    name: ClassVar[str]
    module: ClassVar[str | None] = None
    """What must be importable, beyond torch and tierfall; None: nothing."""
    requirement: ClassVar[str] = ""
    """What to install where it is not."""
    saves_in_place: ClassVar[bool] = False
    """True where ``save`` writes on the caller's thread, so that a training loop waits for all of it."""

    def __init__(self, work: Workload, place: Place) -> None:
        self.work = work
        self.place = place
        self.state: dict[str, torch.Tensor] = work.named_tensors()

    @classmethod
    def installed(cls) -> bool:
        """Say whether its package is there, and all that importing it needs."""
        try:
            return cls.module is None or import_module(cls.module) is not None
        except ImportError:
            return False

    @property
    def target(self) -> Path:
        """The folder of the one checkpoint that is kept."""
        return self.place.folder / "checkpoint"

    @abstractmethod
    def save(self) -> None:
        """Save; return as soon as training may go on. What an earlier save still needs is waited for first."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until what was saved is durable."""

    def take_memory(self) -> None:  # noqa: B027
        """Take the memory that is kept between saves, as the first save does by itself; nothing by default."""

    def updating(self) -> AbstractContextManager[object]:
        """Enclose the optimizer's step, where the system asks the training loop for that."""
        return nullcontext()

    @abstractmethod
    def load(self) -> None:
        """Put the newest checkpoint back into the state's tensors."""

    def begin_cold(self) -> None:
        """Leave nothing of the checkpoint in memory."""
        for path in self.place.folder.rglob("*"):
            if path.is_file():
                bare.drop_cached(path)

    def load_cold(self) -> None:
        """Load as a start does that finds the disk alone; ``begin_cold`` ran before."""
        self.load()

    def forget(self) -> None:
        """Remove what was saved."""
        shutil.rmtree(self.target, ignore_errors=True)

    def close(self) -> None:  # noqa: B027
        """Give back what is kept between saves; nothing by default."""


def fill(state: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    """Copy loaded tensors into the state's, unless they are the same already."""
    for name, tensor in state.items():
        if loaded[name] is not tensor:
            tensor.copy_(loaded[name])


def make_durable(folder: Path) -> None:
    """Flush every file below a folder, then every folder up to its parent: one rule for all systems."""
    paths = sorted(folder.rglob("*"))
    for path in [p for p in paths if p.is_file()]:
        _flush(path)
    for path in [*(p for p in reversed(paths) if p.is_dir()), folder, folder.parent]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
