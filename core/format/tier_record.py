"""The record of a tier's identity, and how it is parsed from untrusted bytes, by the rules of ``records``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields
from tierfall.core.types.errors import IntegrityError

_OF_MEMORY = ("attempt_id", "file", "kept")
"""Members that only the record of a machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTier:
    """What is recorded of another tier: its id ('' if none could be written to it), its place, whether all nodes saw
    its files (None: not examined), and the device number of its folder, which is valid until the machine restarts."""

    id: str
    place: str
    shared: bool | None
    device: int | None = None

    def to_json(self) -> dict[str, object]:
        return {"id": self.id, "place": self.place, "shared": self.shared, "device": self.device}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRecord:
    """The identity of a run's tier: its random 128-bit id in hexadecimal, and the run's ``others``, by name. ``shared``
    is as in ``KnownTier``.

    The record that a machine keeps of a run's tiers, beside its host memory, has an empty id. It also has the id of the
    last attempt that owned that memory, the path of the ``file`` that the run was configured by, and the folder of what
    is ``kept`` for other nodes; each may be ''.
    """

    run: str
    id: str
    shared: bool | None
    wall_time_s: float
    others: Mapping[str, KnownTier] = field(default_factory=dict)
    attempt_id: str = ""
    file: str = ""
    kept: str = ""

    def encode(self) -> bytes:
        return documents.seal(
            {
                "run": self.run,
                "tier_id": self.id,
                "shared": self.shared,
                "wall_time_s": self.wall_time_s,
                "others": {name: tier.to_json() for name, tier in self.others.items()},
                **{name: text for name in _OF_MEMORY if (text := getattr(self, name))},
            }
        )


def parse_tier_record(data: bytes, *, what: str) -> TierRecord:
    """Parse a tier's record from untrusted bytes; ``what`` names it in errors."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    others = reader.get("others", dict)
    return TierRecord(
        run=reader.name("run"),
        id=reader.get("tier_id", str),
        shared=reader.flag_or_none("shared"),
        wall_time_s=reader.real("wall_time_s"),
        others={name: _known_tier(tier, f"{what}: {name}") for name, tier in others.items()},
        **{name: reader.get(name, str) for name in _OF_MEMORY if reader.has(name)},
    )


def _known_tier(entry: object, what: str) -> KnownTier:
    if not isinstance(entry, dict):
        raise IntegrityError(f"{what}: it is not an object")
    reader = JsonFields(entry, what)
    device = entry.get("device")
    return KnownTier(
        id=reader.get("id", str),
        place=reader.get("place", str),
        shared=reader.flag_or_none("shared"),
        device=None if device is None else reader.number("device", 0, 1 << 64),
    )
