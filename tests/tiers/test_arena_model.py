"""The arena against a model, and against SIGKILL."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

from arena_help import EXTENTS, PAGE, RUN, create, scratch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests import forked
from tierfall.tiers.arena.arena import Arena, arena_name
from tierfall.tiers.arena.region import Region

# --- a model ----------------------------------------------------------------------------------------------------------


class ArenaAgainstModel(RuleBasedStateMachine):
    """Random operations on an arena and on a set of pages; kills are played by forgetting what is not sealed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = scratch()
        self.path = self.folder / arena_name(0)
        self.pages = 40
        self.arena = create(self.path, self.pages * PAGE)
        self.living: dict[Region, dict[str, Any]] = {}

    def teardown(self) -> None:
        self.arena.close(keep=False)
        assert os.listdir(self.folder) == []
        shutil.rmtree(self.folder)

    def free_runs(self) -> list[int]:
        taken = {page for state in self.living.values() for page in state["pages"]}
        text = "".join("x" if page in taken else "." for page in range(self.pages))
        return [len(run) for run in text.split("x") if run]

    @rule(image=st.integers(1, 12 * PAGE), records=st.integers(0, 2 * PAGE))
    def allocate(self, image: int, records: int) -> None:
        needed = -(-image // PAGE) + -(-records // PAGE)
        fits = max(self.free_runs(), default=0) >= needed
        region = self.arena.allocate(image_bytes=image, records_bytes=records)
        assert (region is not None) == fits
        if region is None:
            return
        first = (region.extent.start - EXTENTS) // PAGE
        assert region.extent.start == EXTENTS + first * PAGE
        pages = range(first, first + needed)
        assert pages.stop <= self.pages
        assert all(not set(pages) & set(state["pages"]) for state in self.living.values())
        data = random.Random(f"{image} {records} {first}").randbytes(image)
        region.image[:] = data
        self.living[region] = {"pages": pages, "image": data, "room": records, "view": region.image}

    def some(self, data: Any, *, sealed: bool) -> Region:
        fit = [r for r in self.living if r.sealed == sealed and not r.is_discarded]
        return data.draw(st.sampled_from(fit))  # type: ignore[no-any-return]

    @precondition(lambda self: any(not (r.sealed or r.is_discarded) for r in self.living))
    @rule(data=st.data(), share=st.floats(0, 1))
    def seal(self, data: Any, share: float) -> None:
        region = self.some(data, sealed=False)
        state = self.living[region]
        cut = int(state["room"] * share)
        state["manifest"], state["commit"] = b"m" * cut, b"c" * (state["room"] - cut)
        state["marks"] = []
        region.seal(manifest=state["manifest"], commit=state["commit"])

    @precondition(lambda self: any(region.sealed for region in self.living))
    @rule(data=st.data(), mark=st.binary(max_size=40))
    def mark(self, data: Any, mark: bytes) -> None:
        region = self.some(data, sealed=True)
        region.add_mark(mark)
        self.living[region]["marks"].append(mark)

    @precondition(lambda self: any(region.sealed for region in self.living))
    @rule(data=st.data())
    def unseal(self, data: Any) -> None:
        """The room stays taken and the bytes stay as they are, for whoever reads them: ``agree`` looks."""
        self.some(data, sealed=True).unseal()

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        region = data.draw(st.sampled_from(list(self.living)))
        region.release()
        del self.living[region]

    @rule(more=st.integers(0, 16))
    def grow(self, more: int) -> None:
        if self.pages + more <= 120:
            self.pages += more
            self.arena.grow(self.pages * PAGE)

    @rule()
    def attach_again(self) -> None:
        self.arena.close(keep=True)
        self.arena = Arena.attach(self.path, run=RUN)
        assert self.arena.damage == ()
        kept = {state["pages"].start: state for old, state in self.living.items() if old._seal}
        self.living = {}
        for region in self.arena.regions():
            state = kept.pop((region.extent.start - EXTENTS) // PAGE)
            self.living[region] = state | {"view": region.image}
        assert not kept

    @invariant()
    def agree(self) -> None:
        runs = self.free_runs()
        assert self.arena.capacity_bytes == self.pages * PAGE
        assert self.arena.free_bytes == sum(runs) * PAGE
        assert self.arena.largest_free_bytes == max(runs, default=0) * PAGE
        assert set(self.arena.regions()) == set(self.living)
        for region, state in self.living.items():
            assert region.image == state["image"]
            assert state["view"] == state["image"]
            if region.sealed:
                assert region.manifest() == state["manifest"]
                assert region.commit() == state["commit"]
                assert region.marks() == tuple(state["marks"])


TestArenaAgainstModel = ArenaAgainstModel.TestCase
TestArenaAgainstModel.settings = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- kills ------------------------------------------------------------------------------------------------------------


def run_killer(folder: Path, *arguments: str) -> dict[str, int]:
    script = Path(__file__).with_name("arena_killer.py")
    done = forked.run([str(script), str(folder), *arguments])
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


def test_kill_at_every_store_leaves_exactly_the_sealed_images(folder: Path) -> None:
    counts = run_killer(folder, "points")
    assert counts["points"] > 50
    assert counts["sealed"] > 50


def test_kill_at_random_moments_leaves_exactly_the_sealed_images(folder: Path) -> None:
    counts = run_killer(folder, "random", "40")
    assert counts["kills"] == 40
    assert counts["sealed"] > 40
