"""Host memory against a model, and against SIGKILL."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

from host_help import PAGE, host_in, scratch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests import forked
from tierfall.tiers.host import HostTier
from tierfall.tiers.image_file import Region

CAPACITY = 40 * PAGE

# --- a model ----------------------------------------------------------------------------------------------------------


class HostAgainstModel(RuleBasedStateMachine):
    """Random operations on host memory and on a table of images; ends are played by forgetting what is not sealed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = scratch()
        self.host = self.open()
        self.living: dict[Region, dict[str, Any]] = {}

    def open(self) -> HostTier:
        """Open it without its thread: what that makes meanwhile is no matter of a seed."""
        host = host_in(self.folder, capacity_bytes=CAPACITY)
        host._preparation.close()
        return host

    def teardown(self) -> None:
        self.host.close(keep=False)
        assert os.listdir(self.folder) == []
        shutil.rmtree(self.folder)

    @rule(image=st.integers(1, 12 * PAGE), records=st.integers(0, 2 * PAGE))
    def allocate(self, image: int, records: int) -> None:
        asked = {"image_bytes": image, "records_bytes": records}
        self.host.ensure_capacity(**asked)
        fits = self.host.would_fit(**asked, without=())
        region = self.host.allocate(**asked)
        assert (region is not None) == fits
        if region is None:
            return
        data = random.Random(f"{image} {records} {len(self.living)}").randbytes(image)
        region.image[:] = data
        self.living[region] = {"image": data, "room": records, "view": region.image}

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
        state["noted"] = False
        region.seal(manifest=state["manifest"], commit=state["commit"])

    @precondition(lambda self: any(region.sealed for region in self.living))
    @rule(data=st.data())
    def note(self, data: Any) -> None:
        region = self.some(data, sealed=True)
        region.note_on_peers()
        self.living[region]["noted"] = True

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

    @rule()
    def open_again(self) -> None:
        kept = [state for region, state in self.living.items() if region.sealed]
        self.host.close(keep=True)
        self.host = self.open()
        self.living = {}
        for file in self.host._files:
            assert file.damage is None
            if file.region is not None:
                state = next(s for s in kept if s["image"] == bytes(file.region.image))
                kept.remove(state)
                self.living[file.region] = state | {"view": file.region.image}
        assert not kept

    @invariant()
    def agree(self) -> None:
        taken = [file.room_bytes for file in self.host._files if not file.is_free]
        assert len(taken) == len(self.living)
        assert self.host.free_bytes == CAPACITY - sum(taken) >= 0
        assert sum(file.room_bytes for file in self.host._files) <= CAPACITY
        for region, state in self.living.items():
            assert region.image == state["image"]
            assert state["view"] == state["image"]
            if region.sealed:
                assert region.manifest() == state["manifest"]
                assert region.commit() == state["commit"]
                assert region.on_peers == state["noted"]


TestHostAgainstModel = HostAgainstModel.TestCase
TestHostAgainstModel.settings = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- kills ------------------------------------------------------------------------------------------------------------


def run_killer(folder: Path, *arguments: str) -> dict[str, int]:
    script = Path(__file__).with_name("image_killer.py")
    done = forked.run([str(script), str(folder), *arguments])
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


def test_kill_at_every_store_leaves_exactly_the_sealed_images(folder: Path) -> None:
    counts = run_killer(folder, "points")
    assert counts["points"] > 30
    assert counts["sealed"] > 50


def test_kill_at_random_moments_leaves_exactly_the_sealed_images(folder: Path) -> None:
    counts = run_killer(folder, "random", "40")
    assert counts["kills"] == 40
    assert counts["sealed"] > 40
