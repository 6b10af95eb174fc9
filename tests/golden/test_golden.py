"""Checkpoints of every released format are read bit for bit, checked, and continued."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contents
import pytest
import torch
from safetensors.torch import load_file

import tierfall
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.format.documents import FORMAT
from tierfall.ops.reader import resolve_path
from tierfall.tiers.stored import StoredTier

HERE = Path(__file__).parent
RELEASED = sorted(HERE.glob("format-*"))


@pytest.fixture(params=RELEASED, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


def test_the_present_format_has_a_golden_run() -> None:
    assert HERE / f"format-{FORMAT}" in RELEASED


@pytest.mark.parametrize("step", contents.STEPS)
def test_a_golden_checkpoint_loads_bit_for_bit(golden: Path, step: int) -> None:
    loaded = tierfall.load(golden, step=step)
    random_state = loaded.pop("rng")
    contents.seed()
    assert torch.equal(random_state["torch"], torch.get_rng_state())
    assert contents.difference(loaded, contents.state_of(step)) is None
    model = loaded["model"]
    assert model["embedding"].data_ptr() == model["head"].data_ptr()


def test_the_newest_golden_step_is_chosen(golden: Path) -> None:
    assert tierfall.load(golden)["values"]["step"] == max(contents.STEPS)


def test_every_golden_file_is_as_it_was_written(golden: Path) -> None:
    place = resolve_path(golden)
    backend = PosixBackend(place.root, read_only=True)
    store = StoredTier(name="disk", run=place.run, backend=backend)
    listings = {store.name: store.list()}
    (listing,) = listings.values()
    assert [copy.id.step for copy in listing.copies] == list(contents.STEPS)
    with CopyVerifier() as verifier:
        for copy in listing.copies:
            checked = verifier.check_stored(store, copy.id)
            assert checked.good, checked.damage
            marks = ("marks/pin",) if copy.id.step == contents.PINNED else ()
            assert checked.foreign == marks, "0.2.0 left a mark there"
    store.close()


def test_any_safetensors_reader_opens_a_golden_shard(golden: Path) -> None:
    for step in contents.STEPS:
        (shard,) = golden.glob(f"*/step-{step:08d}-a*/*.safetensors")
        tensors = load_file(shard)
        expected = contents.state_of(step)["model"]
        for name in ("brain", "complex64", "float8", "empty", "scalar"):
            found = tensors[f"model.{name}"]
            assert found.dtype == expected[name].dtype
            assert contents.difference(found, expected[name]) is None


def test_a_golden_run_is_restored_and_continued(
    golden: Path, tmp_path: Path, make_config: Callable[..., dict[str, Any]]
) -> None:
    copied = tmp_path / "golden"
    shutil.copytree(golden, copied)
    config = make_config(golden={"retain": {"last": 1}}, run=contents.RUN)
    state = contents.state_of(0)
    contents.seed()
    seeded = random.getstate(), torch.get_rng_state()
    random.seed(1)
    torch.manual_seed(1)
    with tierfall.open(config) as ckpt:
        infos = {info.step: info for info in ckpt.checkpoints()}
        ckpt.pin(contents.PINNED)  # the mark of 0.2.0 is not read
        assert infos[contents.PINNED].tags == contents.TAGS
        for step, info in infos.items():
            assert info.metrics == {"loss": 1 / step, "worst": math.inf}
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, report.attempt, report.fallbacks) == (200, 1, ())
        assert contents.difference(state, contents.state_of(200)) is None
        assert random.getstate() == seeded[0]
        assert torch.equal(torch.get_rng_state(), seeded[1])
        ckpt.save(300, contents.state_of(300), block=True)
        ckpt.drain()
    left = sorted(path.parent.name for path in copied.rglob("commit.json"))
    assert left == ["step-00000100-a0001", "step-00000300-a0002"]
    loaded = tierfall.load(copied)
    del loaded["rng"]
    assert contents.difference(loaded, contents.state_of(300)) is None
    assert tierfall.load(golden)["values"]["step"] == 200, "the golden run itself is only read"
