"""Pointers: a small file, in a folder that a framework expects a checkpoint in, that names a checkpoint of a run.

A pointer has the places of the run's tiers, and nothing else of the configuration: no options, no credentials. An
address that may contain a secret is left out. A pointer comes from anywhere: what it names is read as data only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config, ObjectTierConfig, load_config
from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.types.backend import put_object
from tierfall.core.types.errors import BackendError, ConfigError, IntegrityError
from tierfall.core.types.keys import ATTEMPT_MAX, STEP_MAX
from tierfall.core.types.values import CheckpointId, TierKind
from tierfall.setup.places import memory_root

POINTER_NAME = "tierfall.json"
_BYTES_MAX = 64 << 10
_ADDRESS = re.compile(r"(?:s3|gs|az)://[A-Za-z0-9._/-]+\Z")
"""The addresses that a pointer may have: without user, password or query, and of stores alone."""
_PLACE_KEYS = {TierKind.HOST: "folder", TierKind.FILE: "path", TierKind.OBJECT: "url"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of a pointer: ``step`` and ``attempt`` of a checkpoint of ``run``, and the ``tiers`` of that run:
    name, kind and place of each, in the shape of the configuration, fastest first."""

    run: str
    step: int
    attempt: int
    tiers: tuple[Mapping[str, str], ...]

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.step, self.attempt)

    def config(self) -> Config:
        """Return a configuration with these tiers, for reading. Credentials and endpoints of object stores are those of
        the environment."""
        return load_config({"run": self.run, "tiers": [dict(tier) for tier in self.tiers]})


def pointer_to(config: Config, checkpoint: CheckpointId) -> Pointer:
    """Return a pointer to a checkpoint on the tiers of a configuration."""
    tiers = []
    for tier in (config.host, *config.storage):  # each machine has another part of peer memory
        place = os.path.abspath(memory_root(config))
        if tier.kind is not TierKind.HOST:
            place = tier.url if isinstance(tier, ObjectTierConfig) else tier.place
        if tier.kind is TierKind.OBJECT and not _ADDRESS.match(place):
            continue
        tiers.append({"name": tier.name, "kind": tier.kind.value, _PLACE_KEYS[tier.kind]: place})
    return Pointer(
        run=config.run, step=checkpoint.step, attempt=checkpoint.attempt, tiers=tuple(tiers)
    )


def encode(pointer: Pointer) -> bytes:
    """Return the content of the file of a pointer."""
    return documents.seal(asdict(pointer))


def write_pointer(folder: str | os.PathLike[str], pointer: Pointer) -> None:
    """Write a pointer into a folder, which is created; one that is there is replaced. It is durable on return.

    Raises BackendError where that fails.
    """
    data = encode(pointer)
    backend = PosixBackend(_path(folder, "write_pointer"), direct_io=False)
    try:
        put_object(backend, POINTER_NAME, data)
    finally:
        backend.close()


def _path(folder: object, doing: str) -> Path:
    if isinstance(folder, str | os.PathLike):
        return Path(folder).expanduser()
    raise ConfigError(f"{doing}: folder must be a path, not {folder!r:.80}")


def is_pointer(path: Path) -> bool:
    """Return whether a path is a pointer, or a folder with one."""
    return path.name == POINTER_NAME or (path / POINTER_NAME).is_file()


@public_call
def read_pointer(folder: str | os.PathLike[str]) -> Pointer:
    """Read the pointer in a folder that ``Checkpointer.write_pointer`` wrote; its file may be named, too.

    Raises ConfigError where the folder has none, IntegrityError where it is damaged.
    """
    path = _path(folder, "read_pointer")
    path = path if path.name == POINTER_NAME else path / POINTER_NAME
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{path.parent} has no pointer to a checkpoint ({POINTER_NAME}), as Checkpointer.write_pointer writes it"
        ) from error
    except OSError as error:
        raise BackendError(f"{path} cannot be read: {error.strerror}") from error
    what = f"pointer {path}"
    fields = JsonFields(documents.open_sealed(data, what=what), what)
    return Pointer(
        run=fields.name("run"),
        step=fields.number("step", 0, STEP_MAX),
        attempt=fields.number("attempt", 0, ATTEMPT_MAX),
        tiers=tuple(_tier(tier, what) for tier in fields.list_of("tiers", dict)),
    )


def _tier(members: Mapping[str, object], what: str) -> Mapping[str, str]:
    fields = JsonFields(members, f"{what}: tiers")
    kinds = {str(kind): key for kind, key in _PLACE_KEYS.items()}
    key = kinds.get(fields.get("kind", str))
    if key is None:
        raise IntegrityError(f"{what}: a tier is of no kind that a pointer has")
    place: str = fields.get(key, str)
    if not (_ADDRESS.match(place) if key == "url" else os.path.isabs(place)):
        raise IntegrityError(f"{what}: the place of tier {fields.name('name')} is no pointer's")
    return {"name": fields.name("name"), "kind": fields.get("kind", str), key: place}
