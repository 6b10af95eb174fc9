"""A killed run goes on as if nothing had been: bit for bit in one process, and as the demo and the example show it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

import tierfall
from tierfall.core.image import random_state
from tierfall.demo import chain as chains
from tierfall.demo import command, story
from tierfall.demo.data import ShuffledLoader, english_text
from tierfall.demo.events import EventReader, EventWriter, Started, StepDone
from tierfall.demo.model import Shape
from tierfall.demo.process import DemoError, Trainer
from tierfall.demo.training import SMALL, Plan, Training, make_deterministic, train

ROOT = Path(__file__).resolve().parent.parent
TINY = Plan(
    shape=Shape(width=16, layers=1, heads=2, context=16),
    batch=2,
    slow_bandwidth="100MB/s",
    chunk="64KiB",
)
STEPS, STOP, EVERY = 20, 13, 4
BATCHES_AN_EPOCH = 7
TEXT = english_text()[: (TINY.shape.context + 1) * TINY.batch * BATCHES_AN_EPOCH]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let a test fix threads and kernels, and put everything back."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def chain_in(folder: Path) -> dict[str, Any]:
    return {
        "run": "exact",
        "interval": {"every": EVERY},
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(folder / "memory")},
            {"name": "disk", "kind": "file", "path": str(folder / "disk")},
        ],
    }


def losses(last: int, config: dict[str, Any] | None = None) -> dict[int, str]:
    """Start a training as a new process would, from what the tiers hold; return each step's exact loss."""
    make_deterministic()
    training = Training(TINY, TEXT, steps=STEPS)
    found: dict[int, str] = {}

    def told(step: int, loss: float, seconds: float) -> None:
        found[step] = loss.hex()

    if config is None:
        train(training, first=1, last=last, ckpt=None, told=told)
        return found
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(training.state)
        first = report.step + 1 if report else 1
        train(training, first=first, last=last, ckpt=ckpt, told=told)
    return found


