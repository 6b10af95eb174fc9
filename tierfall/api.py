"""``tierfall.open``, ``tierfall.load`` and ``tierfall.open_tensors``."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from tierfall.backends.open import refuse_step_path
from tierfall.config import Config, load_config
from tierfall.config.fields import is_address
from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.load.choices import Choices
from tierfall.core.load.load import check_device, plan_load
from tierfall.core.restore.candidates import RestoreRequest, choose
from tierfall.core.restore.reshard import MakePlan, ResizeRules
from tierfall.core.restore.restore import fill_first
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.types.errors import ConfigError, RestoreError, UnreachableError
from tierfall.core.types.units import parse_size_with_unit
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.ops.group_load import GroupLoad, check_group, count_load, opened_by
from tierfall.ops.reader import RunPath, find_address, find_place, find_pointer
from tierfall.ops.tensors import OpenCheckpoint, Tensors
from tierfall.run.checkpointer import Checkpointer
from tierfall.run.open_run import damage_reporter, failed_by_exception, open_run_on, open_runs
from tierfall.run.saver import as_step
from tierfall.setup.pointer import Pointer
from tierfall.setup.tiers import SHARD
from tierfall.telemetry.progress import reading

logger = logging.getLogger("tierfall")
T = TypeVar("T")
_YAML = (".yaml", ".yml")
LOAD_CHUNKS = 2
"""Chunks that ``load`` has in memory beside its result."""


@public_call
def open(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    run: str | None = None,
    process_group: object = None,
    fresh: bool = False,
    replace: bool = False,
) -> Checkpointer:
    """Open a run for saving and restoring; use it as a context manager.

    ``config`` is a YAML file, a dict of the same shape, or a Config; ``run`` replaces the run's name. ``fresh``
    abandons existing checkpoints, so that a start that restores none may save. ``replace`` first closes this process's
    Checkpointer of that run, as its ``close`` does; never one of another process. This validates the configuration,
    opens the tiers, takes an attempt, and adopts what an earlier start left in host memory.

    With several ranks, each calls this, and all later methods, in the same order. They connect by ``process_group``, by
    ``torch.distributed`` where it is initialised, or by the environment of torchrun or srun. A restore reads once what
    several ranks need, and the others get it from the rank that reads it.

    Raises ConfigError for an invalid configuration and for foreign or damaged host memory, LockError while another
    process trains this run on this machine, BackendError where a tier refuses, RanksError where other ranks do not
    call.
    """
    settings = load_config(config, run=run)
    if replace and (earlier := open_run_on(settings)) is not None:
        earlier.close(failed_by_exception())
    return Checkpointer(settings, process_group=process_group, fresh=fresh)


@public_call
def close_all() -> None:
    """Close all Checkpointers of this process, also those that no variable holds any more, as their ``close`` does.

    Raises what the first ``close`` raises that fails, once all are closed.
    """
    failures: list[Exception] = []
    for one in open_runs():
        try:
            one.close(failed_by_exception())
        except Exception as error:  # noqa: BLE001 - raised once all are closed
            if failures:  # the first one is raised
                logger.error("run %s could not be closed: %s", one.run, error)
            failures.append(error)
    if failures:
        raise failures[0]


@public_call
def load(
    config_or_path: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    step: int | None = None,
    attempt: int | None = None,
    only: Sequence[str] | None = None,
    map_location: str | torch.device = "cpu",
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
    group: object = None,
    share: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint as a nested dict of what each ``state_dict()`` returned, without a training loop.

    ``config_or_path`` is a configuration, of which all tiers are read, host memory too; or a path: a .yaml file, a
    tier's root with one run in it, a run's folder, a step's folder, a shard, or a folder with a pointer
    (``Checkpointer.write_pointer``); or an address of a tier, a run, a step or a shard, such as ``s3://bucket/run``.
    ``only`` are dotted names: these parts are read, as by ``Checkpointer.load``. ``cache`` is a folder of this machine
    for the chunks that other file systems and stores have sent, of at most ``cache_bytes``; by default, of half of the
    room there.

    With ``group`` all ranks of a job make this call: True finds them as ``open`` does, or it is a group of
    ``torch.distributed``. They get one checkpoint, or the part that each names, on all or on none, and read each byte
    once; each chunk comes to a node once. With ``share`` the tensors of a node's ranks, on the CPU, are views of one
    memory, of which a page that a rank writes to becomes its own.

    Every chunk is verified; nothing is unpickled. A value whose class this process has not imported, or that has no
    codec here, is an ``UnknownValue``. The images of several ranks are merged; of values that differ between ranks,
    rank 0's are returned. A tier that answers nothing for ``max_wait`` gives way to another one, or ends the load; for
    a path, that is a minute.

    Raises ConfigError for any other path and for a missing device, RestoreError where no checkpoint can be read whole,
    RanksError where another rank does not make this call.
    """
    count_load(group)
    choices = Choices(only=only, doing="load")
    request = _request("load", step, attempt)
    check_device(map_location)
    device = torch.device(map_location)
    check_group(group, share=share, device=device)
    kept = _cache_folder(cache, cache_bytes)
    if group and kept is not None:
        raise ConfigError(
            "load: cache is for one process, and group reads each byte once for all: leave one out"
        )
    how = _How(choices, device, kept, group, bool(share))
    return _at_source(config_or_path, request, partial(_load_config, how=how))


