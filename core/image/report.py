"""What does not fit between a checkpoint and the state that it is restored into, said before anything is written."""

from __future__ import annotations

from tierfall.core.errors import RestoreError

_SHOWN = 10


class Report:
    """Collects mismatches. What only one side has counts only where ``strict``; what differs counts always."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._lines: list[str] = []

    def differs(self, name: str, stored: str, live: str) -> None:
        self._lines.append(f"{name}: the checkpoint has {stored}, the state has {live}")

    def refuses(self, name: str, reason: str) -> None:
        self._lines.append(f"{name}: {reason}")

    def absent(self, name: str) -> None:
        if self.strict:
            self._lines.append(f"{name}: in the checkpoint, not in the state")

    def extra(self, name: str) -> None:
        if self.strict:
            self._lines.append(f"{name}: in the state, not in the checkpoint")

    def raise_if_any(self, what: str) -> None:
        """Raise RestoreError with the first mismatches, if there are any."""
        if not self._lines:
            return
        count = len(self._lines)
        shown = "".join(f"\n  {line}" for line in self._lines[:_SHOWN])
        more = f"\n  and {count - _SHOWN} more" if count > _SHOWN else ""
        raise RestoreError(
            f"restore: {what} does not fit the state in {count} place{'s' if count > 1 else ''}:"
            f"{shown}{more}\nRestore a part with only=[...]; strict=False skips what only one side has."
        )
