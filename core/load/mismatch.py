"""The mismatches between a checkpoint and the state, reported before anything is written."""

from __future__ import annotations

import difflib

from tierfall.core.types.errors import RestoreError

_SHOWN = 10
ABSENT = "in the checkpoint, not in the state"
EXTRA = "in the state, not in the checkpoint"
_ADVICE = (
    "\nTo allow it by name: skip=[...] leaves an entry of the state unchanged, rename={...} restores a tensor or an "
    "entry of the state from another name, only=[...] restores a part, and leaves out what only the checkpoint has."
)


class MismatchReport:
    """Collects mismatches. A name that only one side has counts only where ``strict``; other mismatches always
    count."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._lines: list[tuple[str, str]] = []
        self._fixed: set[str] = set()
        self._refused = 0

    def differs(self, name: str, stored: str, live: str) -> None:
        self._lines.append((name, f"the checkpoint has {stored}, the state has {live}"))

    def refuses(self, name: str, reason: str) -> None:
        """Report an entry that cannot be restored; ``reason`` includes what to do."""
        self._refused += 1
        self._lines.append((name, reason))

    def absent(self, name: str, *, can_be_renamed: bool = True) -> None:
        if self.strict:
            self._lines.append((name, ABSENT))
            self._fixed |= set() if can_be_renamed else {name}

    def extra(self, name: str) -> None:
        if self.strict:
            self._lines.append((name, EXTRA))

    def raise_if_any(self, what: str) -> None:
        """Raise RestoreError with the first mismatches, if there are any."""
        if not self._lines:
            return
        count = len(self._lines)
        shown = "".join(
            f"\n  {name}: {reason}{self._rename(name, reason)}"
            for name, reason in self._lines[:_SHOWN]
        )
        more = f"\n  and {count - _SHOWN} more" if count > _SHOWN else ""
        advice = "" if self._refused == count else _ADVICE
        raise RestoreError(
            f"restore: {what} does not fit the state in {count} place{'s' if count > 1 else ''}:{shown}{more}{advice}"
        )

    def _rename(self, name: str, reason: str) -> str:
        """Suggest a name of the state for an entry that only the checkpoint has."""
        if reason != ABSENT or name in self._fixed:
            return ""
        extra = [other for other, why in self._lines if why == EXTRA]
        near = difflib.get_close_matches(name, extra, n=1, cutoff=0.8)
        return f" (rename={{{name!r}: {near[0]!r}}}?)" if near else ""