class _How(NamedTuple):
    """What is loaded, where to, by which cache, and by whom."""

    choices: Choices
    device: torch.device
    cache: tuple[Path, int | None] | None
    group: object
    share: bool


@public_call
def open_tensors(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    step: int | None = None,
    attempt: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
) -> Tensors:
    """Open a checkpoint for reading its tensors by name, whole or in part, without loading the rest; use the result as
    a context manager.

    All arguments are those of ``load``. This reads the headers of all images; a tensor, or a part of one, then costs
    the chunks that it is in, each once, and each is verified. What ranks hold of one tensor is one tensor, by its
    global shape. A shard has the blocks of its rank.

    Raises what ``load`` raises. So does a read: if the checkpoint is deleted meanwhile, it says so.
    """
    request = _request("open_tensors", step, attempt)
    kept = _cache_folder(cache, cache_bytes)

    def open_at(config: Config, request: RestoreRequest, shard: Shard = SHARD) -> Tensors:
        places = {tier.name: tier.place for tier in config.storage}
        report = damage_reporter(config.run, places)
        return Tensors(OpenCheckpoint(config, request, shard, kept, report))

    return _at_source(source, request, open_at)


def _request(doing: str, step: int | None, attempt: int | None) -> RestoreRequest:
    return RestoreRequest(
        step=None if step is None else as_step(step, doing=doing),
        attempt=None if attempt is None else as_step(attempt, doing=doing, what="attempt"),
        operation=doing,
        advice="or load from another tier's folder",
        in_place=False,
    )


def _cache_folder(
    folder: str | os.PathLike[str] | None, bytes_max: int | str | None
) -> tuple[Path, int | None] | None:
    """Check the arguments ``cache`` and ``cache_bytes``."""
    if folder is None:
        if bytes_max is not None:
            raise ConfigError("cache_bytes is the size of a cache: name its folder by cache=")
        return None
    if not isinstance(folder, str | os.PathLike) or is_address(folder):
        raise ConfigError(f"cache={folder!r:.80} is not a folder of this machine")
    size = None if bytes_max is None else parse_size_with_unit(bytes_max)
    return Path(folder).expanduser().absolute(), size


def _at_source(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config,
    request: RestoreRequest,
    read: Callable[..., T],
) -> T:
    """Call ``read`` with the configuration that a source names, the request, and the shard if it names one."""
    doing = request.operation
    if isinstance(source, str | os.PathLike):
        refuse_step_path(os.fspath(source))
        if is_address(source):
            return _at_place(str(source), find_address(str(source), doing), request, read)
        path = Path(source).expanduser()
        if (pointer := find_pointer(path, doing)) is not None:
            return _at_pointer(path, pointer, request, read)
        if path.suffix not in _YAML:
            return _at_place(path, find_place(path, doing), request, read)
    return read(load_config(source), request)


