"""Comparison of replicas: what each rank reads of replicated tensors at each save, to find those that differ.

Replicas that were equal when their writers were assigned may differ later: between two exchanges of LocalSGD or DiLoCo,
after a bit flip, or with kernels that are not deterministic. So at each save every rank reads the same bytes of all
replicas, whether it writes them or not:

* in host memory LINES lines per tensor, evenly spread, at other places for each save; shorter tensors completely;
* in host memory whole ranges, in rotation: as many as take STEP_SHARE of a training step, by the step's duration at the
  time of the assignment;
* on a device the sums of about SUMS_BYTES of whole tensors, in rotation. The host does not wait for them.

Diverged ranks differ in nearly all bytes, which the first comparison of lines and sums shows. A difference in few
places is found within one rotation. The choice of bytes depends only on what all ranks know: the checkpoint's ordinal,
the keys of the tensors, and the amount shared. Two kinds of tensors are compared only at the assignment: those that are
not dense (a slice of a larger tensor), and those on a device without a copy stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
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
from tierfall.core.runtime.streams import CopyStream, Streams
from tierfall.core.sampling.device_sums import PendingSums, sums_of
from tierfall.core.sampling.lines import enumerate_groups
from tierfall.core.sampling.ranges import LINE_BYTES, Integers, ProcessMemory, addresses_of
from tierfall.core.state.view import StateView
from tierfall.core.tensors.tensors import INTEGERS

LINES = 2
"""Lines per tensor. A tensor with no more lines is read completely."""
RANGE_BYTES = 64 << 10
STEP_SHARE = 0.01
DIGESTED_PER_S = 4 << 30
"""Estimated rate of digests in bytes per second."""
RANGES_BYTES = (1 << 20, 256 << 20)
"""Minimum and maximum of the mean bytes of ranges per save."""
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
        summed = [view.dtypes[n].itemsize in INTEGERS for n in shareable.numbers]
        shared = groups != NOBODY
        self._all = _ReplicaColumns(
            numbers[shared],
            shareable.table.keys[shared],
            groups[shared],
            shareable.table.sizes[shared].astype(np.int64),
        )
        self._dense = np.array(dense)[shared]
        self._summed = np.array(summed)[shared]
        least, most = RANGES_BYTES
        budget = min(most, max(least, int(STEP_SHARE * assignment.step_s * DIGESTED_PER_S)))
        self._ranges_period = max(1, -(-assignment.bytes // budget))
        self._sums_period = max(
            1, -(-assignment.bytes // SUMS_BYTES), -(-assignment.entries // SUMS_TENSORS)
        )
        self._addresses: Integers | None = None
        self._host: _HostSampler | None = None
        self._on_devices: _Rotation | None = None

    def read(self, view: StateView, ordinal: int, streams: Streams) -> ReplicaReading:
        """Read what is compared for the checkpoint with this ordinal; on devices, after the caller's enqueued work."""
        addresses = addresses_of(view.pointers, self._all.numbers)
        if self._addresses is None or not np.array_equal(self._addresses, addresses):
            self._place(view, addresses)
        sums = () if self._on_devices is None else self._sum_up(view, ordinal, streams)
        host = None if self._host is None else self._host.read(ordinal)
        return ReplicaReading(host=host, sums=tuple(sums))

    def _place(self, view: StateView, addresses: Integers) -> None:
        on_host = np.array([view.sources[number].is_cpu for number in self._all.numbers])
        sampled = on_host & self._dense
        summed = ~on_host & self._summed
        self._host = None
        if sampled.any():
            self._host = _HostSampler(
                self._all.only(sampled), addresses[sampled], self._ranges_period
            )
        self._on_devices = None
        if summed.any():
            self._on_devices = _Rotation.of(self._all.only(summed), self._sums_period)
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

    def digests(self, values: Sequence[int], kind: KeyKind) -> ReplicaDigests:
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


