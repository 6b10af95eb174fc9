"""Comparison of replicas: what each rank reads of replicated tensors at each save, to find those that differ.

Replicas that were equal when their writers were assigned may differ later: between two exchanges of LocalSGD or DiLoCo,
after a bit flip, or with kernels that are not deterministic. So at each save every rank reads the same bytes of all
replicas, whether it writes them or not:

* in host memory LINES lines per tensor, evenly spread, at other places for each save; shorter tensors completely;
* in host memory whole ranges, in rotation: about DIGEST_BYTES;
* on a device the sums of about SUMS_BYTES of whole tensors, in rotation. The host does not wait for them.

Diverged ranks differ in nearly all bytes, which the first comparison of lines and sums shows. A difference in few
places is found within one rotation. The choice of bytes depends only on what all ranks know: the checkpoint's ordinal,
the keys of the tensors, and the amount shared. Two kinds of tensors are compared only at the assignment: those in host
memory that are not dense (a slice of a larger tensor), and those on a device without a copy stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierfall.core.image.dedup import (
    NOBODY,
    KeyKind,
    Keys,
    ReplicaAssignment,
    ReplicaDigests,
    ReplicatedTensors,
)
from tierfall.core.image.segments import SegmentPart
from tierfall.core.runtime.streams import CopyStream, Streams
from tierfall.core.sampling.device_sums import DeviceRanges, DeviceSums
from tierfall.core.sampling.lines import enumerate_groups
from tierfall.core.sampling.ranges import (
    DIGEST_BYTES,
    LINE_BYTES,
    Integers,
    ProcessMemory,
    addresses_of,
)
from tierfall.core.state.view import StateView

LINES = 2
"""Lines per tensor. A tensor with no more lines is read completely."""
RANGE_BYTES = 64 << 10
SUMS_BYTES = 1 << 30
"""Approximate bytes on devices that are summed per save, of approximately SUMS_TENSORS tensors at most."""
SUMS_TENSORS = 64
_PHASES = 1 << 16


class ReplicaPlan:
    """What to read of the replicas of one structure. Used by the thread that saves."""

    def __init__(self, shareable: ReplicatedTensors, assignment: ReplicaAssignment) -> None:
        view, groups = shareable.view, assignment.groups_of(shareable.table.keys)
        numbers = np.array(shareable.numbers, dtype=np.int64)
        dense = [view.plain[n] or view.strides[n] is not None for n in shareable.numbers]
        shared = groups != NOBODY
        self._all = _ReplicaColumns(
            numbers[shared],
            shareable.table.keys[shared],
            groups[shared],
            shareable.table.sizes[shared].astype(np.int64),
        )
        self._dense = np.array(dense)[shared]
        self._ranges_period = max(1, -(-assignment.bytes // DIGEST_BYTES))
        self._sums_period = max(
            1, -(-assignment.bytes // SUMS_BYTES), -(-assignment.entries // SUMS_TENSORS)
        )
        self._addresses: Integers | None = None
        self._host: _HostReplicas | None = None
        self._on_devices: _Rotation | None = None

    def read(self, view: StateView, ordinal: int, streams: Streams) -> ReplicaReading:
        """Read what is compared for the checkpoint with this ordinal; on devices, after the caller's enqueued work."""
        addresses = addresses_of(view.pointers, self._all.numbers)
        if self._addresses is None or not np.array_equal(self._addresses, addresses):
            self._place(view, addresses)
        sums = [] if self._on_devices is None else self._sum_up(view, ordinal, streams)
        host = [] if self._host is None else self._host.digest(ordinal)
        return ReplicaReading(host=host, sums=sums)

    def _place(self, view: StateView, addresses: Integers) -> None:
        is_cpu = [view.sources[number].is_cpu for number in self._all.numbers]
        on_host = np.array(is_cpu, dtype=np.bool_)
        sampled = on_host & self._dense
        self._host = None
        if sampled.any():
            self._host = _HostReplicas(
                self._all.only(sampled), addresses[sampled], self._ranges_period
            )
        self._on_devices = None
        if not on_host.all():
            self._on_devices = _Rotation.of(self._all.only(~on_host), self._sums_period)
        self._addresses = addresses

    def _sum_up(self, view: StateView, ordinal: int, streams: Streams) -> list[_ReplicaSums]:
        assert self._on_devices is not None
        chosen = self._on_devices.at(ordinal)
        devices = [view.sources[number].device for number in chosen.numbers]
        found = []
        for device in dict.fromkeys(devices):
            stream = streams.of(device)
            if stream is not None:
                entries = chosen.only(np.array([other == device for other in devices]))
                found.append(_ReplicaSums.begin(stream, entries, view))
        return found


