"""The other systems in the benchmarks, and the longer parts: their assumptions are checked, and each runs once at a
tiny size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import (
    bare,
    figures,
    machine,
    peer_memory,
    plots,
    report,
    side_by_side,
    small,
    stalls,
    training,
    workload,
)
from benchmarks.figures import Results
from benchmarks.peers import measure, memory, system
from benchmarks.peers.dcp import Dcp, DcpThread
from benchmarks.peers.files import Safetensors, TorchSave
from benchmarks.peers.ours import Bare, Tierfall
from benchmarks.plan import Plan
from benchmarks.workload import Workload, shape_for
from tests.tiny_plan import tiny_plan

pytestmark = pytest.mark.benchmarks

IN_PROCESS = [Tierfall, Bare, TorchSave, Safetensors, Dcp, DcpThread]
alone = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of two layers: no figure is judged here."""
    monkeypatch.setattr(workload, "LAYERS", 2)


# Arithmetic ------------------------------------------------------------------------------------------


def test_paired_ratio_is_the_median_of_quotients_within_its_interval() -> None:
    samples = {"a": [2.0, 9.0, 3.0, 8.0, 1.0], "b": [1.0, 9.0, 2.0, 8.0, 1.0]}
    found = figures.paired("x", samples, subject="a", reference="b", target=1.0)
    assert (found.value, found.met, found.interval) == (1.0, True, "95 %")
    assert found.low == 1.0
    assert found.high in (1.5, 2.0)
    assert figures.paired("x", samples, subject="a", reference="b", target=0.99).met is False


# Each system -----------------------------------------------------------------------------------------


@pytest.fixture
def work() -> Workload:
    found = Workload(shape_for(4 << 20))
    found.train(1)
    return found


@pytest.fixture
def place(tmp_path: Path) -> system.Place:
    found = system.Place(folder=tmp_path / "files", memory=tmp_path / "memory", direct=False)
    found.folder.mkdir()
    found.memory.mkdir()
    return found


@pytest.fixture(params=IN_PROCESS, ids=lambda each: each.key)
def opened(
    request: pytest.FixtureRequest, work: Workload, place: system.Place
) -> Iterator[system.System]:
    if not request.param.installed():
        pytest.skip(f"{request.param.name} is not installed")
    found: system.System = request.param(work, place)
    yield found
    found.close()


@alone
def test_what_is_loaded_is_what_was_saved_last(opened: system.System) -> None:
    work = opened.work
    for _ in range(2):
        work.update()
        opened.save()
    opened.wait()
    saved = bare.Buffer(work.tensors(), touched=True)
    saved.take(work.tensors())
    work.spoil()
    opened.begin_cold()
    opened.load_cold()
    assert saved.holds(work.tensors())
    work.spoil()
    opened.load()
    assert saved.holds(work.tensors())


# Runs ------------------------------------------------------------------------------------------------


def plan(folder: Path, *keys: str) -> Plan:
    return tiny_plan(folder, "training", "peers", size_bytes=3 << 20, systems=frozenset(keys))


def tell(found: Results) -> str:
    found.facts.update(load_before=0.0, load_after=0.0)
    return report.table(found, machine.describe(Path.cwd(), Path.cwd(), "cpu"))


@pytest.mark.torture
def test_systems_are_measured_beside_each_other(tmp_path: Path) -> None:
    found = Results()
    measure.measure(plan(tmp_path, "tierfall", "torch"), lambda line: None, found)
    text = tell(found)
    for key in ("tierfall", "torch"):
        for what in side_by_side.COLUMNS:
            assert len(found.samples[f"peers.{key}.{what}"]) == 1
        step = f"peers.{key}.step"
        held, call = found.samples[f"{step}/held"], found.samples[f"{step}/call"]
        assert call <= held <= found.samples[step]
        assert found.facts["systems"][key] in text
    taken = found.facts["systems_memory"]
    assert {key: set(kinds) for key, kinds in taken.items()} == {
        key: {memory.ANONYMOUS, memory.SHARED} for key in ("tierfall", "torch")
    }
    damage = found.facts["systems_damage"]["tierfall"]
    assert damage == {"outcome": "refused", "error": "RestoreError"}
    assert "refused RestoreError" in text
    if plots.available():
        drawn = plots.write(found, tmp_path / "found.json")
        assert [path.name for path in drawn] == ["found.systems.png"]
        assert drawn[0].read_bytes().startswith(b"\x89PNG")


def test_training_runs_and_stalls_are_measured_in_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "STEPS", 2)
    monkeypatch.setattr(stalls, "WINDOW_S", 0.02)
    found = Results()
    training.measure(plan(tmp_path, "tierfall", "torch"), lambda line: None, found)
    rows = {each.name: each for each in found.findings}
    assert {name: row.target for name, row in rows.items() if row.target} == {
        "training, every step": 1.10,
        "training, every 5th step": 1.05,
        "p99 of stalls grows by": 10.0,
    }
    assert rows["training, every step"].interval == "95 %"
    pairs = {name: len(values) for name, values in found.samples.items() if "torch" not in name}
    assert len(pairs) == 5
    assert set(pairs.values()) == {training.PAIRS_A_ROUND}
    assert len(found.samples["training.torch.save, every step"]) == 1
    text = tell(found)
    assert all(name in text for name in rows)
    assert all(name.partition(".")[2] in text for name in found.samples)
    assert list((tmp_path / "files").iterdir()) == []


def test_small_tensors_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "COUNT", 50)
    found = Results()
    small.measure(plan(tmp_path), lambda line: None, found)
    assert [(each.name, each.target) for each in found.ratios] == [
        ("10,000 tensors of 10 KiB, durable", 1.6)
    ]
    blocked = found.samples["small.tierfall/blocked"][0]
    assert found.findings[0].value == pytest.approx(blocked / 50 * 1e6)
    assert found.findings[0].unit == "us"


@pytest.mark.torture
def test_peer_memory_is_measured_between_two_processes(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, "peer_memory", size_bytes=48 << 20)
    found, said = Results(), list[str]()
    peer_memory.measure(plan, said.append, found)
    expected: list[tuple[str, str, float | None]] = [
        ("peer memory: a copy, over gloo", "", 1.25),
        ("peer memory: beyond images and copies", "MiB", 64.0),
    ]
    expected.append(("peer memory, beside training: a copy", "s", None))
    if "peer memory, beside training: no copy was as long as a few steps" not in said:
        expected.append(("peer memory, beside training: steps beside a copy", "x", 1.05))
    assert [(each.name, each.unit, each.target) for each in found.findings] == expected
    assert all(each.value > 0 for each in found.findings if each.unit != "MiB")
    assert found.findings[1].met, "a node takes a copy more than it may"
    assert {name: len(values) for name, values in found.samples.items()} == {
        peer_memory.GLOO: peer_memory.PAIRS_A_ROUND,
        peer_memory.COPY: peer_memory.PAIRS_A_ROUND,
    }
    assert list(plan.memory.iterdir()) == []
