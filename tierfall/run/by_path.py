"""Saving by path: the files that torch.distributed.checkpoint writes on all ranks become one checkpoint of the run.

Each rank's files are staged in its own memory. The rename of ``.metadata`` on the coordinator commits them: rank 0
announces it, and every rank saves its files as the same step, by threads of tierfall's own. No collective is made, and
what one rank cannot save, none does.
"""

from __future__ import annotations

import io
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tierfall.config import Config
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import DecisionAnnounced, RankMessage, RankReported
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import (
    CaptureError,
    ConfigError,
    RanksError,
    StepError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, OnError
from tierfall.run.restorer import log_abandoned
from tierfall.run.saver import Saver
from tierfall.run.stages import PathStages
from tierfall.session.session import Session
from tierfall.setup.lineage import SavingLineage
from tierfall.setup.tiers import run_folder
from tierfall.tiers.arena.folder import room_for_arena

logger = logging.getLogger("tierfall")

TOPIC = "path"
_SAVE, _GIVE_UP = "save", "give up"
_NAMES_MAX = 64
"""So many of the coordinator's file names are told to the others, who must have none of them."""
_SLOWER = 10
"""All ranks together may take so many times ``max_wait``: how long it takes is a matter of bytes."""
_LOOK_AGAIN_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSave(Message):
    """All ranks are to save their files: ``rank`` has committed them, and has files of these ``names``. ``start`` is
    the checkpoint that a lineage which has not begun continues from, with its ordinal; rank 0 fills it in."""

    rank: int
    names: tuple[str, ...]
    start: tuple[CheckpointId, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpPath(Message):
    reason: str


@dataclass(slots=True)
class _PendingRename:
    """A rename that waits until this rank's own part is being saved."""

    done: InterruptibleEvent = field(default_factory=InterruptibleEvent)
    handle: SaveHandle | None = None
    error: BaseException | None = None


class PathSaves:
    """What is saved by path to one open run. Its methods may be called by any thread; one save at a time.

    ``session`` is that run's; ``loaded`` the checkpoint that was loaded by path, with its ordinal: a line that has not
    begun goes on from it. ``goes_on``: without one, from the newest, if that is older than what is saved.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        saver: Saver,
        line: SavingLineage,
        *,
        check: Callable[[], None],
    ) -> None:
        """``check`` raises what keeps anything from being saved."""
        self._config = config
        self.session = session
        self._saver = saver
        self._line = line
        self._check = check
        self.loaded: tuple[CheckpointId, int] | None = None
        self.goes_on = False
        self._lock = threading.Lock()
        self._stages = PathStages(self._limit_bytes)
        self._asked: dict[str, _PendingRename] = {}
        self._count = itertools.count()
        self._todo: queue.SimpleQueue[DecisionAnnounced | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False
        session.listeners[TOPIC] = self._on_message

    # What a rank writes ------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Make room for the files of a step; those of a save before it that never ended are freed.

        Raises StepError for a step that may not be saved now.
        """
        self._check()
        self._check_step(step)
        self._stages.begin(step)

    def create(self, step: int, name: str) -> io.BufferedWriter:
        """Open a file of a step for writing. Where that fails the save does: whoever writes may not tell anybody."""
        if not self._stages.is_known(step):
            self.begin(step)
        try:
            return self._stages.of(step).create(name)
        except Exception as error:
            if self._stages.is_staged(step):  # else it was given up before
                self.give_up(step, name, f"could not be opened ({error})")
            raise

    def is_staged(self, step: int) -> bool:
        """Say whether this step is being written."""
        return self._stages.is_staged(step)

    def give_up(self, step: int, name: str, why: str = "was taken back") -> None:
        """A file of a step is taken back: its save has failed, and no rank keeps its files."""
        reason = f"its file {name} {why} on rank {self._rank}"
        self._stages.give_up(step, reason)
        if self.session.ranks.many:
            topic = (TOPIC, _GIVE_UP, step, self._token())
            self.session.ranks.council.tell(topic, GivenUpPath(reason=reason).to_json())

    def commit(self, step: int, name: str, target: str) -> None:
        """Rename a file of a step, and save the files of all ranks as this step's checkpoint.

        Returns once every rank's image is sealed, and the fastest stored tier that takes this step has all of them, or
        ``max_wait`` is over: then it goes on behind. Raises what kept it from being sealed; what kept that tier from
        taking it, under ``on_error: raise``.
        """
        stage = self._stages.of(step)
        stage.rename(name, target)
        save = PathSave(rank=self._rank, names=tuple(stage.names()[:_NAMES_MAX]))
        if self.session.ranks.many:
            self._wait(self._announce(step, save))
        else:
            self._wait(self._save(step, replace(save, start=self._start(step))))

    def close(self, timeout_s: float) -> None:
        """Free what was never committed."""
        self._stages.let_go("the run was closed")
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            self._todo.put(None)
            worker.join(timeout_s)

    def _limit_bytes(self) -> int:
        capacity = self._config.host.capacity_bytes
        if capacity is not None:
            return capacity
        room = room_for_arena(run_folder(self._config, self.session.run))
        free = room.memory_free_bytes
        ranks = len(self.session.ranks.topology.local_ranks)
        return (room.file_system_free_bytes if free is None else free) // (2 * ranks)

    # The line ----------------------------------------------------------------------------------------

    def _check_step(self, step: int) -> None:
        if self._line.begun:
            self._line.check(step)
            return
        start = self._continued_checkpoint()
        if start is not None and start[0].step < step:
            return
        if start is None and self.goes_on and not self.session.ranks.topology.is_root:
            return  # rank 0 knows
        if start is None:
            raise StepError(
                f"save of step {step} by path: the run has checkpoints already, and this start loaded none: load the "
                "one to go on from by path, or call restore(); or choose another run name"
            )
        raise StepError(
            f"save of step {step} by path: the run goes on from step {start[0].step}, and a committed step is never "
            "overwritten; to go back, load an older step by path first"
        )

    def _continued_checkpoint(self) -> tuple[CheckpointId, int] | None:
        """The checkpoint that a line which has not begun goes on from, and its ordinal."""
        if self.loaded is not None:
            return self.loaded
        if not self.goes_on:
            return None
        live = [
            (known.id, known.commit.line.ordinal)
            for known in self.session.known_by_all()
            if known.commit is not None and not (known.abandoned or known.tombstoned)
        ]
        return live[-1] if live else None

    def _start(self, step: int) -> tuple[CheckpointId, int] | None:
        if self._line.begun:
            return None
        self._check_step(step)
        return self._continued_checkpoint()

    def _go_on_from(self, start: tuple[CheckpointId, int] | None) -> None:
        if start is None or self._line.begun:
            return
        (id, ordinal), attempt = start, self._line.attempt
        self._line.go_on_from(id, ordinal, attempt)
        log_abandoned(self.session.run, self.session.known(), id)
        ledger = self.session.coordinator.ledger
        self.session.ask(lambda: ledger.go_on_from(id, attempt=attempt.number))

    # All ranks ---------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self.session.ranks.topology.rank

    def _token(self) -> str:
        return f"{self._rank}-{next(self._count)}"

    def _announce(self, step: int, save: PathSave) -> SaveHandle:
        """Have every rank save its files, and return the handle of this rank's part."""
        token = self._token()
        asked = self._asked[token] = _PendingRename()
        bound_s = _SLOWER * self._config.max_wait_s
        try:
            self.session.ranks.council.tell((TOPIC, _SAVE, step, token), save.to_json())
            if not self.session.wait(asked.done, bound_s):
                self.session.ranks.check()
                raise RanksError(
                    f"save of step {step} by path: rank 0 announced nothing within {bound_s:g} s: it is gone, or busy"
                )
        finally:
            del self._asked[token]
        if asked.error is not None:
            raise asked.error
        assert asked.handle is not None
        return asked.handle

    def _on_message(self, news: RankMessage) -> None:
        """Hear what concerns saves by path; never waits."""
        match news:
            case RankReported(topic=(_, what, int(step), _)):
                body = news.body
                if what == _SAVE:
                    save = PathSave.from_json(body, rank=news.rank)
                    body = replace(save, start=self._announced_start()).to_json()
                self.session.ranks.council.announce(news.topic, body)
            case DecisionAnnounced(topic=(_, what, int(step), _)) if what == _GIVE_UP:
                self._stages.give_up(step, GivenUpPath.from_json(news.body, rank=0).reason)
            case DecisionAnnounced():
                with self._lock:
                    if self._closed:
                        return
                    if self._worker is None:
                        self._worker = threading.Thread(
                            target=self._work,
                            name=f"tierfall-{self.session.run}-path",
                            daemon=True,
                        )
                        self._worker.start()
                self._todo.put(news)

    def _announced_start(self) -> tuple[CheckpointId, int] | None:
        return None if self._line.begun else self._continued_checkpoint()

    def _work(self) -> None:
        while (news := self._todo.get()) is not None:
            _, _, step, token = news.topic
            asked = self._asked.get(str(token), _PendingRename())
            try:
                save = PathSave.from_json(news.body, rank=0)
                handle = asked.handle = self._save(int(step), save)
            except BaseException as error:  # noqa: BLE001 - raised by whoever asked; all ranks have given it up
                asked.error = error
                logger.error("rank %d: %s", self._rank, error)
            else:
                self._settle(handle)
            asked.done.ring()

    def _settle(self, handle: SaveHandle) -> None:
        """Let this rank's image be captured before the next is begun; the handle tells what failed."""
        try:
            handle.captured(_SLOWER * self._config.max_wait_s)
        except (TierfallError, TimeoutError):
            logger.debug("the files of step %d were not captured", handle.step, exc_info=True)

    # One rank's part ---------------------------------------------------------------------------------

    def _save(self, step: int, save: PathSave) -> SaveHandle:
        began = time.monotonic()
        with self._saver.lock:
            self._check()
            self._go_on_from(save.start)
            try:
                self._line.check(step)
            except StepError:
                self._stages.check_kept(step)  # the line may be there because of that
                raise
            try:
                self._stages.check_kept(step)
                files = self._take(step, save)
                return self._saver.save_files(self._line, step, files, began)
            except BaseException as error:
                self._stages.note_failed(step, str(error))
                self._saver.tell_others(self._line, step, error)
                raise

    def _take(self, step: int, save: PathSave) -> dict[str, torch.Tensor]:
        """Take this rank's files out of the stage; a rank that wrote none has none."""
        stage = self._stages.take(step)
        if stage is None:
            return {}
        try:
            same = set(stage.names()).intersection(save.names)
            if same and save.rank != self._rank:
                raise ConfigError(
                    f"save of step {step} by path: ranks {save.rank} and {self._rank} both wrote {min(same)}: each "
                    "has saved by itself (no_dist=True) to one path. Let all ranks save together, or one alone"
                )
            return stage.tensors()
        finally:
            stage.free()

    # Until it is safe --------------------------------------------------------------------------------

    def _wait(self, handle: SaveHandle) -> None:
        handle.captured(_SLOWER * self._config.max_wait_s)
        self._wait_whole(handle)
        if not handle.tiers:
            return
        tier = handle.tiers[0]
        try:
            handle.wait(tier, self._config.max_wait_s)
        except TimeoutError:
            logger.warning(
                "save of step %d by path: tier %s does not have it after %g s (max_wait); it lies in memory, and the "
                "flush goes on",
                handle.step,
                tier,
                self._config.max_wait_s,
            )
        except TierfallError as error:
            if self._config.on_error is OnError.RAISE:
                raise
            logger.warning("save of step %d by path lies in memory alone: %s", handle.step, error)

    def _wait_whole(self, handle: SaveHandle) -> None:
        """Wait until the images of all ranks are sealed, or some tier has the checkpoint."""
        id = CheckpointId(handle.step, handle.attempt)
        coordinator = self.session.coordinator
        deadline_s = time.monotonic() + _SLOWER * self._config.max_wait_s

        def is_whole() -> bool:
            entry = coordinator.ledger.entries.get(id)
            if entry is not None and not entry.lost:
                return coordinator.ledger.whole(entry)
            commits = coordinator.commits
            lost = None if commits is None else commits.was_lost(id)
            error = lost[0] if lost else handle.exception()
            raise CaptureError(str(error or f"save of step {id.step} was given up")) from error

        pause = threading.Event()
        while not self.session.ask(is_whole):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"step {handle.step} is not sealed on all ranks in time")
            pause.wait(_LOOK_AGAIN_S)
