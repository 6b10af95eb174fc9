"""Drain of the images that several ranks left on one machine, also of incomplete checkpoints and full or forbidden
tiers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import (
    SOON_S,
    Opener,
    close_all,
    kill_all,
    restore_all,
    stop_before_any_flush,
    wait_sealed,
)
from tests.steps import memory_of
from tierfall.backends.posix.backend import PosixBackend
from tierfall.cli.app import app
from tierfall.config import Config
from tierfall.core.format.records import Attempt, Mark
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import FencedError, LockError
from tierfall.core.types.values import CheckpointId
from tierfall.ops.drain import drain
from tierfall.session.leftovers import adopt_slots, images_in
from tierfall.setup.places import run_folder
from tierfall.tiers.host import SealedImage
from tierfall.tiers.stored import StoredTier

FIRST = CheckpointId(1, 1)


@contextmanager
def owned_memory(config: Config, *, first: int = 0) -> Iterator[list[SealedImage]]:
    """Own the slots from ``first`` on, as their ranks' processes would; give their images of the first step."""
    folder = run_folder(config, config.run)
    slots, _ = adopt_slots(folder, first=first, name=config.host.name, run=config.run)
    try:
        yield [image for id, image in images_in(slot.host for slot in slots) if id == FIRST]
    finally:
        for slot in slots:
            slot.close(keep=True)


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    """Two ranks on one node."""
    with network(["a", "a"]) as both:
        yield both


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    made = Opener(tmp_path, ranks)
    made.place_of = {0: 0, 1: 0}
    return made