@dataclass(frozen=True, slots=True)
class _ReplicaColumns:
    """Columns of replicas: numbers in the state, keys, groups and sizes."""

    numbers: Integers
    keys: Keys
    groups: Integers
    sizes: Integers

    def only(self, chosen: NDArray[Any]) -> _ReplicaColumns:
        """The rows that a mask or an array of indices selects."""
        return _ReplicaColumns(
            self.numbers[chosen], self.keys[chosen], self.groups[chosen], self.sizes[chosen]
        )

    def digests(self, values: Sequence[int] | Keys, kind: KeyKind) -> ReplicaDigests:
        return ReplicaDigests(
            keys=self.keys | np.uint64(kind),
            values=np.array(values, dtype=np.uint64),
            groups=self.groups,
        )


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A rotation over entries: each is selected once per period, and some of every group at each save."""

    entries: _ReplicaColumns
    nth: Integers
    periods: Integers

    @classmethod
    def of(cls, entries: _ReplicaColumns, period: int) -> _Rotation:
        entries = entries.only(np.lexsort((entries.keys, entries.groups)))
        _, counts = np.unique(entries.groups, return_counts=True)
        group, nth = enumerate_groups(counts)
        return cls(entries, nth, np.minimum(period, counts)[group])

    def at(self, ordinal: int) -> _ReplicaColumns:
        return self.entries.only(self.nth % self.periods == ordinal % self.periods)


class _HostReplicas:
    """The ranges of tensors in host memory that are digested; valid while no tensor moves."""

    def __init__(self, entries: _ReplicaColumns, addresses: Integers, period: int) -> None:
        self._entries = entries
        self._period = period
        sizes = entries.sizes
        memory = ProcessMemory(int(addresses.min()), int((addresses + sizes).max()))
        self._memory = memory.view
        places = addresses - memory.low
        whole = sizes // LINE_BYTES
        short = whole <= LINES
        counts = np.where(short, 1, LINES)
        of, nth = enumerate_groups(counts)
        self._first = np.cumsum(counts) - counts
        self._lines = np.where(short[of], 0, nth * whole[of] // LINES)
        self._distances = np.where(short, 0, whole // LINES)[of]
        self._phases = (entries.keys[of] >> np.uint64(48)).astype(np.int64)
        self._places = places[of]
        self._sizes = np.where(short, sizes, LINE_BYTES)[of]
        self._range_of, nth = enumerate_groups(np.where(short, 0, -(-sizes // RANGE_BYTES)))
        self._range_at = nth * RANGE_BYTES
        self._range_places = places[self._range_of]
        self._range_sizes = np.minimum(sizes[self._range_of] - self._range_at, RANGE_BYTES)
        keys = (entries.keys[self._range_of] >> np.uint64(2)) % np.uint64(period)
        self._range_phases = (keys.astype(np.int64) + nth) % period

    def digest(self, ordinal: int) -> list[ReplicaDigests]:
        """One digest of all lines of each tensor, and one of its ranges whose turn it is."""
        phases = (self._phases + xxhash.xxh3_64_intdigest(b"%d" % ordinal) % _PHASES) % _PHASES
        lines = (self._lines + phases * self._distances // _PHASES) * LINE_BYTES
        values = self._digest(self._places, lines, self._sizes)
        found = [self._entries.digests(np.add.reduceat(values, self._first), KeyKind.SAMPLES)]
        turn = np.flatnonzero(self._range_phases == ordinal % self._period)
        if len(turn):
            places, sizes = self._range_places[turn], self._range_sizes[turn]
            values = self._digest(places, self._range_at[turn], sizes)
            of, first = np.unique(self._range_of[turn], return_index=True)
            entries = self._entries.only(of)
            found.append(entries.digests(np.add.reduceat(values, first), KeyKind.RANGES))
        return found

    def _digest(self, places: Integers, offsets: Integers, sizes: Integers) -> Keys:
        """The digests of ranges of tensors, each with its offset: equal bytes elsewhere have another digest."""
        starts = places + offsets
        slices = map(slice, starts.tolist(), (starts + sizes).tolist())
        views = map(self._memory.__getitem__, slices)
        digests = map(xxhash.xxh3_64_intdigest, views, offsets.tolist())
        return np.fromiter(digests, dtype=np.uint64, count=len(starts))


@dataclass(frozen=True, slots=True)
class _ReplicaSums:
    """Sums over tensors on one device, in the order of ``entries``."""

    entries: _ReplicaColumns
    sums: DeviceSums

    @classmethod
    def begin(cls, stream: CopyStream, entries: _ReplicaColumns, view: StateView) -> _ReplicaSums:
        columns = zip(entries.numbers.tolist(), entries.sizes.tolist(), strict=True)
        parts = [SegmentPart(number, 0, size, 0, 0) for number, size in columns]
        ranges = DeviceRanges(parts, view)
        rows = {number: row for row, number in enumerate(entries.numbers.tolist())}
        order = np.array([rows[part.index] for part in ranges.parts])
        return cls(entries.only(order), ranges.begin(stream, view, "the ranks"))

    def digests(self) -> ReplicaDigests | None:
        """None if the device had no memory left."""
        values = self.sums.read()
        if values is None:
            return None
        return self.entries.digests([value % (1 << 64) for value in values], KeyKind.SUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReading:
    """What was read at one save."""

    host: list[ReplicaDigests]
    sums: list[_ReplicaSums]

    def digests(self) -> ReplicaDigests:
        """The digests of what was read; waits for devices. Groups with a missing sum are omitted."""
        parts = self.host.copy()
        incomplete: set[int] = set()
        for sums in self.sums:
            found = sums.digests()
            if found is None:
                incomplete.update(map(int, sums.entries.groups))
            else:
                parts.append(found)
        return ReplicaDigests.join(parts).without(incomplete)
