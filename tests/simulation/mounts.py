"""A run in miniature whose tiers bear ids, as ``tierfall.setup.tier_identity`` gives them: by them a start tells that a
tier is not mounted, and a process that one which is mounted again is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.memory_backend import MemoryBackend
from tests.simulation.weather import Outage
from tests.simulation.world import World
from tierfall.config import Config
from tierfall.core.format.catalog import Listing
from tierfall.core.format.records import parse_tier_record
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend
from tierfall.core.types.values import LossClass, TierKind
from tierfall.core.types.view import TierRules
from tierfall.setup.tier_identity import TierIdentities
from tierfall.tiers.stored import StoredTier

RECORD = f"run/{keys.TIER_NAME}"


class MachineFile:
    """A file that this machine keeps until it is restarted, by the calls of a Path that ``TierIdentities`` makes."""

    def __init__(self) -> None:
        self.data: bytes | None = None

    def __truediv__(self, name: str) -> MachineFile:
        return self

    def read_bytes(self) -> bytes:
        if self.data is None:
            raise FileNotFoundError
        return self.data

    def with_suffix(self, suffix: str) -> MachineFile:
        return MachineFile()

    def write_bytes(self, data: bytes) -> None:
        self.data = data

    def replace(self, target: MachineFile) -> None:
        target.data = self.data


def config_of(rules: Iterable[TierRules]) -> Config:
    """What ``TierIdentities`` is to know of the tiers but peer memory; those that survive a node are all nodes'."""
    storage = [
        SimpleNamespace(
            name=tier.name,
            shared=tier.survives is LossClass.NODE,
            folder=None,
            read_only=False,
        )
        for tier in rules
        if tier.kind is not TierKind.PEER
    ]
    return cast(Config, SimpleNamespace(run="run", storage=storage, peers=None, file=None))


def remembers(
    tier: str, disks: Mapping[str, MemoryBackend], machine: MachineFile, seen: Collection[str]
) -> bool:
    """Say whether a start on a machine that sees these disks can tell that a tier is not mounted, by what the machine
    or a tier of ``seen`` keeps."""
    if RECORD not in disks[tier]._objects:
        return False
    if machine.data is not None:
        known = parse_tier_record(machine.data, what="this machine").others.get(tier)
        if known is not None and known.id:
            return True
    output = [disks[name]._objects.get(RECORD) for name in set(seen) - {tier}]
    others = [
        parse_tier_record(bytes(data), what=RECORD).others for data in output if data is not None
    ]
    return any(tier in known and known[tier].shared for known in others)


class MountedWorld(World):
    """A run whose tiers are all ``Outage``. What a start finds not to be mounted it leaves out, as long as it lives;
    and what cannot be listed, where it is one of ``unopened``, as it could not be opened either."""

    def __init__(self, rules: Iterable[Any], **options: Any) -> None:
        self.machine = MachineFile()
        self.unopened: set[str] = set()
        super().__init__(rules, **options)

    def _open_store(self, name: str, backend: Backend, **more: Any) -> StoredTier:
        assert isinstance(backend, Outage)
        backend.opened()
        return super()._open_store(
            name, backend, set_identity_check=backend.set_identity_check, **more
        )

    def remembers(self, tier: str) -> bool:
        """Say whether a start can tell now that a tier is not mounted, by what this machine or another tier keeps."""
        seen = {name for name in self.disks if self._outage_of(name).in_reach}
        return remembers(tier, self.disks, self.machine, seen)

    def _outage_of(self, tier: str) -> Outage:
        backend = self._backends[tier]
        assert isinstance(backend, Outage)
        return backend

    def _config(self) -> Config:
        return config_of(self.rules[1:])

    def _look_at_all(self, unread: Iterable[str]) -> tuple[Listing, ...]:
        listings = super()._look_at_all(unread)
        self._identities = TierIdentities(
            self._config(), self.stores, cast(Path, self.machine), listings
        )
        self._identities.refuse_aliases()
        missing = self._identities.missing(listings)
        failed = {x.tier for x in listings if x.error is not None}
        for name in missing.keys() | failed & self.unopened:
            del self.stores[name]
        return tuple(
            replace(x, error=missing[x.tier]) if x.tier in missing else x for x in listings
        )

    def _attempt_taken(self) -> None:
        stored = frozenset(self.stores)
        self._identities.write_records(self.attempt, self._config(), owned=stored, leads=True)
