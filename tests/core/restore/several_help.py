"""Several ranks in one process: checkpoints of many shards on tiers of dictionaries, and a council over queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from restore_help import Made, Tiers, checkpoint, state_of

from tierfall.core.documents import sha256
from tierfall.core.image import plan_fill
from tierfall.core.names import manifest_name, shard_name
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.ranks.topology import Topology
from tierfall.core.records import Commit, NamedFile
from tierfall.core.restore.agreeing import agree_to_restore, together
from tierfall.core.restore.reader import Tally
from tierfall.core.restore.restore import Request, Restored, fill_first
from tierfall.core.values import CheckpointId, Shard

PATIENCE_S = 20.0


def sharded(step: int, rank: int, world_size: int, **members: Any) -> Made:
    """One rank's part of a checkpoint; its record names this part alone, as on a tier that only this rank sees."""
    made = checkpoint(step, **members)
    shard = Shard(rank, world_size)
    manifest = replace(made.manifest, shard=shard)
    data = manifest.encode()
    files = (
        NamedFile(name=shard_name(shard), bytes=len(made.image), digest=None),
        NamedFile(name=manifest_name(shard), bytes=len(data), digest=sha256(data)),
    )
    commit = replace(made.commit, world_size=world_size, files=files)
    return Made(made.image, manifest, commit)


def all_named(parts: Sequence[Made]) -> Commit:
    """The record of a tier that all ranks see."""
    return replace(parts[0].commit, files=tuple(f for part in parts for f in part.commit.files))


def put_shared(ranks: Sequence[Tiers], tier: str, step: int, **members: Any) -> None:
    """Lay a whole checkpoint on a tier that all ranks see, each with an image of its own."""
    parts = [sharded(step, rank, len(ranks), **members) for rank in range(len(ranks))]
    for tiers, part in zip(ranks, parts, strict=True):
        tiers.put(tier, replace(part, commit=all_named(parts)))


def put_parts(ranks: Sequence[Tiers], tier: str, step: int, **members: Any) -> None:
    """Lay each rank's part on a tier of its own node."""
    for rank, tiers in enumerate(ranks):
        tiers.put(tier, sharded(step, rank, len(ranks), **members))


class _Post:
    """Carries messages to one rank: a queue, and a thread that hands out what comes."""

    def __init__(self, posts: dict[int, _Post]) -> None:
        self._posts = posts
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, rank: int, data: bytes) -> None:
        self._posts[rank]._inbox.put(data)

    def start(self, take: Callable[[bytes], None], lost: Callable[[BaseException], None]) -> None:
        def receive() -> None:
            while (data := self._inbox.get()) is not None:
                take(data)

        self._thread = threading.Thread(target=receive, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        assert self._thread is not None
        self._thread.join(PATIENCE_S)


@contextmanager
def network(nodes: Sequence[object], *, timeout_s: float = PATIENCE_S) -> Iterator[list[Ranks]]:
    """All ranks, by what tells their nodes apart."""
    posts: dict[int, _Post] = {}
    for rank in range(len(nodes)):
        posts[rank] = _Post(posts)
    try:
        yield [
            Ranks(Topology.of(rank, nodes), post, timeout_s=timeout_s)  # type: ignore[arg-type]
            for rank, post in posts.items()
        ]
    finally:
        for post in posts.values():
            post.stop()


def on_all(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Make one call per rank at the same time; return what each returned or raised."""
    calls = list(calls)
    outcomes: list[Any] = [None] * len(calls)

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            outcomes[number] = call()
        except BaseException as error:  # noqa: BLE001 - an outcome like another
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


class Rank:
    """One rank that restores: what it sees, what it fills, and what it has passed over."""

    def __init__(self, ranks: Ranks, tiers: Tiers, *, mine: Sequence[str]) -> None:
        self.ranks = ranks
        self.tiers = tiers
        self.mine = mine
        self.state: dict[str, Any] = state_of(-1)
        self.tally = Tally()
        self.make_plan: Callable[[Any], Any] = lambda header: plan_fill(self.state, header)
        self.before_fill: Callable[[], None] = lambda: None
        self.tried: list[CheckpointId] = []

    def restore(self, **request: Any) -> Restored | None:
        """As a checkpointer does it."""
        listings, asked = self.tiers.listings(), Request(**request)
        candidates = agree_to_restore(self.ranks, listings, asked, mine=self.mine, tally=self.tally)
        if not candidates:
            return None
        self.before_fill()
        tell = together(self.ranks)

        def note_and_tell(known: Any, error: BaseException | None) -> Any:
            self.tried.append(known.id)
            return tell(known, error)

        restored = fill_first(
            candidates,
            listings,
            asked,
            self.tally,
            open_image=lambda tier, id, shard: self.tiers.images[tier, id],
            make_plan=self.make_plan,
            shard=self.ranks.shard,
            together=note_and_tell,
        )
        restored.plan.finish()  # type: ignore[attr-defined]
        return restored
