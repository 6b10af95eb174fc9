"""Replicas: what is read at each save of the tensors that several ranks hold, to find those that differ between ranks.

Ranks that were alike when they divided what they write may differ later: between two exchanges of LocalSGD or DiLoCo,
by a flipped bit, or where kernels are not deterministic. So every rank reads the same bytes of those tensors at each
save, both of what it writes and of what it leaves to others:

* of a tensor in host memory LINES lines, evenly spread, at other places for each save; a tensor of no more lines whole;
* whole ranges in host memory, in rotation: as many as take STEP_SHARE of a training step, by the time of a step that
  the ranks knew when they divided;
* on a device the sums of SUMS_BYTES of whole tensors, in rotation. The host does not wait for them.

Ranks that train apart differ in nearly all bytes: the first comparison of lines and sums shows it. A difference in few
places is found within one rotation. Which bytes are read depends only on what all ranks agree on: the ordinal of the
checkpoint, the keys of the tensors, and how much is shared. Two kinds of tensors are compared only when they are
divided: those that fill no span of memory (a slice of a larger tensor), and those on a device whose copies no stream
runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
from tierfall.core.runtime.process_memory import LINE_BYTES, ProcessMemory
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.sampling.samples import Integers, spread
from tierfall.core.state.view import StateView
from tierfall.core.tensors.tensors import INTEGERS

logger = logging.getLogger("tierfall")

LINES = 2
"""Lines of one tensor. A tensor of no more is read whole."""
RANGE_BYTES = 64 << 10
STEP_SHARE = 0.01
DIGESTED_PER_S = 4 << 30
"""Bytes that are taken to be digested in a second."""
RANGES_BYTES = (1 << 20, 256 << 20)
"""The least and the most bytes of ranges at one save, on average."""
SUMS_BYTES = 1 << 30
"""About so many bytes on devices are summed up at one save, and of about SUMS_TENSORS tensors at most."""
SUMS_TENSORS = 64
_PHASES = 1 << 16


class StreamProvider(Protocol):
    """What gives the stream that copies from a device."""

    def of(self, device: torch.device) -> CopyStream | None: ...


class ReplicaPlan:
    """What is read of the tensors of one structure. Used by the thread that saves."""

    def __init__(self, shareable: ReplicatedTensors, division: ReplicaAssignment) -> None:
        view, groups = shareable.view, division.groups_of(shareable.table.keys)
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
        budget = min(most, max(least, int(STEP_SHARE * division.step_s * DIGESTED_PER_S)))
        self._ranges_turns = max(1, -(-division.bytes // budget))
        self._sums_turns = max(
            1, -(-division.bytes // SUMS_BYTES), -(-division.entries // SUMS_TENSORS)
        )
        self._addresses: Integers | None = None
        self._host: _HostSampler | None = None
        self._elsewhere: _Rotation | None = None

    def read(self, view: StateView, ordinal: int, streams: StreamProvider) -> ReplicaReading:
        """Read what is compared of the checkpoint ``ordinal`` of the line; on devices, after all that the caller has
        enqueued there."""
        addresses = np.frombuffer(view.pointers, dtype=np.int64)[self._all.numbers]
        if self._addresses is None or not np.array_equal(self._addresses, addresses):
            self._place(view, addresses)
        sums = () if self._elsewhere is None else self._sum_up(view, ordinal, streams)
        host = None if self._host is None else self._host.read(ordinal)
        return ReplicaReading(host=host, sums=tuple(sums))

    def _place(self, view: StateView, addresses: Integers) -> None:
        on_host = np.array([view.sources[number].is_cpu for number in self._all.numbers])
        read = on_host & self._dense
        elsewhere = ~on_host & self._summed
        self._host = None
        if read.any():
            self._host = _HostSampler(self._all.only(read), addresses[read], self._ranges_turns)
        self._elsewhere = None
        if elsewhere.any():
            self._elsewhere = _Rotation.of(self._all.only(elsewhere), self._sums_turns)
        self._addresses = addresses

    def _sum_up(self, view: StateView, ordinal: int, streams: StreamProvider) -> list[_ReplicaSums]:
        assert self._elsewhere is not None
        chosen = self._elsewhere.at(ordinal)
        devices = [view.sources[number].device for number in chosen.numbers]
        found = []
        for device in dict.fromkeys(devices):
            stream = streams.of(device)
            if stream is not None:
                there = chosen.only(np.array([other == device for other in devices]))
                found.append(_ReplicaSums.begin(stream, there, view))
        return found


@dataclass(frozen=True, slots=True)
class _ReplicaColumns:
    """Columns of some tensors: their numbers in the state, keys, groups and sizes."""

    numbers: Integers
    keys: Keys
    groups: Integers
    sizes: Integers

    def only(self, chosen: NDArray[Any]) -> _ReplicaColumns:
        """Those that a mask or an array of places chooses."""
        return _ReplicaColumns(
            self.numbers[chosen], self.keys[chosen], self.groups[chosen], self.sizes[chosen]
        )

    def digests(self, values: Sequence[int], what: KeyKind) -> ReplicaDigests:
        return ReplicaDigests(
            keys=self.keys | np.uint64(what),
            values=np.array(values, dtype=np.uint64),
            groups=self.groups,
        )


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Entries, each of which has its turn once in so many ``turns``; at each turn some of every group have."""

    entries: _ReplicaColumns
    nth: Integers
    turns: Integers

    @classmethod
    def of(cls, entries: _ReplicaColumns, turns: int) -> _Rotation:
        entries = entries.only(np.lexsort((entries.keys, entries.groups)))
        _, counts = np.unique(entries.groups, return_counts=True)
        group, nth = spread(counts)
        return cls(entries, nth, np.minimum(turns, counts)[group])

    def at(self, ordinal: int) -> _ReplicaColumns:
        return self.entries.only(self.nth % self.turns == ordinal % self.turns)


