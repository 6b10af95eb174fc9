"""Saving by path: the files that torch.distributed.checkpoint writes on all ranks become one checkpoint of the run.

Each rank stages its files in memory. DCP's coordinator renames ``.metadata``, which commits the step: rank 0 announces
it, and every rank saves its files as that step, on a thread of its own. No collective is called. Where one rank cannot
save its files, the checkpoint is given up on all.
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
from tierfall.run.staging import PathStages
from tierfall.session.session import Session
from tierfall.setup.lineage import SavingLineage
from tierfall.tiers.arena.folder import room_for_arena

logger = logging.getLogger("tierfall")

TOPIC = "path"
_SAVE, _GIVE_UP = "save", "give up"
_NAMES_MAX = 64
"""The committing rank sends so many of its file names to the others, none of which may have written them."""
_SLOWER = 10
"""Factor of ``max_wait`` for waits on all ranks: how long they take depends on the size of the files."""
_POLL_S = 0.01


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
    """A rename that waits until this rank's own files are being saved."""

    done: InterruptibleEvent = field(default_factory=InterruptibleEvent)
    handle: SaveHandle | None = None
    error: BaseException | None = None


class PathSaves:
    """What saves to one open run by path. Its methods may be called by any thread; one save at a time."""

    def __init__(
        self,
        config: Config,
        session: Session,
        saver: Saver,
        lineage: SavingLineage,
        *,
        check: Callable[[], None],
    ) -> None:
        """``check`` raises what keeps every save of the run from becoming a checkpoint."""
        self._config = config
        self.session = session
        self._saver = saver
        self._lineage = lineage
        self._check = check
        self._loaded: tuple[CheckpointId, int] | None = None
        self.opened_by_path = False
        self._lock = threading.Lock()
        self._stages = PathStages(self._limit_bytes)
        self._renames: dict[str, _PendingRename] = {}
        self._count = itertools.count()
        self._queue: queue.SimpleQueue[DecisionAnnounced | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False

    # What a rank writes ------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin the files of a step; those of an earlier save that never ended are freed.

        Raises StepError for a step that may not be saved now.
        """
        self._check()
        self._check_step(step)
        self._stages.begin(step)

    def create(self, step: int, name: str) -> io.BufferedWriter:
        """Open a file of a step for writing. Where that fails, the step is given up: DCP may not report the error to
        the other ranks."""
        if not self._stages.is_known(step):
            self.begin(step)
        try:
            return self._stages.of(step).create(name)
        except Exception as error:
            if self._stages.is_staged(step):  # else it is given up already
                self.give_up(step, name, f"could not be opened ({error})")
            raise

    def is_staged(self, step: int) -> bool:
        """Return whether this step's files are being written."""
        return self._stages.is_staged(step)

    def give_up(self, step: int, name: str, why: str = "was taken back") -> None:
        """Give up a step on all ranks, since one of its files was removed or could not be opened (``why``)."""
        reason = f"its file {name} {why} on rank {self._rank}"
        self._stages.give_up(step, reason)
        topic = (TOPIC, _GIVE_UP, step, self._token())
        self.session.ranks.message_tree.report(topic, GivenUpPath(reason=reason).to_json())

    def commit(self, step: int, name: str, target: str) -> None:
        """Rename a file of a step, and save the files of all ranks as this step's checkpoint.

        Returns once every rank's image is sealed and the checkpoint is committed on the fastest stored tier that is
        owed it. After ``max_wait`` it returns without the commit, and the flush continues. Raises what kept an image
        from being sealed, and under ``on_error: raise`` what kept the tier from committing.
        """
        stage = self._stages.of(step)
        stage.rename(name, target)
        save = PathSave(rank=self._rank, names=tuple(stage.names()[:_NAMES_MAX]))
        if self.session.ranks.many:
            self._wait(self._announce(step, save))
        else:
            self._wait(self._save(step, replace(save, start=self._start(step))))

    @property
    def is_used(self) -> bool:
        """Whether a thread saves by path, or has saved so."""
        return self._worker is not None

    def close(self, timeout_s: float) -> None:
        """Free the files of steps that were never committed, and end the thread within ``timeout_s`` seconds."""
        self._stages.free("the run was closed")
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            self._queue.put(None)
            worker.join(timeout_s)

    def _limit_bytes(self) -> int:
        capacity = self._config.host.capacity_bytes
        if capacity is not None:
            return capacity
        room = room_for_arena(self.session.tiers.folder)
        free = room.memory_free_bytes
        ranks = len(self.session.ranks.topology.local_ranks)
        return (room.file_system_free_bytes if free is None else free) // (2 * ranks)

    # The lineage -------------------------------------------------------------------------------------

    def note_opened_by_path(self) -> None:
        """Let a lineage that has not begun continue from the newest checkpoint, if that is older than what is saved: no
        code of the training could have restored one."""
        self.opened_by_path = True

    def note_loaded(self, checkpoint: CheckpointId, ordinal: int) -> None:
        """Let a lineage that has not begun continue from a checkpoint that was loaded by path."""
        self._loaded = checkpoint, ordinal

    def continue_from_newest(self, step: int) -> None:
        """Continue a lineage that has not begun from the newest checkpoint; StepError where that is not older than
        ``step``."""
        self.note_opened_by_path()
        self._continue_from(self._start(step))

    def _check_step(self, step: int) -> None:
        if self._lineage.begun:
            self._lineage.check(step)
            return
        start = self._continued_checkpoint()
        if start is not None and start[0].step < step:
            return
        if start is None and self.opened_by_path and not self.session.ranks.topology.is_root:
            return  # rank 0 decides
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
        """Return the checkpoint that a lineage which has not begun continues from, and its ordinal."""
        if self._loaded is not None:
            return self._loaded
        if not self.opened_by_path:
            return None
        live = [
            (known.id, known.commit.lineage.ordinal)
            for known in self.session.known_by_all()
            if known.commit is not None and not (known.abandoned or known.tombstoned)
        ]
        return live[-1] if live else None

    def _start(self, step: int) -> tuple[CheckpointId, int] | None:
        """Return what a save of one rank continues from; None once the lineage has begun."""
        if self._lineage.begun:
            return None
        self._check_step(step)
        return self._continued_checkpoint()

    def _continue_from(self, start: tuple[CheckpointId, int] | None) -> None:
        if start is None or self._lineage.begun:
            return
        (id, ordinal), attempt = start, self._lineage.attempt
        self._lineage.continue_at(id, ordinal, attempt)
        log_abandoned(self.session.run, self.session.known(), id)
        ledger = self.session.coordinator.ledger
        self.session.call(lambda: ledger.continue_from(id, attempt=attempt.number))

    # All ranks ---------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self.session.ranks.topology.rank

    def _token(self) -> str:
        return f"{self._rank}-{next(self._count)}"

    def _announce(self, step: int, save: PathSave) -> SaveHandle:
        """Ask rank 0 to announce the save, and return the handle of this rank's part."""
        token = self._token()
        rename = self._renames[token] = _PendingRename()
        bound_s = _SLOWER * self._config.max_wait_s
        try:
            self.session.ranks.message_tree.report((TOPIC, _SAVE, step, token), save.to_json())
            if not self.session.wait(rename.done, bound_s):
                self.session.ranks.check()
                raise RanksError(
                    f"save of step {step} by path: rank 0 announced nothing within {bound_s:g} s: it is gone, or busy"
                )
        finally:
            del self._renames[token]
        if rename.error is not None:
            raise rename.error
        assert rename.handle is not None
        return rename.handle

    def on_message(self, news: RankMessage) -> None:
        """Handle a message about saves by path; never waits."""
        match news:
            case RankReported(topic=(_, what, int(step), _)):
                body = news.body
                if what == _SAVE:
                    save = PathSave.from_json(body, rank=news.rank)
                    body = replace(save, start=self._announced_start()).to_json()
                self.session.ranks.message_tree.announce(news.topic, body)
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
                self._queue.put(news)

    def _announced_start(self) -> tuple[CheckpointId, int] | None:
        return None if self._lineage.begun else self._continued_checkpoint()

    def _work(self) -> None:
        while (news := self._queue.get()) is not None:
            _, _, step, token = news.topic
            rename = self._renames.get(str(token), _PendingRename())
            try:
                save = PathSave.from_json(news.body, rank=0)
                handle = rename.handle = self._save(int(step), save)
            except BaseException as error:  # noqa: BLE001 - the thread that renames raises it; all ranks give up
                rename.error = error
                logger.error("rank %d: %s", self._rank, error)
            else:
                self._settle(handle)
            rename.done.set()

    def _settle(self, handle: SaveHandle) -> None:
        """Wait until this rank's image is captured, before the next begins; the handle holds what failed."""
        try:
            handle.captured(_SLOWER * self._config.max_wait_s)
        except (TierfallError, TimeoutError):
            logger.debug("the files of step %d were not captured", handle.step, exc_info=True)

    # One rank's part ---------------------------------------------------------------------------------

    def _save(self, step: int, save: PathSave) -> SaveHandle:
        began = time.monotonic()
        with self._saver.lock:
            self._check()
            self._continue_from(save.start)
            try:
                self._lineage.check(step)
            except StepError:
                self._stages.check_kept(step)  # a step that was given up advances the lineage, too
                raise
            try:
                self._stages.check_kept(step)
                files = self._take(step, save)
                return self._saver.save_files(self._lineage, step, files, began)
            except BaseException as error:
                self._stages.note_failed(step, str(error))
                self._saver.report_failed(self._lineage, step, error)
                raise

    def _take(self, step: int, save: PathSave) -> dict[str, torch.Tensor]:
        """Return this rank's files of a step, and free their stage; none where this rank wrote none.

        Raises ConfigError where the committing rank wrote a file of the same name.
        """
        stage = self._stages.pop(step)
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

    # Waiting -----------------------------------------------------------------------------------------

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
                "save of step %d by path: tier %s does not have it after %g s (max_wait); it is in memory, and the "
                "flush goes on",
                handle.step,
                tier,
                self._config.max_wait_s,
            )
        except TierfallError as error:
            if self._config.on_error is OnError.RAISE:
                raise
            logger.warning("save of step %d by path is in memory alone: %s", handle.step, error)

    def _wait_whole(self, handle: SaveHandle) -> None:
        """Wait until the images of all ranks are sealed, or the checkpoint is committed on a tier."""
        id = CheckpointId(handle.step, handle.attempt)
        coordinator = self.session.coordinator
        deadline_s = time.monotonic() + _SLOWER * self._config.max_wait_s

        def is_whole() -> bool:
            entry = coordinator.ledger.entries.get(id)
            if entry is not None and not entry.failed:
                return coordinator.ledger.has_whole_copy(entry)
            lost = coordinator.commits.why_save_failed(id)
            error = lost[0] if lost else handle.exception()
            raise CaptureError(str(error or f"save of step {id.step} was given up")) from error

        pause = threading.Event()
        while not self.session.call(is_whole):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"step {handle.step} is not sealed on all ranks in time")
            pause.wait(_POLL_S)
