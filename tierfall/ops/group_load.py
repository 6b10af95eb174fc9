"""One load by several ranks: each gets one checkpoint, or the part that it names, and each byte is read once.

The ranks pull chunks from each other, as in a restore (``core/restore/pulled_reader.py``). With ``share`` the ranks of
a node have one memory: each reads a share of the tensors that any of them asked for into it, and all map it privately.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tierfall.config import Config
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.image.header import ImageHeader
from tierfall.core.load.build import BlockTarget
from tierfall.core.load.choices import Choices
from tierfall.core.load.load import plan_load
from tierfall.core.load.plan import ReadPlan
from tierfall.core.ranks.agreement import check_same_arguments
from tierfall.core.ranks.messages import Message
from tierfall.core.restore.agreement import agree_to_restore, finish_on_all_ranks, make_barrier
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.pulled_reader import PulledReader
from tierfall.core.restore.restore import RankFailure, RestoreResult
from tierfall.core.types.errors import ConfigError, RanksError
from tierfall.core.types.text import format_ranks, with_article
from tierfall.core.types.values import Shard
from tierfall.launch.launcher import find_ranks
from tierfall.ops.reader import RunReader
from tierfall.setup.tiers import patience_s, reported_tiers, start_patience_s
from tierfall.tiers.host_folder import memory_free_bytes

_CALL = "load"
ALIGNMENT = 64
"""Of tensors in the memory of a node."""
CHUNKS = 2
"""Chunks that a rank has in memory beside its tensors and what it keeps for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadCall(Message):
    """What a rank was asked to load: a part, of all images or of the ``shard`` of a path, and whether the tensors are
    shared. ``number`` counts the loads of this rank in its group."""

    only: tuple[str, ...] | None
    shard: str
    share: bool
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts(Message):
    """The part that each rank asked for, the ``number`` of the load, and the ranks that are at an earlier one."""

    only: Mapping[int, tuple[str, ...] | None]
    number: int
    behind: tuple[int, ...]


_counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()
"""How many loads this process has begun, by group: a failed one counts, so that a rank that failed alone is found."""


def count_load(group: object) -> None:
    """Count a load of this process with a group."""
    if group is True or isinstance(group, torch.distributed.ProcessGroup):
        _counts[_counted_by(group)] = _counts.get(_counted_by(group), 0) + 1


def _counted_by(group: object) -> object:
    """Return what the loads of a group are counted by; a group that is made again begins anew."""
    distributed = torch.distributed
    if group is True:
        return distributed.group.WORLD if distributed.is_initialized() else count_load
    return group


def check_group(group: object, *, share: object, device: torch.device) -> None:
    """Raise ConfigError for arguments of ``load`` that do not go together."""
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("load: this process is not in the group that it was given")
    if not isinstance(group, bool | None | torch.distributed.ProcessGroup):
        raise ConfigError(
            f"load: group is {with_article(type(group).__name__)}; expected True (the ranks of torch.distributed, "
            "torchrun or srun), or a group of torch.distributed, such as mesh.get_group()"
        )
    if share and not group:
        raise ConfigError("load: share=True is for the ranks of a node: pass group=True too")
    if share and device.type != "cpu":
        raise ConfigError(
            f"load: share=True shares tensors on the CPU, but map_location is {device}: leave one out"
        )


@contextmanager
def opened_by(group: object, config: Config) -> Iterator[RunReader]:
    """Meet the other ranks of a group, if one is given, and open the tiers for reading, until the end of the block."""
    if not group:
        with RunReader(config) as reader:
            yield reader
        return
    try:
        process_group = None if group is True else group
        ranks = find_ranks(config, process_group=process_group, meeting=_meeting_of(process_group))
    except (ConfigError, RanksError) as error:
        raise type(error)(re.sub(r"\bopen\b", _CALL, str(error))) from error
    try:
        with ranks.reporting_error(_CALL):
            reader = RunReader(config, ranks)
        with reader:
            yield reader
    except BaseException:
        ranks.leave()
        raise
    ranks.close(config.max_wait_s)


def _meeting_of(group: Any) -> str:
    """Return a name that no other group of a job has, nor an ``open`` of the run."""
    distributed = torch.distributed
    if not distributed.is_initialized():
        return "/load"
    members = json.dumps(distributed.get_process_group_ranks(group))
    return f"/load-{hashlib.sha256(members.encode()).hexdigest()[:16]}"


