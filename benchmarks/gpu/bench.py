"""What all rows share: the state in training, the room and the time that are left, and the table so far."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks import report
from benchmarks.bare import give_back_freed
from benchmarks.figures import Finding, Results, over_rounds, ratio
from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.bus import Bus
from benchmarks.gpu.large import LargeWorkload, shape_of
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, run_rounds
from benchmarks.workload import bytes_of
from tierfall.tiers.host_folder import measure_room

BUDGET_S = 210.0
"""For the part, of the four minutes that the command takes at most: the rest is for imports, and what takes longer than
expected."""
ROUNDS_MAX = 3
TRAINING_STEPS = 2
OUTLAST = 1.25
SPARE_BYTES = 1 << 30
"""Of each kind of memory, that the part leaves free."""
IMAGE_ROOM_BYTES = 16 << 20
"""In host memory, for each image: its records, and what is lost between two images."""
GIB = 1 << 30


class Bench:
    """One large state, the references' memory, the time that is left, and what is found."""

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None],
        results: Results,
        accelerator: Accelerator,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = clock
        self._until_s = clock() + BUDGET_S
        self.open_s_per_byte = 0.0
        """What it took to open a Checkpointer and to save once, per byte of host memory."""
        self.plan = plan
        self.say = say
        self.results = results
        self.accelerator = accelerator
        say(f"gpu: a model of {plan.parameters / 1e9:g} billion parameters")
        self.work = LargeWorkload(shape_of(plan.parameters), device=accelerator.device)
        self.work.train(TRAINING_STEPS)
        tensors = self.work.tensors()
        self.bytes = bytes_of(tensors)
        self.bus = Bus(self.bytes, accelerator.device)
        self.choose_batches()
        results.facts.update(
            gpu_parameters=self.work.shape.parameters,
            gpu_state_bytes=self.bytes,
            gpu_tensors=len(tensors),
        )

    # What there is left ------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        return self._until_s - self._now()

    def allows(
        self,
        what: str,
        *,
        images: int = 0,
        memory_bytes: float = 0,
        disk_bytes: float = 0,
        device_bytes: float = 0,
        seconds: float = 0,
    ) -> bool:
        """Whether there is room, and time, for some rows; what is missing is reported, and the rows are left out.

        ``images`` are those of the host tier; what their allocation takes comes on top of ``seconds``.
        """
        if device_bytes:
            give_back_freed()
        host_bytes = self.capacity_bytes(images)
        room = measure_room(self.plan.memory)
        needs = (
            ("of memory of the device", device_bytes, self.accelerator.free_bytes()),
            ("of shared memory", host_bytes, room.free_bytes),
            ("of memory", memory_bytes, room.memory_free_bytes or math.inf),
            ("of disk", disk_bytes, shutil.disk_usage(self.plan.folder).free),
        )
        for of_what, needed, free in needs:
            if needed and needed + SPARE_BYTES > free:
                self.leave_out(
                    f"{what}, which takes {needed / GIB:.1f} GiB {of_what}, of {free / GIB:.1f} GiB that are free "
                    "(fewer --parameters)"
                )
                return False
        return self.has_time(what, seconds + self.open_s_per_byte * host_bytes)

    def has_time(self, what: str, seconds: float) -> bool:
        if seconds < self.left_s:
            return True
        self.leave_out(
            f"{what}, which takes {seconds:.0f} s, of {max(0.0, self.left_s):.0f} s that are left"
        )
        return False

    def leave_out(self, line: str) -> None:
        line = f"gpu: left out: {line}"
        self.say(line)
        self.results.facts.setdefault("gpu_left_out", []).append(line)

    # The table ---------------------------------------------------------------------------------------

    def rounds(
        self,
        title: str,
        contenders: Sequence[Contender],
        *,
        rounds: int = ROUNDS_MAX,
        warms_up: bool = True,
        seconds: float = 0.0,
    ) -> bool:
        """Measure some contenders while there is time for a round, which takes ``seconds``; False if there was none."""
        self.say(f"gpu: {title}")
        wanted = min(rounds, self.plan.rounds)
        found = run_rounds(
            contenders,
            rounds=wanted,
            seed=self.plan.seed,
            say=self.say,
            warms_up=warms_up,
            may_begin=lambda longest_s: max(longest_s, seconds) < self.left_s,
        )
        measured = len(found.get(contenders[0].name, ()))
        if measured < wanted:
            self.leave_out(f"{wanted - measured} of {wanted} rounds, for want of time: {title}")
        self.results.samples.update(found)
        return measured > 0

    def ratio(self, name: str, subject: str, reference: str, target: float | None = None) -> None:
        """Put one series over another into the table."""
        samples = self.results.samples
        found = ratio(name, samples, subject=subject, reference=reference, target=target)
        self.results.ratios.append(found)
        self.say(report.ratio_line(found))

    def finding(
        self, name: str, values: Sequence[float], *, unit: str, target: float | None = None
    ) -> None:
        """Put a figure into the table, with its least and its most."""
        found: Finding = over_rounds(name, values, unit=unit, target=target)
        self.results.findings.append(found)
        self.say(report.finding_line(found))

    # The state ---------------------------------------------------------------------------------------

    def capacity_bytes(self, images: int) -> int:
        return images * (self.bytes + IMAGE_ROOM_BYTES)

    def choose_batches(self) -> None:
        """Give a step as many batches as take a quarter longer than reading the state over the bus."""
        batch_s = self._median_s(self.work.backward)
        self.batches = batches_for(self._median_s(self.bus.to_host), batch_s)
        self.step_s = self.batches * batch_s
        self.results.facts["gpu_batches"] = self.batches

    def _median_s(self, work: Callable[[], None]) -> float:
        took_s = []
        for _ in range(3):
            self.accelerator.synchronize()
            began_s = time.perf_counter()
            work()
            self.accelerator.synchronize()
            took_s.append(time.perf_counter() - began_s)
        return statistics.median(took_s)

    def train_step(self) -> None:
        for _ in range(self.batches):
            self.work.backward()
        self.work.update()


def batches_for(read_s: float, batch_s: float) -> int:
    """Return how many batches of forward and backward outlast so long a copy by a quarter."""
    return max(1, math.ceil(OUTLAST * read_s / batch_s))
