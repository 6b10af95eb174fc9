"""The lines of an event log, as a test reads them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from tierfall.telemetry.journal import LogTail


def last_events(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last ``count`` events of a log, oldest first; none if there is no log."""
    return list(deque(LogTail(path).read(), count))
