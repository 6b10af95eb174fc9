"""Every command names a tier that could not be read, and never takes it for an empty one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_kit import Cli, Trainer, flip

import tierfall
from tests.steps import files_below, state_of
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import AccessDeniedError

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
Train = Callable[[Cli], Trainer]
Silence = Callable[[Path], None]
NAMED = (["show", "3"], ["pin", "3"], ["unpin", "3"], ["rm", "3"], ["verify", "3"])
ORDERS = (["prune"], ["pin", "2"], ["unpin", "2"], ["rm", "1"])


@pytest.fixture(params=["missing", "denied"])
def silence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Silence:
    """``silence(root)``: keep a tier from answering."""
    scan = PosixBackend.scan
    denied: set[str] = set()

    def refuse(self: PosixBackend, prefix: str) -> Iterator[StoredObject]:
        if self.place in denied:
            raise AccessDeniedError(f"list {prefix!r} in {self.place}: is not there for you")
        return scan(self, prefix)

    def hush(root: Path) -> None:
        if request.param == "missing":
            shutil.move(root, root.with_name(f"{root.name}-unmounted"))
        else:
            denied.add(str(root))

    monkeypatch.setattr(PosixBackend, "scan", refuse)
    return hush


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> Cli:
    """Steps 1 and 2 on both tiers, step 3 on the far one alone."""
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2, 3])
    run = tmp_path / "disk" / "run"
    shutil.rmtree(run / "step-00000003-a0001")
    (run / "latest").write_text("step-00000002-a0001\n")
    return cli


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_a_step_that_an_unread_tier_may_hold_is_not_called_absent(
    cli: Cli, tmp_path: Path, silence: Silence, words: list[str]
) -> None:
    silence(tmp_path / "far")
    answer = cli(*words, "--json", code=1)
    unread, absent = answer.document["problems"]
    assert answer.err == f"tierfall: {unread}\ntierfall: {absent}\n"
    assert unread.startswith("tier far could not be read: ")
    assert "is not there" in unread
    assert "step 3 is on none of the tiers that could be read, and may be on far" in absent
    assert "the newest that could be seen: 1@1, 2@1" in absent
    assert not answer.document["ok"]


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_where_no_tier_could_be_read_each_of_them_is_named(
    cli: Cli, tmp_path: Path, silence: Silence, words: list[str]
) -> None:
    for name in ("disk", "far"):
        silence(tmp_path / name)
    first, second, absent = cli(*words, code=1).err.splitlines()
    assert first.startswith("tierfall: tier disk could not be read: ")
    assert second.startswith("tierfall: tier far could not be read: ")
    assert "may be on disk, far; the newest that could be seen: none" in absent


def test_a_step_of_a_line_left_behind_does_not_hide_an_unread_tier(
    make_cli: MakeCli, tmp_path: Path, silence: Silence
) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 2}})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        ckpt.pin(3)
        ckpt.drain()
    with tierfall.open(cli.config) as ckpt:
        ckpt.restore(state_of(0), step=1)
        ckpt.save(2, state_of(2), block=True)
    silence(tmp_path / "far")
    unread, absent = cli("show", "3", code=1).err.splitlines()
    assert "tier far could not be read" in unread
    assert "may be on far; there is 3@1 (abandoned): name it with its attempt" in absent


def test_only_the_tier_that_was_asked_for_counts(
    cli: Cli, tmp_path: Path, silence: Silence
) -> None:
    silence(tmp_path / "far")
    (absent,) = cli("verify", "3", "--tier", "disk", code=1).err.splitlines()
    assert "verify: step 3 is not there; the newest that are: 1@1, 2@1" in absent
    unread, absent = cli("verify", "3", "--tier", "far", code=1).err.splitlines()
    assert "tier far could not be read" in unread
    assert "may be on far" in absent


def test_an_unread_tier_is_not_reported_to_be_owed_anything(
    cli: Cli, tmp_path: Path, silence: Silence
) -> None:
    silence(tmp_path / "far")
    answer = cli("show", "2", code=1)
    assert "still owed to" not in answer.out
    assert cli.json("show", "2", code=1)["owed"] == []


# What export and copy take ---------------------------------------------------------------------------


@pytest.fixture
def gone_back(make_cli: MakeCli) -> Cli:
    """Step 2 of attempt 1 on both tiers, and of attempt 2, which went back to step 1, on disk alone, as far as any tier
    tells."""
    cli = make_cli(disk={}, far={"flush": {"every": 2}}, third={"flush": {"every": 1000}})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    with tierfall.open(cli.config) as ckpt:
        ckpt.restore(state_of(0), step=1)
        ckpt.pin(2, attempt=1)
        ckpt.save(2, state_of(2), block=True)
        ckpt.drain()
    run = cli.folder / "far" / "run"
    shutil.rmtree(run / "step-00000002-a0002")
    (run / "latest").write_text("step-00000002-a0001\n")
    (lineage,) = (run / "lineage").glob("a0002-*")
    lineage.rename(cli.folder / lineage.name)
    return cli


@pytest.mark.parametrize(
    "words", [["export", "{}", "--to", "OUT"], ["copy", "{}", "--to", "third"]], ids=" ".join
)
def test_no_step_of_an_older_line_is_taken_while_a_newer_one_may_lie_on_an_unread_tier(
    gone_back: Cli, tmp_path: Path, silence: Silence, words: list[str]
) -> None:
    def named(step: str) -> list[str]:
        return [word.replace("{}", step).replace("OUT", str(tmp_path / "out")) for word in words]

    silence(tmp_path / "disk")
    before = files_below(tmp_path)
    unread, refused = gone_back(*named("2"), code=1).err.splitlines()
    assert "tier disk could not be read: " in unread
    assert "may have saved step 2 too, on disk: if 2@1 is meant, name it 2@1" in refused
    assert files_below(tmp_path) == before
    document = gone_back.json(*named("2@1"), code=1)
    assert (document["step"], document["attempt"]) == (2, 1)
    (problem,) = document["problems"]
    assert problem.startswith("tier disk could not be read: ")
    if words[0] == "export":
        gone_back(*named("2"), "--tier", "far", "--force")


def test_a_step_that_is_known_to_be_left_behind_is_taken_by_its_full_name_alone(
    gone_back: Cli, tmp_path: Path, silence: Silence
) -> None:
    """Far knows how attempt 2 began, though it holds nothing of it any more."""
    (lineage,) = tmp_path.glob("a0002-*")
    lineage.rename(tmp_path / "far" / "run" / "lineage" / lineage.name)
    silence(tmp_path / "disk")
    refused = gone_back("export", "2", "--to", str(tmp_path / "out"), code=1).err
    assert "2@1 (abandoned): name it with its attempt" in refused


def test_a_step_that_no_newer_attempt_can_have_is_taken_by_its_number(
    gone_back: Cli, tmp_path: Path, silence: Silence
) -> None:
    """Attempt 2 began at step 1, as far says once it has a step of it."""
    shutil.copytree(
        tmp_path / "disk/run/step-00000002-a0002", tmp_path / "far/run/step-00000003-a0002"
    )
    shutil.copytree(
        tmp_path / "disk/run/step-00000001-a0001", tmp_path / "far/run/step-00000001-a0001"
    )
    silence(tmp_path / "disk")
    assert "name it 1@1" in gone_back("export", "1", "--to", str(tmp_path / "a"), code=1).err
    far = tmp_path / "far/run"
    (far / "step-00000003-a0002").rename(far / "step-00000002-a0002")
    document = gone_back.json("export", "1", "--to", str(tmp_path / "b"), code=1)
    assert (document["step"], document["attempt"], len(document["problems"])) == (1, 1, 1)


def test_what_is_damaged_where_it_was_read_may_be_good_where_it_was_not(
    cli: Cli, tmp_path: Path, silence: Silence
) -> None:
    image = tmp_path / "disk/run/step-00000002-a0001/rank-00000-of-00001.safetensors"
    flip(image, -1)
    silence(tmp_path / "far")
    unread, damaged = cli("export", "2", "--to", str(tmp_path / "out"), code=1).err.splitlines()
    assert unread.startswith("tierfall: tier far could not be read: ")
    assert "damaged in every copy" in damaged
    assert damaged.endswith("; far could not be read and may hold a good copy")
    assert cli("export", "2", "--to", str(image), code=1).err.count("\n") == 2, "other refusals too"


# Folders that are not there --------------------------------------------------------------------------


@pytest.mark.parametrize("words", ORDERS, ids=" ".join)
def test_an_order_makes_no_folder_that_is_not_there(
    cli: Cli, tmp_path: Path, memory: Path, words: list[str]
) -> None:
    """What was made would from then on look like a tier that holds nothing."""
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    shutil.rmtree(memory / "run", ignore_errors=True)
    before = files_below(tmp_path)
    answer = cli(*words, code=1)
    assert answer.out == ""
    assert f"a folder is missing (tier far: {tmp_path / 'far'})" in answer.err
    assert answer.err.count("\n") == 1
    assert files_below(tmp_path) == before
    assert not (tmp_path / "far").exists()
    assert list(memory.iterdir()) == []


def test_prune_of_a_run_whose_only_tier_is_not_there_makes_nothing(
    make_cli: MakeCli, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli(host={"folder": str(memory / "deeper")})
    assert cli("prune").err == ""
    assert not (tmp_path / "disk").exists()
    assert not (memory / "deeper").exists()


def test_beside_a_trainer_an_order_makes_no_folder_either(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    trainer = train(cli)
    trainer.tell("save 1")
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    for command in ("pin", "unpin"):
        answer = cli(command, "1", code=1)
        assert answer.out.startswith(f"{command}ned 1@1 on disk: the trainer")
        assert f"{command} 1@1: tier far: " in answer.err
        assert not (tmp_path / "far").exists()


def left_in_memory(make_cli: MakeCli, train: Train) -> Cli:
    """Leave step 1 of a killed trainer in host memory alone."""
    cli = make_cli(disk={"flush": {"every": 2}}, max_wait="5s")
    trainer = train(cli)
    trainer.tell("capture 1")
    trainer.kill()
    return cli


def test_drain_makes_no_folder_that_is_not_there_and_flushes_to_the_other_tiers(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = left_in_memory(make_cli, train)
    cli.configure(make_cli(disk={}, far={}, max_wait="5s").config)
    answer = cli("drain", code=1)
    assert "a folder is missing (tier far: " in answer.err
    assert "flushed 1@1 to disk" in answer.out
    assert not (tmp_path / "far").exists()


def test_drain_without_any_folder_keeps_memory_until_one_is_there(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = left_in_memory(make_cli, train)
    cli.configure(make_cli(disk={}, max_wait="5s").config)
    shutil.move(tmp_path / "disk", tmp_path / "unmounted")
    assert "host memory is kept" in cli("drain", code=1).out
    assert not (tmp_path / "disk").exists()
    shutil.move(tmp_path / "unmounted", tmp_path / "disk")
    assert cli.json("drain")["left"] == []