def _at_pointer(path: Path, pointer: Pointer, request: RestoreRequest, read: Callable[..., T]) -> T:
    request = _within(pointer.checkpoint, request, path)
    try:
        return read(pointer.config(), request)
    except RestoreError as error:
        raise RestoreError(
            f"{request.operation}: {path} points to checkpoint {pointer.checkpoint} of run {pointer.run!r}: "
            + re.sub(f"^{request.operation}(: | of )", "", str(error))
        ) from error


def _load_config(
    config: Config,
    request: RestoreRequest,
    shard: Shard = SHARD,
    *,
    how: _How,
) -> dict[str, Any]:
    """Load from the tiers of a configuration. A trainer may delete a checkpoint that is being read: if no step was
    named, what is newest then is loaded."""
    with opened_by(how.group, config) as reader:
        places = {name: store.place for name, store in reader.stores.items()}
        tally = ReadTally(found_damage=damage_reporter(config.run, places))
        kept = None if how.cache is None else reader.cache_in(*how.cache)

        def choose_now(request: RestoreRequest) -> list[KnownCheckpoint]:
            reader.reopen_memory()
            return choose(reader.list(), request, tally)

        def open_now(
            checkpoint: KnownCheckpoint, tiers: Sequence[str], tally: ReadTally
        ) -> CheckpointReader:
            images = reader.opener()
            return CheckpointReader(
                checkpoint, tiers, images, tally, chunks_max=LOAD_CHUNKS, cache=kept
            )

        plan: MakePlan = partial(plan_load, map_location=how.device, choices=how.choices)
        of: dict[str, Any] = {"make_plan": plan, "make_reader": open_now}
        several: GroupLoad | None = None
        if reader.ranks.many:
            several = GroupLoad(
                config,
                reader,
                how.choices,
                how.device,
                shard=shard,
                group=how.group,
                share=how.share,
            )
            of = {"make_plan": several.plan, "make_reader": several.open}
            of["together"] = several.together
        shown = reading("load", tally, lambda: reader.memory_folder)
        with shown if reader.ranks.topology.is_root else nullcontext():
            restored = fill_first(
                choose_now if several is None else partial(several.choose, tally=tally),
                request,
                tally,
                shard=shard,
                resize=ResizeRules(values_of=0),
                **of,
            )
        if restored is None:
            raise RestoreError(f"load: {config.run} holds no checkpoint")
        restored.plan.finish() if several is None else several.finish(restored, request)
        return restored.plan.loaded


def _at_place(
    path: Path | str, place: RunPath, request: RestoreRequest, read: Callable[..., T]
) -> T:
    if place.checkpoint is not None:
        request = _within(place.checkpoint, request, path)
    try:
        return read(place.settings(), request, place.shard or SHARD)
    except RestoreError as error:
        prefix = f"{request.operation}: "
        said = re.sub(f"^{request.operation}(: | of )", "", str(error))
        text = f"{prefix}{path}: {said}"
        lost = isinstance(error.__cause__, UnreachableError)
        elsewhere = None if lost else place.advice_if_moved()
        if elsewhere is not None:
            text = f"{text}; {elsewhere}" if place.checkpoint else f"{prefix}{elsewhere}"
        raise RestoreError(text) from error


def _within(checkpoint: CheckpointId, request: RestoreRequest, path: Path | str) -> RestoreRequest:
    """Return the request for the checkpoint that a path names; ConfigError where it names another one."""
    if request.step not in (None, checkpoint.step) or request.attempt not in (
        None,
        checkpoint.attempt,
    ):
        raise ConfigError(
            f"{request.operation}: {path} is checkpoint {checkpoint}, but step={request.step} and "
            f"attempt={request.attempt} were asked for; name the run's folder instead"
        )
    return replace(request, step=checkpoint.step, attempt=checkpoint.attempt)
