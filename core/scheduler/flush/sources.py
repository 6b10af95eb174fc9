"""Where the copies to one tier are read from: the fastest place that has the bytes, and has not given wrong ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.tasks import CopySource
from tierfall.core.types.values import CheckpointId, CopyState


class CopySources:
    """The places that a copy to ``tier`` may be read from; ``order`` are all tiers, fastest first."""

    def __init__(self, tier: str, *, order: Sequence[str], host: str) -> None:
        self._tier = tier
        self._order = order
        self._host = host
        self._bad: dict[CheckpointId, set[str]] = {}

    def find(
        self, entry: LedgerEntry, chunk: int | None = None, *, spare_memory: bool = False
    ) -> CopySource | None:
        """The fastest place that has the chunk (or, without one, the whole image). With ``spare_memory``, host memory
        only where nothing else has it."""
        bad = self._bad.get(entry.id, ())
        for tier in self._order:
            if tier == self._tier or tier in bad:
                continue
            if tier == self._host:
                if spare_memory and self._is_stored_elsewhere(entry, bad):
                    continue
                final = chunk is not None and chunk < entry.final_chunks
                whole = entry.readable_on(tier) or entry.awaits_others
                if entry.region is not None and (final or whole):
                    return CopySource(tier=tier, region=entry.region)
            elif entry.state(tier) is CopyState.COMMITTED:
                return CopySource(tier=tier)
        return None

    def _is_stored_elsewhere(self, entry: LedgerEntry, bad: Collection[str]) -> bool:
        return any(
            entry.state(tier) is CopyState.COMMITTED and tier not in bad and tier != self._tier
            for tier in self._order
        )

    def strike(self, id: CheckpointId, tier: str) -> None:
        """Read this checkpoint from there no more: its bytes are wrong."""
        self._bad.setdefault(id, set()).add(tier)

    def forget(self, id: CheckpointId) -> None:
        self._bad.pop(id, None)