class _HostSampler:
    """Where lines and ranges of tensors in host memory lie, which is known as long as no tensor moves."""

    def __init__(self, entries: _ReplicaColumns, addresses: Integers, turns: int) -> None:
        order = np.argsort(addresses % LINE_BYTES, kind="stable")  # one memory serves one remainder
        self.entries, addresses = entries.only(order), addresses[order]
        sizes = self.entries.sizes
        self._turns = turns
        self._span = ProcessMemory(int(addresses.min()), int((addresses + sizes).max()))
        whole = sizes // LINE_BYTES
        counts = np.minimum(whole, LINES)
        self.line_ends = np.cumsum(counts)
        of, nth = spread(counts)
        self._first = nth * whole[of] // counts[of]
        self._distances = whole[of] // counts[of]
        self._phases = (self.entries.keys[of] >> np.uint64(48)).astype(np.int64)
        self._lines = self._memories(addresses, of)
        short = whole <= LINES
        tails = np.where(short, sizes % LINE_BYTES, 0)
        self.tail_ends = np.cumsum(tails)
        tail_of, tail_nth = spread(tails)
        starts = (addresses - self._span.low + whole * LINE_BYTES)[tail_of]
        self._tails = torch.from_numpy(starts + tail_nth)
        self.range_of, range_nth = spread(np.where(short, 0, -(-sizes // RANGE_BYTES)))
        at = range_nth * RANGE_BYTES
        self._range_at = (addresses - self._span.low)[self.range_of] + at
        self._range_bytes = np.minimum(sizes[self.range_of] - at, RANGE_BYTES)
        keys = (self.entries.keys[self.range_of] >> np.uint64(2)) % np.uint64(turns)
        self._range_turns = (keys.astype(np.int64) + range_nth) % turns

    def _memories(
        self, addresses: Integers, of: Integers
    ) -> list[tuple[ProcessMemory, slice, Integers]]:
        """Return memories whose lines begin where tensors do, which of all lines lie there, and the tensors' rows."""
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
        places = self._first + phases * self._distances // _PHASES
        with torch.inference_mode(False), torch.no_grad():
            lines = [
                memory.lines.index_select(0, torch.from_numpy(rows + places[which]))
                for memory, which, rows in self._lines
            ]
            tails = self._span.bytes.index_select(0, self._tails)
        chosen = np.flatnonzero(self._range_turns == ordinal % self._turns)
        ends = self._range_at + self._range_bytes
        ranges = [
            xxhash.xxh3_64_intdigest(self._span.view[self._range_at[n] : ends[n]]) for n in chosen
        ]
        return _HostSamples(self, lines, tails, chosen, ranges)


@dataclass(frozen=True, slots=True)
class _HostSamples:
    """What was read in host memory: lines and tails, one tensor after the other, and digests of the ``chosen``
    ranges."""

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
        values, line, tail = [], 0, 0
        ends = zip(self.plan.line_ends * LINE_BYTES, self.plan.tail_ends, strict=True)
        for line_end, tail_end in ends:
            value = xxhash.xxh3_64_intdigest(lines[line:line_end])
            if tail < tail_end:
                value = xxhash.xxh3_64_intdigest(tails[tail:tail_end], value)
            values.append(value)
            line, tail = line_end, tail_end
        return self.plan.entries.digests(values, KeyKind.SAMPLES)

    def _of_ranges(self) -> ReplicaDigests:
        """Digest the ranges of each tensor together."""
        of: dict[int, int] = {}
        for index, digest in zip(self.plan.range_of[self.chosen], self.ranges, strict=True):
            of[index] = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"), of.get(index, 0))
        entries = self.plan.entries.only(np.array([*of], dtype=np.int64))
        return entries.digests([*of.values()], KeyKind.RANGES)


@dataclass(frozen=True, slots=True)
class _ReplicaSums:
    """Sums over tensors on one device: of their elements as integers, modulo 2**64. None: it has no memory left."""

    stream: CopyStream
    entries: _ReplicaColumns
    sums: torch.Tensor | None

    @classmethod
    def begin(cls, stream: CopyStream, entries: _ReplicaColumns, view: StateView) -> _ReplicaSums:
        made: list[torch.Tensor] = []

        def add_up() -> None:
            for number in entries.numbers:
                tensor = view.sources[number].detach()
                bits = INTEGERS[tensor.element_size()]
                made.append(tensor.view(bits).sum(dtype=torch.int64))
            made[:] = [torch.stack(made)]

        try:
            stream.for_caller(add_up)
        except torch.OutOfMemoryError:
            logger.warning("save: the device has no memory left to compare ranks by")
            return cls(stream, entries, None)
        return cls(stream, entries, made[0])

    def digests(self) -> ReplicaDigests | None:
        sums = self.sums
        if sums is None:
            return None
        read: list[list[int]] = []
        self.stream.enqueue(lambda: read.append(sums.cpu().tolist())).wait()
        return self.entries.digests([value % (1 << 64) for value in read[0]], KeyKind.SUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReading:
    """What was read at one save."""

    host: _HostSamples | None
    sums: tuple[_ReplicaSums, ...]

    def digests(self) -> ReplicaDigests:
        """Digest what was read; this waits for devices. Groups of which some sum could not be taken are left out."""
        parts = [] if self.host is None else self.host.digests()
        lost: set[int] = set()
        for sums in self.sums:
            found = sums.digests()
            if found is None:
                lost.update(map(int, sums.entries.groups))
            else:
                parts.append(found)
        return ReplicaDigests.join(parts).without(lost)
