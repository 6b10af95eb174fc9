"""The options and the result of an export, and the names of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tierfall.core.copies.chunk_reader import Fallback
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import CheckpointId, ExportDtype, ExportFormat

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
