"""What checkpoints cost a training run on saturated cores: whole runs, with and without, in interleaved pairs.

A run is ten real steps of a small GPT at torch's own number of threads, timed until its last save is durable. The
reference saves as cheaply as a program could: one copy into a ready buffer on the training thread, one thread that
writes it around the page cache while training goes on, and the next save waits for that thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

from benchmarks import bare
from benchmarks.figures import Results, over_rounds, paired
from benchmarks.peers import registry
from benchmarks.peers.dcp import DcpThread
from benchmarks.peers.files import Safetensors, TorchSave
from benchmarks.peers.measure import place_of
from benchmarks.peers.ours import Bare, Tierfall
from benchmarks.peers.system import Place, System
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, run_rounds
from benchmarks.stalls import measure_stalls
from benchmarks.workload import Workload, bytes_of, shape_for
from tierfall.core.runtime.pinned import synchronize

SIZE_BYTES = int(0.33 * 2**30)
STEPS = 10
PAIRS_A_ROUND = 3
PEER_ROUNDS = 3
TARGETS = {1: 1.10, 5: 1.05}
WORDS = {1: "every step", 5: "every 5th step"}
PEERS: tuple[type[System], ...] = (TorchSave, Safetensors, DcpThread)
ALONE = "training.no checkpoint"


def series(system: str, every: int) -> str:
    """Name the series of whole runs of a system that saves in every n-th step."""
    return f"training.{system}, {WORDS[every]}"


def train(work: Workload, system: System | None = None, every: int = 1) -> None:
    """Train for ten steps, saving in the first and in every n-th after it; return when all is durable."""
    for step in range(STEPS):
        work.backward()
        if system is None:
            work.update()
            continue
        with system.updating():
            work.update()
        if step % every == 0:
            system.save()
            if system.saves_in_place:
                system.wait()
    if system is not None:
        system.wait()
    synchronize()  # the steps behind the last save count too


class Training:
    """One model that all runs train on, and the systems that save it."""

    def __init__(self, plan: Plan, say: Callable[[str], None], results: Results) -> None:
        self._plan = plan
        self._say = say
        self._results = results
        self._work = Workload(shape_for(min(plan.size_bytes, SIZE_BYTES)), device=plan.device)
        self._work.train(2)
        self._direct = bare.direct_works(plan.folder, plan.file_system)
        results.facts["training_state_bytes"] = bytes_of(self._work.tensors())
        results.facts["training_parameters"] = self._work.shape.parameters

    def run(self) -> None:
        opened: list[System] = []
        try:
            ours = Tierfall(self._work, self._place(Tierfall))
            opened += [ours, Bare(self._work, self._place(Bare))]
            self._first_saves(opened)
            self._pairs(opened)
            measure_stalls(self._plan, self._say, self._results, ours)
            if "peers" in self._plan.only:
                opened += [p(self._work, self._place(p)) for p in self._chosen()]
                self._first_saves(opened[2:])
                self._peers(opened[2:])
        finally:
            for each in opened:
                each.close()
                shutil.rmtree(each.place.folder)

    def _chosen(self) -> list[type[System]]:
        return [peer for peer in registry.chosen(self._plan.systems) if peer in PEERS]

    def _place(self, system: type[System]) -> Place:
        return place_of(self._plan, f"training-{system.__name__}", direct=self._direct)

    def _first_saves(self, systems: list[System]) -> None:
        """They take the memory that later saves use, and are part of no run."""
        for system in systems:
            system.save()
            system.wait()

    def _contender(self, system: System, every: int) -> Contender:
        return Contender(
            name=series(system.name, every),
            before=self._work.update,  # a barrier, so that the first save is lazy
            timed=lambda: train(self._work, system, every),
        )

    def _rounds(self, contenders: list[Contender], rounds: int) -> None:
        seed = self._plan.seed
        found = run_rounds(contenders, rounds=rounds, seed=seed, say=self._say)
        self._results.samples.update(found)

    def _pairs(self, systems: list[System]) -> None:
        self._say("training: whole runs, tierfall and a bare copy with one writer thread")
        contenders = [self._contender(each, every) for each in systems for every in TARGETS]
        alone = Contender(name=ALONE, timed=lambda: train(self._work))
        self._rounds([*contenders, alone], PAIRS_A_ROUND * self._plan.rounds)
        samples, findings = self._results.samples, self._results.findings
        for every, target in TARGETS.items():
            subject, reference = (series(each.name, every) for each in systems)
            found = paired(
                f"training, {WORDS[every]}",
                samples,
                subject=subject,
                reference=reference,
                target=target,
            )
            findings.append(found)
        speeds = [STEPS / seconds for seconds in samples[ALONE]]
        findings.append(over_rounds("training, no checkpoint", speeds, unit="steps/s"))

    def _peers(self, systems: list[System]) -> None:
        self._say("training: the same runs, saved by others")
        contenders = [self._contender(each, every) for each in systems for every in TARGETS]
        self._rounds(contenders, min(PEER_ROUNDS, self._plan.rounds))


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure the part ``training`` of a plan."""
    Training(plan, say, results).run()
