"""Ranks as real processes that do what a test asks of them, one thing after the other, and answer."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.ranks.rendezvous import RankPlacement
from tierfall.core.types.errors import TierfallError

PATIENCE_S = 30.0
# torch asks the DNS for the name of every address that it talks to; where none answers, that takes 10 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.core.ranks.processes"])


def serve() -> TCPStore:
    """A store as launchers serve one, for the ranks to meet by."""
    patience = timedelta(seconds=PATIENCE_S)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)


class Process:
    """One rank, seen from the test. ``result`` gives what the last thing asked returned, or the error it raised."""

    def __init__(self, rank: int, world_size: int, node: str, port: int, chunk: str = "1") -> None:
        place = RankPlacement(
            rank=rank,
            world_size=world_size,
            node=node,
            address="127.0.0.1",
            settings={"chunk": chunk},
        )
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_work, args=(theirs, place, port), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str, *args: Any) -> None:
        self._pipe.send((what, args))

    def result(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the rank hangs"
        return self._pipe.recv()

    def do(self, what: str, *args: Any) -> Any:
        self.ask(what, *args)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)

    def end(self) -> None:
        """Let it end by itself, if it is alive, and see that it was no crash."""
        killed = self._process.exitcode is not None
        self._pipe.close()
        self._process.join(PATIENCE_S)
        assert killed or self._process.exitcode == 0
        self._process.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Anything(Message):
    value: object


class _Worker:
    """The other side: each method is something that a test can ask for."""

    def __init__(self, place: RankPlacement, port: int) -> None:
        self._place = place
        self._bootstrap = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._ranks = Ranks.alone()

    def join(self, timeout_s: float) -> Any:
        self._ranks = Ranks.join(self._place, self._bootstrap, run="run", timeout_s=timeout_s)
        return self._ranks.topology.nodes

    def agree(self, what: str, body: Any, timeout_s: float) -> Any:
        def decide(bodies: dict[int, _Anything]) -> list[list[Any]]:
            return [[rank, body.value] for rank, body in bodies.items()]

        mine = _Anything(value=body)
        return self._ranks.agree(what, mine, decide, object, timeout_s=timeout_s)

    def check(self) -> None:
        self._ranks.check()

    def close(self, timeout_s: float) -> None:
        self._ranks.close(timeout_s)

    def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate() if "tierfall" in thread.name]

    def ports(self) -> list[int]:
        """The ports at which this process listens."""
        return listening(os.getpid())


def listening(pid: int) -> list[int]:
    """The TCP ports at which a process of this machine listens."""
    mine = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            mine.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:  # the one that listed them
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                    ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def _work(pipe: Connection, place: RankPlacement, port: int) -> None:
    worker = _Worker(place, port)
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(worker, what)(*args))
        except TierfallError as error:
            pipe.send(error)
