"""The benchmark of the adapters: its arithmetic, and each loop once at a tiny size. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("deepspeed")

from benchmarks import adapters, loops
from benchmarks.figures import Results
from tests.tiny_plan import tiny_plan


def test_each_loop_is_measured_with_and_without_saves(tmp_path: Path) -> None:
    results, lines = Results(), []
    adapters.measure(tiny_plan(tmp_path, "adapters"), lines.append, results)
    names = {finding.name for finding in results.findings}
    for framework, (_, ways) in loops.LOOPS.items():
        assert f"{framework}: a step without saves" in names
        for way in ways[1:]:
            assert f"{framework}: {way}: a save holds the loop" in names
            assert f"{framework}: {way}: a save makes the loop longer" in names
    assert not any("left out" in line for line in lines)
    assert not list((tmp_path / "files").iterdir()), "the loops leave nothing"
