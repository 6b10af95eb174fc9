"""What ``export`` writes: its options, its result, the names of its files, and their atomic creation.

A file or folder is written under a temporary name in the same folder, synced, and renamed. After a failure it is
removed, with the folders that were created for it. After a kill the temporary file may remain; its name ends in
``.unfinished``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tierfall.backends.posix.system import translated
from tierfall.core.copies.chunk_reader import Fallback
from tierfall.core.types.errors import CapacityError, ConfigError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, ExportDtype, ExportFormat

UNFINISHED_SUFFIX = ".unfinished"
CAST = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that ``ExportOptions.dtype`` converts."""
DTYPES = {
    ExportDtype.BF16: torch.bfloat16,
    ExportDtype.FP16: torch.float16,
    ExportDtype.FP32: torch.float32,
}
_SUFFIXES = {ExportFormat.SAFETENSORS: ".safetensors", ExportFormat.TORCH: ".pt"}
_FORMATS = {suffix: format for format, suffix in _SUFFIXES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The parts named by ``only`` (empty: all) are exported into the folder ``to``, or as that file if its name ends as
    one of ``format``.

    Of safetensors: ``max_shard_bytes`` divides the tensors into files, with an index; ``dtype`` converts tensors of
    floating-point numbers; the files ``beside`` are copied into the folder.
    """

    to: Path
    format: ExportFormat
    only: tuple[str, ...] = ()
    replace: bool = False
    max_shard_bytes: int | None = None
    dtype: torch.dtype | None = None
    beside: tuple[Path, ...] = ()

    @property
    def is_folder(self) -> bool:
        """Whether ``to`` becomes a new folder as a whole, in place of a file in it."""
        several = self.max_shard_bytes is not None or self.beside
        return self.format is ExportFormat.DCP or bool(several)

    @property
    def is_file(self) -> bool:
        """Whether ``to`` is the file itself, in place of a folder."""
        return _FORMATS.get(self.to.suffix) is self.format

    def check(self) -> None:
        """Raise ConfigError for options that do not go together, and for files that cannot be copied."""
        special = self.max_shard_bytes is not None or self.dtype is not None or self.beside
        if special and self.format is not ExportFormat.SAFETENSORS:
            raise ConfigError(
                f"export: --max-shard, --dtype and --with are for --format safetensors, not {self.format}"
            )
        if special and not self.only:
            raise ConfigError(
                "export: --max-shard, --dtype and --with need --only PREFIX, such as --only model: a whole step is one "
                "image, which tierfall import reads"
            )
        if self.is_folder and self.is_file:
            raise ConfigError(
                f"export: --max-shard and --with write a folder, and --to {self.to} is the name of a file"
            )
        names = [path.name for path in self.beside]
        for path in self.beside:
            if not path.is_file():
                raise ConfigError(f"export: --with {path}: there is no such file")
            if names.count(path.name) > 1:
                raise ConfigError(f"export: --with {path}: two files of that name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What was written, the bytes read from each tier, the copies that were skipped, and notes for the user."""

    id: CheckpointId
    path: Path
    bytes: int
    tensors: int
    sources: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]
    notes: tuple[str, ...]


def format_of(to: Path, named: ExportFormat | None) -> ExportFormat:
    """Return the format of an export to a path: that of its ending, else the one that was named, or safetensors.

    Raises ConfigError if these are two.
    """
    found = _FORMATS.get(to.suffix)
    if found is not None and named not in (None, found):
        raise ConfigError(
            f"export: --to {to} is the name of a file of --format {found}, not {named}: leave --format out, or name a "
            "folder"
        )
    return found or named or ExportFormat.SAFETENSORS


def file_name(run: str, id: CheckpointId, wish: ExportOptions) -> str:
    """Return the name of the exported file. Raises ConfigError if the name of a part is not a file name."""
    name = f"{run}-step-{id.step:08d}"
    if len(wish.only) == 1:
        (name,) = wish.only
        if "/" in name or name.startswith("."):
            raise ConfigError(f"--only {name!r}: it cannot name a file")
    return name + _SUFFIXES[wish.format]


@contextmanager
def new_output(
    path: Path, *, room_bytes: int, folder: bool = False, replace: bool = False
) -> Iterator[Path]:
    """Yield the path of a file to write, or of a new ``folder``; after the block it is durable at ``path``.

    ``room_bytes`` is what the block writes in all. Raises as ``check_free`` does, before and after the block;
    BackendError if the folder is unusable; CapacityError, before anything is written, if there is no room.
    """
    check_free(path, folder=folder, replace=replace)
    with translated(f"export to {path.parent}"):
        made = [each for each in path.parents if not os.path.lexists(each)]
        path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}"
    try:
        _check_room(path, room_bytes)
        with translated(f"export to {path}"):
            if folder:
                unfinished.mkdir()
            yield unfinished
            files = unfinished.iterdir() if folder else ()
            for each in (*files, unfinished):
                _sync(each)
            check_free(path, folder=folder, replace=replace)
            os.replace(unfinished, path)
            _sync(path.parent)
    except BaseException:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)
        with suppress(OSError):  # another process has created something in it
            for each in made:
                each.rmdir()
        raise


def check_free(path: Path, *, folder: bool, replace: bool) -> None:
    """Raise ConfigError if ``path`` exists and must not be replaced, or its parent is no folder, BackendError if either
    cannot be examined. A new ``folder`` replaces an empty one alone."""
    with translated(f"export to {path}"):
        if os.path.lexists(path.parent) and not path.parent.is_dir():
            raise ConfigError(
                f"export: {path.parent} is no folder; name one, or one that can be made"
            )
        if not os.path.lexists(path):
            return
        if folder:
            if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
                raise ConfigError(
                    f"export: {path} is there already; name a folder that is not there, or an empty one"
                )
        elif path.is_dir():
            raise ConfigError(f"export: {path} is a folder; move it, or export to another folder")
        elif not replace:
            raise ConfigError(
                f"export: {path} exists already: --force replaces it, or name another folder"
            )


def _check_room(path: Path, needed_bytes: int) -> None:
    with translated(f"export to {path}"):
        free = shutil.disk_usage(path.parent).free
    if needed_bytes > free:
        raise CapacityError(
            f"export to {path}: it needs {format_size(needed_bytes)} ({needed_bytes} bytes), free are "
            f"{format_size(free)} ({free} bytes); free some, or export to another disk"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_cause(error: RuntimeError) -> BaseException | None:
    """Return the OSError or interrupt that torch's error hides: after a failed write, closing the file fails too."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, KeyboardInterrupt):
        first = first.__context__
    return first if isinstance(first, OSError | KeyboardInterrupt) else None