class _HostSampler:
    """The positions of lines and ranges of tensors in host memory; valid while no tensor moves."""

    def __init__(self, entries: _ReplicaColumns, addresses: Integers, period: int) -> None:
        order = np.argsort(addresses % LINE_BYTES, kind="stable")  # one ProcessMemory per remainder
        self.entries, addresses = entries.only(order), addresses[order]
        sizes = self.entries.sizes
        self._period = period
        self._span = ProcessMemory(int(addresses.min()), int((addresses + sizes).max()))
        whole = sizes // LINE_BYTES
        counts = np.minimum(whole, LINES)
        self.line_ends = np.cumsum(counts)
        of, nth = enumerate_groups(counts)
        self._first = nth * whole[of] // counts[of]
        self._distances = whole[of] // counts[of]
        self._phases = (self.entries.keys[of] >> np.uint64(48)).astype(np.int64)
        self._lines = self._memories(addresses, of)
        short = whole <= LINES
        tails = np.where(short, sizes % LINE_BYTES, 0)
        self.tail_ends = np.cumsum(tails)
        tail_of, tail_nth = enumerate_groups(tails)
        starts = (addresses - self._span.low + whole * LINE_BYTES)[tail_of]
        self._tails = torch.from_numpy(starts + tail_nth)
        self.range_of, range_nth = enumerate_groups(np.where(short, 0, -(-sizes // RANGE_BYTES)))
        at = range_nth * RANGE_BYTES
        self._range_at = (addresses - self._span.low)[self.range_of] + at
        self._range_bytes = np.minimum(sizes[self.range_of] - at, RANGE_BYTES)
        keys = (self.entries.keys[self.range_of] >> np.uint64(2)) % np.uint64(period)
        self._range_phases = (keys.astype(np.int64) + range_nth) % period

    def _memories(
        self, addresses: Integers, of: Integers
    ) -> list[tuple[ProcessMemory, slice, Integers]]:
        """For each alignment: a memory whose rows are aligned with the tensors, the slice of lines in it, and the row
        of each line's tensor."""
        remainders = (addresses % LINE_BYTES)[of]
        found = []
        for remainder in np.unique(remainders):
            first, end = np.searchsorted(remainders, [remainder, remainder + 1])
            starts = addresses[of[first:end]]
            high = int((addresses + self.entries.sizes)[of[first:end]].max())
            memory = ProcessMemory(int(starts.min()), high, remainder=int(remainder))
            found.append((memory, slice(first, end), (starts - memory.low) // LINE_BYTES))
        return found

    def read(self, ordinal: int) -> _HostSamples:
        phases = (self._phases + xxhash.xxh3_64_intdigest(b"%d" % ordinal) % _PHASES) % _PHASES
        offsets = self._first + phases * self._distances // _PHASES
        with torch.inference_mode(False), torch.no_grad():
            lines = [
                memory.lines.index_select(0, torch.from_numpy(rows + offsets[part]))
                for memory, part, rows in self._lines
            ]
            tails = self._span.bytes.index_select(0, self._tails)
        chosen = np.flatnonzero(self._range_phases == ordinal % self._period)
        ends = self._range_at + self._range_bytes
        ranges = [
            xxhash.xxh3_64_intdigest(self._span.view[self._range_at[n] : ends[n]]) for n in chosen
        ]
        return _HostSamples(self, lines, tails, chosen, ranges)


@dataclass(frozen=True, slots=True)
class _HostSamples:
    """What was read in host memory: lines and tails in the order of tensors, and digests of the ``chosen`` ranges."""

    plan: _HostSampler
    lines: list[torch.Tensor]
    tails: torch.Tensor
    chosen: Integers
    ranges: list[int]

    def digests(self) -> list[ReplicaDigests]:
        return [self._of_samples(), self._of_ranges()]

    def _of_samples(self) -> ReplicaDigests:
        rows = [lines.numpy().view(np.uint8).ravel() for lines in self.lines]
        lines = np.concatenate(rows).data if rows else memoryview(b"")
        tails = self.tails.numpy().data
        values, line_start, tail_start = [], 0, 0
        ends = zip(self.plan.line_ends * LINE_BYTES, self.plan.tail_ends, strict=True)
        for line_end, tail_end in ends:
            value = xxhash.xxh3_64_intdigest(lines[line_start:line_end])
            if tail_start < tail_end:
                value = xxhash.xxh3_64_intdigest(tails[tail_start:tail_end], value)
            values.append(value)
            line_start, tail_start = line_end, tail_end
        return self.plan.entries.digests(values, KeyKind.SAMPLES)

    def _of_ranges(self) -> ReplicaDigests:
        """One digest of all chosen ranges per tensor."""
        of: dict[int, int] = {}
        for index, digest in zip(self.plan.range_of[self.chosen], self.ranges, strict=True):
            of[index] = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"), of.get(index, 0))
        entries = self.plan.entries.only(np.array([*of], dtype=np.int64))
        return entries.digests([*of.values()], KeyKind.RANGES)


@dataclass(frozen=True, slots=True)
class _ReplicaSums:
    """Sums over tensors on one device: of their elements as integers."""

    entries: _ReplicaColumns
    sums: PendingSums

    @classmethod
    def begin(cls, stream: CopyStream, entries: _ReplicaColumns, view: StateView) -> _ReplicaSums:
        def integers() -> Iterator[torch.Tensor]:
            for number in entries.numbers:
                tensor = view.sources[number].detach()
                yield tensor.view(INTEGERS[tensor.element_size()])

        return cls(entries, PendingSums(stream, lambda: sums_of(integers()), "the ranks"))

    def digests(self) -> ReplicaDigests | None:
        """None if the device had no memory left."""
        values = self.sums.read()
        if values is None:
            return None
        return self.entries.digests([value % (1 << 64) for value in values], KeyKind.SUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReading:
    """What was read at one save."""

    host: _HostSamples | None
    sums: tuple[_ReplicaSums, ...]

    def digests(self) -> ReplicaDigests:
        """Digest what was read; waits for devices. Groups with a missing sum are omitted."""
        parts = [] if self.host is None else self.host.digests()
        incomplete: set[int] = set()
        for sums in self.sums:
            found = sums.digests()
            if found is None:
                incomplete.update(map(int, sums.entries.groups))
            else:
                parts.append(found)
        return ReplicaDigests.join(parts).without(incomplete)