# The continuation, bit for bit ------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_interrupted_training_goes_on_with_the_same_losses_to_the_last_bit(tmp_path: Path) -> None:
    undisturbed = losses(STEPS)
    before = losses(STOP, chain_in(tmp_path))
    after = losses(STEPS, chain_in(tmp_path))
    restored = STOP - STOP % EVERY
    assert list(after) == list(range(restored + 1, STEPS + 1))
    assert before == {step: undisturbed[step] for step in before}
    assert after == {step: undisturbed[step] for step in after}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (random_state, "apply"),
        (ShuffledLoader, "load_state_dict"),
        (torch.optim.lr_scheduler.OneCycleLR, "load_state_dict"),
    ],
    ids=["random state", "loader", "scheduler"],
)
def test_losses_differ_where_a_part_is_not_restored(
    owner: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail."""
    undisturbed = losses(STEPS)
    losses(STOP, chain_in(tmp_path))
    monkeypatch.setattr(owner, method, lambda *state: None)
    after = losses(STEPS, chain_in(tmp_path))
    assert after
    assert after != {step: undisturbed[step] for step in after}


def test_loader_continues_over_the_end_of_an_epoch() -> None:
    def make() -> ShuffledLoader:
        return ShuffledLoader(TEXT, context=TINY.shape.context, batch=TINY.batch, seed=3)

    loader, expected = make(), []
    for _ in range(3 * BATCHES_AN_EPOCH):
        expected.append(loader.next_batch())
    for taken in (0, 1, BATCHES_AN_EPOCH, BATCHES_AN_EPOCH + 2):
        loader, other = make(), make()
        for _ in range(taken):
            loader.next_batch()
        other.load_state_dict(loader.state_dict())
        for batch in expected[taken:]:
            assert torch.equal(other.next_batch(), batch)
    epochs = torch.stack(expected).view(3, -1)
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0].sort().values, epochs[1].sort().values)


# The demo, as a user runs it --------------------------------------------------------------------------


def raw_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def raw_losses(path: Path) -> dict[int, str]:
    return {e["step"]: e["loss"] for e in raw_events(path) if e["kind"] == "StepDone"}


def memory_folder(folder: Path) -> Path:
    config = yaml.safe_load((folder / "tiers.yaml").read_text())
    return Path(config["tiers"][0]["folder"])


def test_demo_kills_restores_compares_and_falls_to_the_next_tier(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    done = subprocess.run(
        [sys.executable, "-m", "tierfall.demo", str(folder), "--small", "--steps", "96", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document, told = json.loads(done.stdout), done.stderr
    killed = re.search(r"(\d+)% of checkpoint (\d+) has arrived on slow\. SIGKILL", told)
    assert killed, told
    share, cut = map(int, killed.groups())
    assert 0 < share < 100
    assert re.search(rf"^  {cut} .* cut off$", told, re.MULTILINE)
    assert re.search(r"rank-00000-of-00001\.safetensors: .* from host", told)
    assert f"the dead process still owes checkpoint {cut}@1 to slow" in told
    assert f"finished by adoption: checkpoint {cut}@1 is committed on slow" in told
    assert "equal to the last bit" in told
    fall = told.partition("is flipped")[2]
    assert re.search(r"passed over: chunk \d+ of 96@2 on fast", fall)
    assert "from slow" in fall
    assert "the same bytes as were saved" in fall
    assert document["ok"]
    assert document["steps"] == 96
    assert document["killed"]["copying"] == f"{cut}@1"
    assert {tier for _, tier, _ in document["restored"]["sources"]} == {"host"}
    assert "slow" in {tier for _, tier, _ in document["beside_damage"]["sources"]}
    assert document["equal_losses"]["after_the_restore"] == 96 - document["restored"]["step"]
    check_files(folder)


def check_files(folder: Path) -> None:
    """Check what the demo said against what its processes wrote."""
    first, again = (raw_losses(folder / "logs" / f"{name}.jsonl") for name in ("first", "again"))
    undisturbed = raw_losses(folder / "logs" / "undisturbed.jsonl")
    assert sorted(undisturbed) == list(range(1, 97))
    assert max(first) < 96 == max(again)
    assert first.items() | again.items() == undisturbed.items()
    assert raw_events(folder / "logs" / "first.jsonl")[-1]["kind"] == "StepDone"
    assert not memory_folder(folder).exists()
    assert (folder / "slow" / "demo" / "step-00000096-a0002" / "commit.json").exists()


def test_demo_that_fails_says_why_exits_with_1_and_leaves_no_memory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(stage: story.Stage) -> None:
        stage.chain.memory.mkdir()
        raise DemoError("a loss differs")

    monkeypatch.setattr(story, "train_and_kill", fail)
    with pytest.raises(typer.Exit) as exited:
        command.demo(tmp_path / "kept", steps=12, small=True)
    assert exited.value.exit_code == 1
    assert "The demo failed: a loss differs" in capsys.readouterr().out
    assert not memory_folder(tmp_path / "kept").exists()


def test_demo_refuses_a_folder_with_something_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(typer.Exit) as exited:
        command.demo(tmp_path)
    assert exited.value.exit_code == 1
    assert "not an empty folder" in capsys.readouterr().out
    assert (tmp_path / "mine").read_text() == "precious"


def test_demo_says_in_one_line_that_its_folder_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(typer.Exit) as exited:
            command.demo(folder, small=True)
        assert exited.value.exit_code == 1
        return " ".join(capsys.readouterr().out.split())

    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "file").touch()
    said = refused(tmp_path / "file" / "x")
    assert said.startswith("The demo failed: ")
    assert said.endswith("x cannot be used (Not a directory): name another folder")
    assert "cannot be used" in refused(Path("~nobody-of-that-name/x"))
    monkeypatch.setattr(command, "write_chain", full)
    assert "cannot be used (Read-only file system)" in refused(tmp_path / "new")


def step_done(step: int, loss: float) -> StepDone:
    return StepDone(step=step, loss=loss.hex(), seconds=0.1, time_s=1.0, tiers={}, totals=None)


def test_one_loss_that_differs_in_its_last_bit_is_found() -> None:
    steps = [step_done(1, 2.5), step_done(2, 2.25)]
    expected = {1: (2.5).hex(), 2: (2.25).hex()}
    assert story.check_equal(steps, expected, "after") == 2
    expected[2] = (2.2500000000000004).hex()
    with pytest.raises(DemoError, match=r"the loss of step 2, after, is 0x1\.2"):
        story.check_equal(steps, expected, "after")


# Its parts --------------------------------------------------------------------------------------------


def test_chain_lies_on_disk_where_shared_memory_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    chain = chains.write_chain(tmp_path, SMALL, every=2, image_bytes=1000)
    assert chain.memory == tmp_path / "memory"
    assert chain.config.host.folder == chain.memory


def test_chain_is_read_back_with_any_folder_name(tmp_path: Path) -> None:
    folder = tmp_path / 'odd: name #1 "x" \\'
    folder.mkdir()
    config = chains.write_chain(folder, SMALL, every=2, image_bytes=1000).config
    assert [tier.path for tier in config.files] == [folder / "fast", folder / "slow"]


def test_flipped_byte_is_another_one_and_the_only_one(tmp_path: Path) -> None:
    shard = tmp_path / "fast/demo/step-00000003-a0001/rank-00000-of-00001.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(bytes(range(9)))
    chain = chains.Chain(folder=tmp_path, memory=tmp_path, config_path=tmp_path)
    path, offset = chains.flip_byte(chain, "fast", chains.parse_checkpoint("3@1"))
    differing = [i for i, value in enumerate(shard.read_bytes()) if value != i]
    assert (path, [offset]) == (shard, differing)


def test_event_reader_leaves_half_a_line_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events"
    events = [step_done(1, 0.5), Started(parameters=3, restored=None, fingerprint="x")]
    with EventWriter(path) as writer:
        for event in events:
            writer.write(event)
    written = path.read_bytes()
    path.write_bytes(written[:-5])
    reader = EventReader(path)
    assert reader.read() == events[:1]
    path.write_bytes(written)
    assert reader.read() == events[1:]
    assert reader.read() == []


def test_trainer_that_ends_badly_is_quoted(tmp_path: Path) -> None:
    with (
        Trainer("it", folder=tmp_path, config=None, steps=-1, small=True) as trainer,
        pytest.raises(DemoError, match=r"(?s)'it' ended with code 2.*--steps is -1"),
    ):
        list(trainer.follow())


# The example ------------------------------------------------------------------------------------------


def example_until(config: Path, folder: Path, step: int) -> tuple[str, dict[int, str]]:
    """Run examples/train.py up to a step, SIGKILL it there, and return what it said first, and its losses."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--steps", "1000000"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"step {step} "):
                break
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    found = [re.fullmatch(r"step (\d+) loss (\S+)\n", line) for line in lines]
    return lines[0] if lines else "", {int(m[1]): m[2] for m in found if m}


def test_example_is_killed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "examples" / "tiers.yaml").read_text())
    settings["tiers"][0]["folder"] = str(tmp_path / "memory")
    config = tmp_path / "tiers.yaml"
    config.write_text(yaml.safe_dump(settings))
    _, before = example_until(config, tmp_path, 25)
    said, after = example_until(config, tmp_path, max(before) + 5)
    restored = re.match(r"restored step (\d+) from host", said)
    assert restored, said
    assert int(restored[1]) >= 20
    assert min(after) == int(restored[1]) + 1
    again = before.keys() & after.keys()
    assert {step: after[step] for step in again} == {step: before[step] for step in again}
    assert max(after) > max(before)
