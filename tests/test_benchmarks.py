"""The benchmarks: their arithmetic, the state that they measure, and a tiny run. No time is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.benchmarks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the package

from benchmarks import figures, machine, many, report  # noqa: E402
from benchmarks.figures import Results  # noqa: E402
from tests import forked  # noqa: E402

SAMPLES = {"a": [3.0, 1.0, 2.0], "b": [1.0, 1.0, 4.0]}


# Arithmetic ------------------------------------------------------------------------------------------


def test_ratio_divides_medians_and_spreads_over_rounds() -> None:
    found = figures.ratio("x", SAMPLES, subject="a", reference="b", target=2.0)
    assert (found.value, found.low, found.high) == (2.0, 0.5, 3.0)
    assert found.met is True


def results(*, target: float = 2.0, extra_mib: int = 0, direct: tuple[bool, bool]) -> Results:
    found = Results(samples=dict(SAMPLES), memory={"extra_bytes": extra_mib << 20})
    found.ratios.append(figures.ratio("x", SAMPLES, subject="a", reference="b", target=target))
    found.direct = {"reference": direct[0], "tierfall": direct[1]}
    return found


@pytest.mark.parametrize(
    ("found", "report_only", "code"),
    [
        (results(direct=(True, True)), False, 0),
        (results(direct=(True, True), extra_mib=100), False, 0),
        (results(direct=(True, True), extra_mib=101), False, 1),
        (results(direct=(True, True), target=1.5), False, 1),
        (results(direct=(True, True), target=1.5), True, 0),
        (results(direct=(False, False)), False, 0),
        (results(direct=(False, True)), False, 0),
        (results(direct=(True, False)), False, 2),
        (results(direct=(True, False)), True, 2),
    ],
)
def test_exit_code_says_what_was_missed(found: Results, report_only: bool, code: int) -> None:
    assert figures.exit_code(found, report_only=report_only) == code


# A tiny run ------------------------------------------------------------------------------------------


def benchmark(folder: Path, *more: str) -> tuple[str, dict[str, Any]]:
    where = ["--dir", str(folder / "files"), "--json", str(folder / "found.json")]
    small = ["--size-gib", "0.01", "--rounds", "2", "--report-only"]
    done = forked.run(["-m", "benchmarks", *where, *small, *more], cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "found.json").read_text())


def test_tiny_run_measures_the_chain_and_leaves_nothing(tmp_path: Path) -> None:
    chain = ("durable", "host", "cold", "warm", "memory", "objects", "throttled")
    text, found = benchmark(tmp_path, "--only", *chain)
    targets = {each["name"]: each["target"] for each in found["ratios"]}
    packed = {name for name in targets if name.startswith(("zstd (ratio", "planes (ratio"))}
    assert len(packed) == 2
    assert all(targets[name] < 1 for name in packed), "packing has to pay"
    others = {n: t for n, t in targets.items() if t is not None and n not in packed}
    assert others == {
        "durable on the file tier": 1.0,
        "save() blocks, lazily": 0.02,
        "restore from the host tier": 1.1,
        "cold restore from the file tier": 1.1,
        "warm restore from the file tier": 1.9,
        "durable on the store, over the best put": pytest.approx(1 / 0.95),
        "download, verified, over ranges": pytest.approx(1 / 0.95),
    }
    for each in found["ratios"]:
        assert each["name"] in text
        assert len(found["samples_s"][each["subject"]]) == 2
        assert each["value"] > 0
    assert found["memory"]["extra_bytes"] == max(found["memory"]["phases"].values())
    assert set(found["direct_io"]) == {"reference", "tierfall"}
    assert found["machine"]["torch"] == torch.__version__
    assert found["facts"]["tensors"] == 688
    assert list((tmp_path / "files").iterdir()) == []


def test_table_says_plainly_what_is_missed_and_what_cannot_be_compared() -> None:
    found = results(target=1.5, direct=(True, False))
    found.facts.update(state_bytes=1, tensors=1, parameters=1, load_before=0.0, load_after=0.0)
    found.facts.update(first_save_s=1.0, first_save_blocked_s=1.0)
    about = machine.describe(ROOT, ROOT, "cpu")
    text = report.table(found, about)
    assert "MISSED" in text
    assert "NOT COMPARABLE" in text


@pytest.mark.parametrize(
    ("medium", "of_open", "of_restore"),
    [
        (many.Medium.OBJECTS, 0, 0),  # records of old checkpoints are read later
        (many.Medium.FILES, 2, 1),  # the folder of each is listed, and searched for leftovers
    ],
)
def test_what_a_commit_asks_of_a_tier_does_not_grow_with_what_lies_there(
    medium: many.Medium, of_open: int, of_restore: int
) -> None:
    few, more = many.measure(4, 0.0, medium), many.measure(60, 0.0, medium)
    # a commit that takes long looks once more whether a newer start exists
    assert abs(more["commit"].requests - few["commit"].requests) <= 1
    grown = more["restore"].requests - few["restore"].requests
    assert grown <= of_restore * 56 + 2  # one listing, and what is restored
    assert more["open"].requests - few["open"].requests <= of_open * 56 + 2


def test_what_was_left_behind_costs_the_tier_as_much_for_each() -> None:
    """Rarely, a look more is made where a deletion ends while marks are read: the least of a few runs has none."""
    few, more = (
        min(many.measure_left_behind(count).requests for _ in range(3)) for count in (4, 24)
    )
    assert 18 <= (more - few) / 20 <= 20
