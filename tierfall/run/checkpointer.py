"""The Checkpointer: what a training loop saves to and restores from.

It checks arguments and reports results; ``open_run`` has the parts that do the work.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from tierfall.config import Config
from tierfall.core.capture.device_copies import device_of
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.flush.tasks import CommandKind
from tierfall.core.image.header import ImageHeader
from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import plan_fill
from tierfall.core.load.load import check_device, plan_load
from tierfall.core.load.plan import ReadPlan
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.reshard import ResizeRules
from tierfall.core.runtime.callbacks import check_callback
from tierfall.core.runtime.public_calls import public_call, public_class
from tierfall.core.state.item import resize_rules
from tierfall.core.state.walk import check_state
from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import as_seconds
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import Decision
from tierfall.run import group_commands
from tierfall.run.open_run import OpenRun, failed_by_exception
from tierfall.run.saver import as_step, checked_tags
from tierfall.setup import pointer
from tierfall.telemetry.figures import Statistics, to_metrics
from tierfall.telemetry.journal import log_failures
from tierfall.telemetry.reports import CheckpointInfo, DrainReport, RestoreReport

logger = logging.getLogger("tierfall")


@public_class(
    alone=(
        *("save", "maybe_save", "restore", "load", "begin", "drain", "close"),
        *("pin", "unpin", "tag", "untag", "delete", "prune"),
    )
)
class Checkpointer:
    """Saves and restores one training run. Made by ``tierfall.open``; a context manager.

    One process has one Checkpointer per run. Its methods are called by the thread that trains; any thread may wait on a
    handle.
    """

    def __init__(
        self,
        config: Config,
        *,
        process_group: object = None,
        ranks: Ranks | None = None,
        fresh: bool = False,
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(f"a Checkpointer is made by tierfall.open({config!r:.80})")
        opened = OpenRun.open(config, process_group=process_group, ranks=ranks, fresh=fresh)
        self._opened = opened
        self._config = opened.config
        self._session = opened.session
        self._journal = self._session.journal
        self._lineage = opened.lineage
        self._capturer = opened.capturer
        self._cadence = opened.cadence

    def __repr__(self) -> str:
        tiers = ", ".join(tier.name for tier in self._config.tiers)
        attempt, newest = self._lineage.attempt.number, self._lineage.last_step
        saved = "nothing saved or restored yet" if newest is None else f"at step {newest}"
        kind = f"{'closed ' * self._opened.closed}Checkpointer"
        return f"<{kind} of run {self._config.run!r}, attempt {attempt}, on {tiers}: {saved}>"

    # Saving ------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        block: bool = False,
    ) -> SaveHandle:
        """Save ``state`` as ``step``, whatever the cadence; returns once nothing large is left to copy on this thread.

        ``metrics`` are numbers or 0-dim tensors, read as of this call. ``block`` waits until the last tier of this step
        has it, and raises what prevents that, as the handle's ``wait`` does.

        Raises CaptureError for a state that cannot be saved, StepError for a step that is not above the last one,
        CapacityError where a tier cannot hold one checkpoint, FencedError where a newer attempt of the run exists, and
        under ``on_error: raise`` what failed since the last call.
        """
        return self._opened.save_state(step, state, metrics, tags, block=block)

    def maybe_save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        block: bool = False,
    ) -> SaveHandle | None:
        """Save if the cadence (``interval``) selects this step, else return None; see ``save``.

        Call it at the end of every step: the cadence measures the time between calls. A step that ``save`` has saved is
        not saved again.
        """
        self._opened.check_usable()
        self._lineage.check_begun(step)
        step = as_step(step)
        check_state(state)  # a wrong argument is not to wait for the first step that is due
        checked_tags(tags)
        self._session.step_timer.record(step, time.monotonic())
        handle = None
        if self._cadence.is_due(step) and not self._lineage.has_saved(step):
            handle = self._opened.save_state(step, state, metrics, tags, block=block)
        if handle is not None:
            self._session.status.training = self._of_cadence()
        if self._config.interval.at_end:
            self._opened.note_last(step, state, metrics, tags)
        return handle

    # The barrier -------------------------------------------------------------------------------------

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait until the last save is copied, and help to copy: after this the state may change.

        For updates that no torch optimizer makes; the step of a torch optimizer calls it by itself. After ``timeout``
        seconds (default: ``max_wait``) the snapshot is given up. Raises CaptureError where the capture failed.
        """
        timeout = as_seconds(timeout, what="wait_captured: timeout")
        self._opened.check_usable()
        self._capturer.barrier.on_explicit_wait()
        self._capturer.wait_barrier(self._config.max_wait_s if timeout is None else timeout)

    def guard(self) -> AbstractContextManager[None]:
        """Bracket an update of the state: ``with ckpt.guard(): update()``; see ``wait_captured``."""
        return _Guard(self)

    # Restoring ---------------------------------------------------------------------------------------

    @log_failures("restore")
    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        attempt: int | None = None,
        tier: str | None = None,
        only: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        retype: Sequence[str] = (),
        resize: Sequence[str] = (),
        strict: bool = True,
        unreachable: str = "raise",
    ) -> RestoreReport | None:
        """Fill ``state`` in place from the newest restorable checkpoint, each chunk from its fastest good copy.

        ``step`` (and ``attempt``) select another checkpoint than the newest, ``tier`` the only tier to read. ``only``
        are dotted prefixes of the names to restore; the lineage does not change then.

        ``strict`` requires the same names of tensors, objects and plain values in checkpoint and state. Exceptions are
        named: what ``skip`` names is left unchanged (``*`` matches one component: ``"optimizer.param_groups.*.lr"``),
        ``rename`` maps names in the checkpoint to names in the state, ``retype`` names optimizers and objects whose
        class has changed, and ``resize`` tensors that may have another shape: what both shapes have in common is
        restored, with the optimizers' state of it, whose new elements are 0. A place that is None or an empty list or
        dict takes what the checkpoint has there. Gradients of restored parameters are set to None.

        Returns None where every tier answered and none has a checkpoint. Raises RestoreError where the state does not
        match, where no checkpoint can be read whole, and where a tier did not answer that may have a newer one
        (``unreachable="ignore"`` continues without it).
        """
        began = time.monotonic()
        self._opened.check_usable()
        check_state(state, "restore")
        request = self._opened.restore_request(step, attempt, tier, unreachable)
        choices = Choices(
            only=only,
            skip=skip,
            rename=rename,
            retype=retype,
            resize=resize,
            strict=strict,
            is_going_back=self._lineage.saved_any or self._lineage.started_from is not None,
        )
        part = None if only is None else tuple(only)
        self._opened.prepare_restore(continues=only is None)
        self._opened.forget_last()
        with (
            self._opened.deletions_paused(),
            self._opened.noting_half_filled(part) as note_begin,
        ):

            def plan(header: ImageHeader) -> ReadPlan:
                planned = plan_fill(state, header, choices)
                note_begin()
                return planned

            rules = ResizeRules(rules=resize_rules(state))
            restored = self._opened.fill_newest(request, plan, rules, continues=only is None)
            if restored is not None:
                self._lineage.half_filled.discard(part)
        self._opened.session.host.prepare(device_of(state))
        return None if restored is None else self._opened.report_restored(restored, began)

    @log_failures("load")
    def load(
        self,
        step: int | None = None,
        *,
        attempt: int | None = None,
        only: Sequence[str] | None = None,
        map_location: str | torch.device = "cpu",
        resume: bool = True,
    ) -> tuple[RestoreReport, dict[str, Any]] | None:
        """Return a report, and a checkpoint as a nested dict of what each ``state_dict()`` returned, as
        ``tierfall.load`` does; each chunk is read from its fastest good copy, host memory included.

        ``step``, ``attempt`` and ``only`` select as for ``restore``. A list, an optimizer or an object is returned
        whole if a part of it is selected. Tensors are made on ``map_location``. With several ranks, all make this call.
        Sharded tensors are returned whole. Of values that differ between ranks, each rank gets its own; rank 0's if
        another number of ranks saved.

        With ``resume``, and without ``only``, the run continues from that step, as after ``restore``. The random state
        is not set: ``restore({}, step=report.step, only=["rng"])`` sets it.

        Returns None where every tier answered and none has a checkpoint. Raises ConfigError for a missing device,
        RestoreError as ``restore`` does.
        """
        began = time.monotonic()
        self._opened.check_usable()
        check_device(map_location)
        request = replace(
            self._opened.restore_request(step, attempt, doing="load"),
            in_place=False,
            advice="or make the tier reachable",
        )
        choices = Choices(only=only, doing="load")
        continues = resume and only is None
        self._opened.checks_omissions = False
        self._opened.prepare_restore(continues=continues)
        plan = partial(plan_load, map_location=map_location, choices=choices, whole=True)
        with self._opened.deletions_paused():
            rules = ResizeRules(values_of=0)
            restored = self._opened.fill_newest(request, plan, rules, continues=continues)
        if restored is None:
            return None
        return self._opened.report_restored(restored, began), restored.plan.loaded

    def begin(self) -> None:
        """Begin a run without a restore, where no tier has a checkpoint; no effect where this start may save already.

        ``save`` makes the same check: this one is made before the first step is trained. After it, or after ``load``,
        the first save does not warn of what its state may lack, such as a DataLoader's order. With several ranks, all
        make this call. Raises StepError where a tier has a checkpoint, RestoreError where one could not be asked.
        """
        self._opened.check_usable()
        self._opened.checks_omissions = False
        if not self._lineage.begun:
            self._opened.begin_empty()

    def write_pointer(
        self, folder: str | os.PathLike[str], step: int, *, attempt: int | None = None
    ) -> None:
        """Write a pointer to a checkpoint into ``folder``, for a framework that looks for a folder; durable on return.

        ``tierfall.load(folder)`` loads what it points to, ``tierfall.read_pointer(folder)`` returns step and attempt.
        The checkpoint may still be on its way to the tiers. No other rank takes part. Raises StepError for an unknown
        step, BackendError where the folder cannot be written.
        """
        self._opened.check_usable()
        step = as_step(step, doing="write_pointer")
        if attempt is None and self._lineage.has_saved(step):
            id = CheckpointId(step, self._lineage.attempt.number)
        else:
            id = group_commands.find_checkpoint(self._session, "write_pointer", step, attempt)
        pointer.write_pointer(folder, pointer.pointer_to(self._config, id))

    # Looking, and a person's commands ----------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return every known checkpoint, oldest first, with the state of its copies on each tier."""
        self._opened.check_usable()
        return group_commands.known_checkpoints(self._session)

    def pin(self, step: int, *, attempt: int | None = None) -> None:
        """Keep a checkpoint on every tier that has it until ``unpin``, whatever retention and eviction decide."""
        self._command(CommandKind.PIN, step, attempt)

    def unpin(self, step: int, *, attempt: int | None = None) -> None:
        """Remove a checkpoint's pin on every tier."""
        self._command(CommandKind.UNPIN, step, attempt)

    def tag(self, step: int, tag: str, *, attempt: int | None = None) -> None:
        """Add a tag to a checkpoint, beside those of its save: a rule ``retain: {tags: ...}`` keeps what has it.

        Raises ConfigError for a tag that is no name: letters, digits, '.', '_' and '-', at most 128. Example:
        ``ckpt.tag(400, "released")``.
        """
        self._command(CommandKind.TAG, step, attempt, tag=keys.check_tag(tag, what="tag"))

    def untag(self, step: int, tag: str, *, attempt: int | None = None) -> None:
        """Remove a tag from a checkpoint, also one of its save."""
        self._command(CommandKind.UNTAG, step, attempt, tag=keys.check_tag(tag, what="untag"))

    def delete(self, step: int, *, attempt: int | None = None, even_the_last: bool = False) -> None:
        """Delete a checkpoint from every tier.

        Raises StepError for a pinned one and, unless ``even_the_last``, for the last one that can be restored.
        """
        self._command(CommandKind.DELETE, step, attempt, even_the_last=even_the_last)

    def _command(
        self,
        kind: CommandKind,
        step: int,
        attempt: int | None,
        *,
        even_the_last: bool = True,
        tag: str = "",
    ) -> None:
        self._opened.check_usable()
        step = as_step(step, doing=kind)
        attempt = None if attempt is None else as_step(attempt, doing=kind, what="attempt")
        self._opened.finish_capture()
        group_commands.run_command(
            self._session, kind, step, attempt, even_the_last=even_the_last, tag=tag
        )

    def prune(self, *, dry_run: bool = False) -> list[Decision]:
        """Return what retention decides for every copy on every tier, and carry it out unless ``dry_run``.

        A copy with a commit record counts as good, verified or not, as for ``tierfall prune``.
        """
        self._opened.check_usable()
        return group_commands.prune(self._session, dry_run=dry_run)

    def statistics(self) -> Statistics:
        """Return the figures of this rank; counters count since open."""
        self._opened.check_usable()
        return replace(self._session.call(self._session.status.statistics), **self._of_cadence())

    def _of_cadence(self) -> dict[str, Any]:
        cadence = self._cadence
        return {"cadence": cadence.report(), "ettr": cadence.ettr(), "run_ettr": cadence.run_ettr()}

    def metrics_dict(self) -> dict[str, float]:
        """Return the metrics of this rank for a tracker: numbers by flat keys, such as ``tierfall/saves`` and
        ``tierfall/behind_seconds/nvme``. Names end in their unit; counters count since open; what is not known is
        missing. For any thread: ``wandb.log(ckpt.metrics_dict())``. Raises ConfigError where the run is closed."""
        self._opened.check_usable()
        return to_metrics(self._session.call(self._session.status.statistics))

    def subscribe(self, fn: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
        """Call ``fn(event)`` for each event of this rank from now on, and return a function that ends that.

        ``event`` is the dict that a line of the event log has, whether a log is configured or not. A thread of the
        subscription's own calls it, in order, and logs what it raises. A slow ``fn`` delays nothing else: up to 10,000
        events wait for it, later ones are lost, and ``events_lost`` tells it how many. ``close`` delivers what waits
        within a second. After unsubscribing, a call in progress ends, and no other one follows. In a forked child there
        are no events.

        Raises ConfigError where ``fn`` cannot be called with an event.
        """
        self._opened.check_usable()
        check_callback(fn, "(event)", call="subscribe")
        return self._journal.subscribe(fn)

    # The end -----------------------------------------------------------------------------------------

    def drain(self, deadline: float | None = None) -> DrainReport:
        """Wait until every owed copy is durable, for ``deadline`` seconds at most (None: without a bound).

        With a deadline, half-written copies come first, then the newest. Copies that cannot arrive in time, by measured
        rates, are not begun; the report's ``forecast`` names them. A tier that accepts no copies at present is tried
        at once, and again until the deadline; without one, once. The report also names what is left, and what was given
        up meanwhile. With several ranks, all call it, and the report is the same on all.
        """
        deadline = as_seconds(deadline, what="drain: deadline")
        self._opened.check_usable()
        self._opened.finish_capture()
        began = time.monotonic()
        self._session.find_external_commits(deadline)
        if deadline is not None:
            deadline = max(0.0, deadline - (time.monotonic() - began))
        report = group_commands.drain(self._session, deadline)
        return replace(report, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Flush what can become durable within ``max_wait``, and release everything. May be called twice.

        It first saves the last step that ``maybe_save`` was called for, unless ``at_end`` is false or an exception is
        being handled, and raises what prevents that. What is still owed then stays in host memory: the next start, or
        ``tierfall drain``, flushes it. It logs (INFO; WARNING after an exception) which checkpoint is the newest and
        where its copies are. Raises, under ``on_error: raise``, what failed.
        """
        self._opened.close(failed_by_exception())

    def __enter__(self) -> Self:
        return self

    @public_call
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._opened.pid:  # a forked child leaves the block
            return
        try:
            self._opened.close("" if error is None else f"it ended by {type(error).__name__}")
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"tierfall: closing failed too: {failure}")
            if error.__context__ is None and error.__cause__ is None:
                error.__context__ = failure
            logger.exception("closing failed while another exception was being raised")


class _Guard(ContextDecorator):
    def __init__(self, ckpt: Checkpointer) -> None:
        self._ckpt = ckpt

    @public_call
    def __enter__(self) -> None:
        self._ckpt.wait_captured()

    def __exit__(self, *ended: object) -> None:
        """Do nothing: a barrier is before an update alone."""


def open_run_of(ckpt: Checkpointer) -> OpenRun:
    """Return the parts behind a Checkpointer, for integrations in this package. Not public API.

    Raises ConfigError for anything else, which a caller of an integration has passed.
    """
    if not isinstance(ckpt, Checkpointer):
        raise ConfigError(f"expected a Checkpointer, as tierfall.open returns it, not {ckpt!r:.80}")
    return ckpt._opened