class GroupLoad:
    """One rank's part in a load of several ranks. ``choose``, ``open``, ``plan`` and ``together`` are those of
    ``fill_first``."""

    def __init__(
        self,
        config: Config,
        reader: RunReader,
        choices: Choices,
        device: torch.device,
        *,
        shard: Shard,
        group: object,
        share: bool,
    ) -> None:
        """``config`` is that of the run, with the tiers of all nodes. Raises RanksError where the ranks were not asked
        for the same, or make different loads: then all count on from the highest number."""
        self._config, self._reader, self._share = config, reader, share
        self._choices, self._device = choices, device
        self._ranks, self._patience_s = reader.ranks, patience_s(config)
        self._parts: PulledReader | None = None
        only = None if choices.only is None else tuple(choices.only)
        counted_by = _counted_by(group)
        number = _counts[counted_by]
        call = _LoadCall(only=only, shard=str(shard), share=share, number=number)
        parts = self._ranks.agree(_CALL, call, _gather, _Parts, timeout_s=start_patience_s(config))
        self._only, _counts[counted_by] = parts.only, parts.number
        if parts.behind:
            raise RanksError(
                f"load: {format_ranks(parts.behind)} made fewer loads with this group than the other ranks, which are "
                f"at load {parts.number}: every rank makes the same loads in the same order, and one that fails on a "
                "rank counts. The next load that all ranks make works"
            )

    def choose(self, request: RestoreRequest, tally: ReadTally) -> list[KnownCheckpoint]:
        """Return what may be loaded, newest first, the same on all ranks."""
        with self._ranks.reporting_error(_CALL):
            self._reader.reopen_memory()
            found = {listing.tier: listing for listing in self._reader.list()}
        # A node without peer memory has no listing of it.
        listings = [found.get(t.name, Listing(tier=t.name)) for t in self._config.chain]
        mine = reported_tiers(self._config, self._ranks)
        agreed = agree_to_restore(self._ranks, listings, request, mine=mine, tally=tally)
        assert agreed is not None, "all commit records are read"
        return agreed

    def open(
        self, checkpoint: KnownCheckpoint, tiers: Sequence[str], tally: ReadTally
    ) -> PulledReader:
        config = self._config
        self._parts = PulledReader(
            checkpoint,
            tiers,
            self._reader.opener(),
            tally,
            chunks_max=CHUNKS,
            ranks=self._ranks,
            order=[tier.name for tier in config.chain],
            max_wait_s=config.max_wait_s,
            patience_s=self._patience_s,
            interface=None if config.peers is None else config.peers.interface,
        )
        return self._parts

    def plan(self, header: ImageHeader) -> ReadPlan:
        """Plan this rank's tensors; with ``share``, in the memory of the node, of which it reads a part of equal
        size."""
        if not self._share:
            return plan_load(header, map_location=self._device, choices=self._choices)
        here = {self._only[rank] for rank in self._ranks.topology.local_ranks}
        wanted = sorted({position for only in here for position in _positions(header, only)})
        sizes = [-(-header.tensors[each].length // ALIGNMENT) * ALIGNMENT for each in wanted]
        starts = dict(zip(wanted, accumulate(sizes, initial=0), strict=False))
        total = max(ALIGNMENT, sum(sizes))
        assert self._parts is not None, "its header was read"
        memory = self._parts.memory_of_node(total, free_bytes=memory_free_bytes())
        private = memory.private_view()

        def flat(view: memoryview, position: int) -> torch.Tensor:
            length = header.tensors[position].length
            part = view[starts[position] :][
                :length
            ]  # a storage of its own: torch.save writes whole ones
            return (
                torch.frombuffer(part, dtype=torch.uint8)
                if length
                else torch.empty(0, dtype=torch.uint8)
            )

        plan = plan_load(header, choices=self._choices, lend=partial(flat, private))
        count, index = len(self._ranks.topology.local_ranks), self._ranks.local_index
        mine = [each for each in wanted if starts[each] * count // total == index]
        targets = [BlockTarget(position=each, target=flat(memory.view, each)) for each in mine]
        return replace(plan, targets=tuple(targets))

    def together(
        self, checkpoint: KnownCheckpoint, error: BaseException | None
    ) -> RankFailure | None:
        """Agree on the end of a checkpoint; after an error, no rank of this node waits for its memory any more."""
        if error is not None and self._parts is not None:
            self._parts.end_memory(error)
        return make_barrier(self._ranks, timeout_s=self._patience_s)(checkpoint, error)

    def finish(self, restored: RestoreResult, request: RestoreRequest) -> None:
        """Make the objects, on all ranks or none."""
        finish_on_all_ranks(
            self._ranks,
            restored.plan.finish,
            restored.checkpoint.id,
            saved=False,
            request=request,
            timeout_s=self._patience_s,
        )


def _gather(calls: Mapping[int, _LoadCall]) -> _Parts:
    shares = {rank: {"share": call.share} for rank, call in calls.items()}
    check_same_arguments(_CALL, shares)
    if calls[0].share:
        check_same_arguments(_CALL, {rank: {"shard": call.shard} for rank, call in calls.items()})
    number = max(call.number for call in calls.values())
    return _Parts(
        only={rank: call.only for rank, call in calls.items()},
        number=number,
        behind=tuple(rank for rank, call in calls.items() if call.number < number),
    )


def _positions(header: ImageHeader, only: Sequence[str] | None) -> set[int]:
    """Return the positions of the tensors of a part."""
    plan = plan_load(header, map_location="meta", choices=Choices(only=only, doing=_CALL))
    return {target.position for target in plan.targets}