@pytest.fixture
def left(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Step 1 is sealed in the memory of both ranks, and nowhere else."""
    stop_before_any_flush(opener, monkeypatch)
    return opener


def files_on(folder: Path, tier: str) -> list[str]:
    return sorted(path.name for path in (folder / "0" / tier / "run").glob("step-*/*"))


WHOLE = [
    "commit.json",
    "index.zst",
    *(f"rank-0000{r}-of-00002.{end}" for r in (0, 1) for end in ("json", "safetensors")),
]


def again(folder: Path) -> list[float]:
    """Start the job again, and say what each rank restores."""
    with network(["a", "a"]) as both:
        opener = Opener(folder, both)
        opener.place_of = {0: 0, 1: 0}
        ckpts = opener.all_open()
        states: list[dict[str, Any]] = [{"w": torch.zeros(4), "rng": None} for _ in ckpts]
        restore_all(ckpts, states)
        close_all(ckpts)
    return [float(state["w"][0]) for state in states]


def again_from(folder: Path, tier: str) -> list[float]:
    """Start the job again with the copies of one tier, and say what each rank restores."""
    for path in [p for p in folder.glob("0/*/run") if p.parent.name not in (tier, "memory")]:
        shutil.rmtree(path)
    return again(folder)


def test_all_of_it_is_brought_and_memory_is_given_back(left: Opener, tmp_path: Path) -> None:
    moved: list[tuple[int, int]] = []
    drained = drain(left.config(0), SOON_S, lambda done, total: moved.append((done, total)))
    assert [(owed.checkpoint, owed.tier) for owed in drained.done] == [
        (FIRST, "nvme"),
        (FIRST, "far"),
    ]
    assert (drained.left, drained.problems, drained.memory_kept) == ((), (), False)
    assert files_on(tmp_path, "nvme") == files_on(tmp_path, "far") == WHOLE
    assert moved[-1][0] == moved[-1][1] > 0
    assert not list(tmp_path.rglob("*.arena"))
    assert again(tmp_path) == [0.0, 1.0]


def test_a_packed_tier_gets_packed_parts(left: Opener, tmp_path: Path) -> None:
    config = left.config(0)
    data = config.model_dump(mode="json", exclude_none=True)
    data["tiers"][2]["compress"] = {"codec": "zstd"}
    assert drain(Config.model_validate(data), SOON_S).left == ()
    assert [name for name in files_on(tmp_path, "far") if name.endswith(".safetensors.zst")] == [
        f"rank-0000{r}-of-00002.safetensors.zst" for r in (0, 1)
    ]
    for path in (tmp_path / "0/nvme").rglob("*.safetensors"):
        path.unlink()
    assert again(tmp_path) == [0.0, 1.0]


def test_pins_go_along(left: Opener, tmp_path: Path) -> None:
    with owned_memory(left.config(0)) as memory:
        mark = Mark(name="pin", checkpoint=FIRST, wall_time_s=1.0)
        memory[0].region.add_mark(mark.encode())
    drain(left.config(0), SOON_S)
    assert len(list(tmp_path.glob("0/*/run/step-*/marks/pin"))) == 2


def test_what_not_all_ranks_of_the_machine_had_sealed_is_no_checkpoint(
    left: Opener, tmp_path: Path
) -> None:
    with owned_memory(left.config(0), first=1) as memory:
        for image in memory:
            image.region.release()
    drained = drain(left.config(0), SOON_S)
    assert (drained.done, drained.left, drained.memory_kept) == ((), (), False)
    assert files_on(tmp_path, "nvme") == files_on(tmp_path, "far") == []


def test_a_part_that_may_lie_on_another_machine_is_waited_for_and_memory_is_kept(
    left: Opener, tmp_path: Path
) -> None:
    (memory_of(left.config(0)) / "slot-1.arena").unlink()
    data = left.config(0, max_wait="1s").model_dump(mode="json", exclude_none=True)
    data["tiers"][2]["shared"] = True
    drained = drain(Config.model_validate(data), None)
    assert [owed.tier for owed in drained.left] == ["nvme", "far"]
    assert drained.memory_kept
    (nvme, far) = drained.problems
    assert "whether all nodes see nvme is not known here: set it" in nvme
    assert "1@1 on far: this machine's images are there, other ranks' are not yet" in far
    assert files_on(tmp_path, "far") == [n for n in WHOLE if n.startswith("rank-00000")]
    data["tiers"][1]["shared"] = False
    assert [o.tier for o in drain(Config.model_validate(data), None).done] == ["nvme"]
    assert files_on(tmp_path, "nvme") == [WHOLE[0], *files_on(tmp_path, "far")]


def test_the_machine_that_comes_last_commits_what_all_have_brought(
    left: Opener, tmp_path: Path
) -> None:
    data = left.config(0, max_wait="1s").model_dump(mode="json", exclude_none=True)
    data["tiers"][1]["shared"], data["tiers"][2]["shared"] = False, True
    config = Config.model_validate(data)
    memory, elsewhere = memory_of(config), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (memory / "slot-1.arena").rename(elsewhere / "slot-1.arena")
    assert [owed.tier for owed in drain(config, None).left] == ["far"]
    (memory / "slot-0.arena").rename(elsewhere / "slot-0.arena")
    (elsewhere / "slot-1.arena").rename(memory / "slot-1.arena")
    image = next((tmp_path / "0/far").rglob("rank-00000*.safetensors"))
    brought = image.stat().st_mtime_ns
    last = drain(config, None)
    assert (last.left, last.memory_kept) == ((), False)
    assert files_on(tmp_path, "far") == WHOLE
    (elsewhere / "slot-0.arena").rename(memory / "slot-0.arena")
    again = drain(config, None)
    assert (again.left, again.memory_kept) == ((), False)
    assert image.stat().st_mtime_ns == brought, "nobody wrote it twice"
    assert again_from(tmp_path, "far") == [0.0, 1.0]


def test_a_part_that_only_another_tier_has_is_brought_from_there(
    left: Opener, tmp_path: Path
) -> None:
    data = left.config(0).model_dump(mode="json", exclude_none=True)
    data["tiers"][0]["on_close"] = "keep"
    data["tiers"][1]["shared"] = data["tiers"][2]["shared"] = True
    flush = data["tiers"][2].pop("flush", None)
    data["tiers"][2]["flush"] = {"every": 2}
    assert [owed.tier for owed in drain(Config.model_validate(data), SOON_S).done] == ["nvme"]
    (memory_of(left.config(0)) / "slot-1.arena").unlink()
    data["tiers"][2] |= {"flush": flush or {"every": 1}}
    assert [owed.tier for owed in drain(Config.model_validate(data), SOON_S).done] == ["far"]
    assert files_on(tmp_path, "far") == WHOLE


def test_memory_is_kept_while_a_copy_that_may_have_the_rest_could_not_be_read(
    left: Opener, tmp_path: Path
) -> None:
    data = left.config(0).model_dump(mode="json", exclude_none=True)
    data["tiers"][1]["shared"] = data["tiers"][2]["shared"] = True
    config = Config.model_validate(data)
    data["tiers"][0]["on_close"] = "keep"
    data["tiers"][2]["flush"] = {"every": 2}
    assert [owed.tier for owed in drain(Config.model_validate(data), SOON_S).done] == ["nvme"]
    with owned_memory(config, first=1) as memory:
        for image in memory:
            image.region.release()
    record = next((tmp_path / "0/nvme").rglob("commit.json"))
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    drained = drain(config, SOON_S)
    assert drained.memory_kept
    assert (
        "1@1: 1 of its images are not in memory; what could not be read may" in drained.problems[0]
    )
    record.unlink()
    (tmp_path / "elsewhere").rename(record)
    assert [owed.tier for owed in drain(config, SOON_S).done] == ["far"]


def test_nothing_is_written_where_a_newer_attempt_lives(left: Opener, tmp_path: Path) -> None:
    store = StoredTier(name="far", run="run", backend=PosixBackend(tmp_path / "0/far"))
    store.create_attempt(
        Attempt(run="run", number=2, id="f" * 32, node="elsewhere", pid=1, wall_time_s=1.0)
    )
    store.close()
    with pytest.raises(FencedError, match=r"followed by attempt 2 \(process 1 on elsewhere"):
        drain(left.config(0), SOON_S)
    assert files_on(tmp_path, "nvme") == files_on(tmp_path, "far") == []
    assert len(list(tmp_path.rglob("*.arena"))) == 2


def test_a_deadline_keeps_what_is_left_in_memory(left: Opener, tmp_path: Path) -> None:
    drained = drain(left.config(0), 0.0)
    assert [owed.tier for owed in drained.left] == ["nvme", "far"]
    assert drained.memory_kept
    assert drain(left.config(0), SOON_S).left == ()


def test_a_tier_that_fails_keeps_no_other_from_getting_its_copy(
    left: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if key.endswith(".safetensors") and "nvme" in self.place:
            raise LockError(f"{key}: broken")
        return real(self, key, **options)

    monkeypatch.setattr(PosixBackend, "create", create)
    drained = drain(left.config(0), SOON_S)
    assert [owed.tier for owed in drained.done] == ["far"]
    assert "flush of 1@1 to nvme failed" in drained.problems[0]
    assert drained.memory_kept


def test_room_is_made_as_a_trainer_makes_it(tmp_path: Path, ranks: list[Ranks]) -> None:
    """The tier holds two checkpoints, and the third is in memory alone."""
    opener = Opener(tmp_path, ranks)
    opener.place_of = {0: 0, 1: 0}
    ckpts = opener.all_open(max_wait="20s")
    state = {"w": torch.zeros(40_000), "rng": None}
    for step in (1, 2):
        for handle in [ckpt.save(step, state) for ckpt in ckpts]:
            handle.wait(timeout=SOON_S)
            handle.wait("nvme", timeout=SOON_S)
    size = sum(p.stat().st_size for p in (tmp_path / "0/nvme").glob("run/step-00000001*/*"))
    close_all(ckpts)
    with network(["a", "a"]) as both, pytest.MonkeyPatch.context() as patch:
        opener = Opener(tmp_path, both)
        opener.place_of = {0: 0, 1: 0}
        real = PosixBackend.create

        def create(self: PosixBackend, key: str, **options: Any) -> Any:
            if key.endswith(".safetensors"):
                raise LockError(f"{key}: broken")
            return real(self, key, **options)

        ckpts = opener.all_open()
        on_all([lambda c=c: c.restore(dict(state)) for c in ckpts])  # type: ignore[misc]
        patch.setattr(PosixBackend, "create", create)
        for ckpt in ckpts:
            ckpt.save(3, state).captured(SOON_S)
        wait_sealed(ckpts)
        kill_all(ckpts)
    data = opener.config(0).model_dump(mode="json", exclude_none=True)
    data["tiers"][1]["capacity"] = int(2.5 * size)
    drained = drain(Config.model_validate(data), SOON_S)
    assert drained.left == ()
    steps = sorted(
        p.parent.name[5:13] for p in (tmp_path / "0/nvme").glob("run/step-*/commit.json")
    )
    assert steps == ["00000002", "00000003"]


def command(opener: Opener, *words: str) -> Any:
    path = opener.folder / "tiers.yaml"
    config = opener.config(0).model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(config))
    return CliRunner().invoke(app, [*words, "--config", str(path)])


def test_the_command_says_what_it_did(left: Opener) -> None:
    done = command(left, "drain")
    assert done.exit_code == 0, done.output
    assert "flushed 1@1 to nvme (" in done.output
    assert "run run: 2 of 2 copies made durable" in done.output
    assert "host memory is freed" in done.output
    assert command(left, "drain").output == "run run: nothing is in host memory\n"


def test_a_rank_that_lives_is_left_alone(left: Opener) -> None:
    with owned_memory(left.config(0), first=1):  # as the second rank's process would
        done = command(left, "drain")
    assert done.exit_code == 1
    assert "a trainer owns run 'run'" in done.output


def test_orders_reach_the_memory_of_every_rank_of_the_machine(left: Opener, tmp_path: Path) -> None:
    assert command(left, "pin", "1").exit_code == 0
    with owned_memory(left.config(0)) as memory:
        assert [i.marks for i in memory] == [{"pin"}, {"pin"}]
    assert "1@1 is pinned" in command(left, "rm", "1", "--yes").output
    assert command(left, "unpin", "1").exit_code == 0
    with owned_memory(left.config(0)) as memory:
        assert [i.marks for i in memory] == [set(), set()]
    done = command(left, "rm", "1", "--yes", "--even-the-last")
    assert done.exit_code == 0, done.output
    assert not list(tmp_path.rglob("*.arena"))


def test_an_order_that_a_tier_refuses_leaves_the_memory_of_all_ranks(
    left: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drain_one = left.config(0).model_dump(mode="json", exclude_none=True)
    drain_one["tiers"][0]["on_close"] = "keep"
    drain(Config.model_validate(drain_one), SOON_S)
    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if "marks/tombstone" in key and "nvme" in self.place:
            raise LockError(f"{key}: broken")
        return real(self, key, **options)

    monkeypatch.setattr(PosixBackend, "create", create)
    assert command(left, "rm", "1", "--yes", "--even-the-last").exit_code == 1
    with owned_memory(left.config(0)) as memory:
        assert len(memory) == 2
    assert files_on(tmp_path, "nvme")[:1] == ["commit.json"]


def test_prune_leaves_the_memory_of_all_ranks_alone(left: Opener) -> None:
    done = command(left, "prune")
    assert done.exit_code == 0, done.output
    with owned_memory(left.config(0)) as memory:
        assert len(memory) == 2


def test_copy_does_not_take_one_ranks_memory_for_the_checkpoint(
    left: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = left.config(0).model_dump(mode="json", exclude_none=True)
    data["tiers"][0]["on_close"] = "keep"
    data["tiers"][2]["flush"] = {"every": 2}
    drain(Config.model_validate(data), SOON_S)
    assert files_on(tmp_path, "far") == []
    with owned_memory(left.config(0)) as memory:
        assert len(memory) == 2, "it lies there as well"
    monkeypatch.setattr(left, "config", lambda rank: Config.model_validate(data))
    done = command(left, "copy", "1", "--to", "far")
    assert done.exit_code == 0, done.output
    assert files_on(tmp_path, "far") == WHOLE
