"""Where one rank of a job is killed: at the n-th call of a method that belongs to a phase."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tierfall.core.capture.copier import ImageCopier
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.run.session import Session
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.tiers.image_file import Region
from tierfall.tiers.image_writer import RawImageWriter
from tierfall.tiers.peer_requests import PeerClient
from tierfall.tiers.peers import PeerCache
from tierfall.tiers.stored import StoredTier


@dataclass(frozen=True)
class Point:
    """Before, or ``after``, a method. ``committer``: only ranks that commit come here."""

    owner: type
    method: str
    after: bool = False
    committer: bool = False


POINTS = {
    "open": Point(OpenedTiers, "__init__", after=True),
    "opened": Point(Session, "__init__"),
    "capture": Point(ImageCopier, "__init__", after=True),
    "seal": Point(Region, "seal"),
    "sealed": Point(Region, "seal", after=True),
    "flush": Point(RawImageWriter, "write_chunks", after=True),
    "published": Point(RawImageWriter, "finish", after=True),
    "landed": Point(StoredTier, "write_manifest", after=True),
    "commit": Point(StoredTier, "commit", committer=True),
    "committed": Point(StoredTier, "commit", after=True, committer=True),
    "restore": Point(ReadTally, "read"),
}


PEER_POINTS = {
    "capture": POINTS["capture"],
    "seal": POINTS["seal"],
    "sealed": POINTS["sealed"],
    "transfer": Point(PeerClient, "write"),
    "request": Point(PeerClient, "request"),
    "sent": Point(PeerCache, "write_manifest", after=True),
    "commit": Point(PeerCache, "commit"),
    "committed": Point(PeerCache, "commit", after=True),
    "read": POINTS["restore"],
}
"""Of a job whose checkpoints go to peer memory. Each rank commits there."""


def at_point(name: str, call: int, act: Callable[[], None], points: Any = POINTS) -> None:
    """Do something, once, at the ``call``-th call that comes to a point."""
    point = points[name]
    at(point.owner, point.method, call, act, after=point.after)


def at(
    owner: Any,
    method: str,
    call: int,
    act: Callable[[], None],
    *,
    after: bool = False,
    fits: Callable[..., bool] = lambda *args, **more: True,
) -> None:
    """Do something, once, before or ``after`` the ``call``-th call of a method whose arguments fit."""
    real = getattr(owner, method)
    counted = threading.Lock()
    left = call

    def stand_in(*args: Any, **more: Any) -> Any:
        nonlocal left
        value = real(*args, **more) if after else None
        if fits(*args, **more):
            with counted:
                left -= 1
                due = left == 0
            if due:
                act()
        return value if after else real(*args, **more)

    setattr(owner, method, stand_in)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    """Stand still until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)
