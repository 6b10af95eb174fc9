"""Threads: a few workers per stored tier, which run tasks and return outcomes, and the coordinator's thread.

A worker makes blocking calls and decides nothing. Each task has exactly one outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.scheduler.executor import TaskRunner
from tierfall.core.scheduler.ledger.tasks import Task
from tierfall.core.types.errors import TierfallError

logger = logging.getLogger("tierfall")


class Workers:
    """See the module. Each tier has a queue of tasks."""

    def __init__(self, runner: TaskRunner, threads: Mapping[str, int], *, name: str) -> None:
        self._runner = runner
        self._queues: dict[str, queue.SimpleQueue[Task | None]] = {
            tier: queue.SimpleQueue() for tier in threads
        }
        self._threads = threads
        self._name = name
        self._running: list[threading.Thread] = []
        self._coordinator: Coordinator | None = None
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    @property
    def running(self) -> bool:
        """Return whether threads were started."""
        return bool(self._running)

    def submit(self, task: Task) -> None:
        self._queues[task.tier].put(task)

    def start(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        for tier, count in self._threads.items():
            for number in range(count):
                self._spawn(self._work, f"{tier}-{number}", tier)
        self._spawn(self._coordinate, "coordinator")

    def _spawn(self, target: Callable[..., None], name: str, *args: object) -> None:
        # daemon: an exit without close must not hang; sealed images are in memory that outlives the process
        thread = threading.Thread(
            target=target, args=args, name=f"tierfall-{self._name}-{name}", daemon=True
        )
        thread.start()
        self._running.append(thread)

    def _work(self, tier: str) -> None:
        assert self._coordinator is not None
        while (task := self._queues[tier].get()) is not None:
            self._coordinator.post(self._runner.run(task))
            del task  # its views of memory must not outlive the mapping while this thread sleeps

    def _coordinate(self) -> None:
        assert self._coordinator is not None
        try:
            while not self._stopping.is_set():
                next_s = self._coordinator.step(time.monotonic())
                if self._stopping.is_set():
                    return
                self._coordinator.wait_for_event(
                    None if next_s is None else max(0.0, next_s - time.monotonic())
                )
        except BaseException as error:
            self.failure = error
            self._coordinator.emitter.failed("coordinate", error)
            logger.exception("the coordinator stopped: nothing is flushed any more")
            stopped = TierfallError(
                f"the coordinator stopped, nothing is flushed any more: {error!r}"
            )
            stopped.__cause__ = error
            self._coordinator.stop(stopped)

    def stop(self, wake: Callable[[], None], timeout_s: float) -> bool:
        """End all threads once their present tasks are done; ``wake`` posts any event, to wake the coordinator.

        Returns False if a thread still waits for an unresponsive tier after ``timeout_s``; it is abandoned.
        """
        self._stopping.set()
        wake()
        for tier, count in self._threads.items():
            for _ in range(count):
                self._queues[tier].put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [thread.name for thread in self._running if thread.is_alive()]
        if hanging:
            logger.warning(
                "close: these threads still wait for a tier and are abandoned: %s",
                ", ".join(hanging),
            )
        return not hanging
