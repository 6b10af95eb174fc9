"""``tag`` and ``untag``: of what is saved already, with and without a trainer; rules go by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Cli

import tierfall
from tests.steps import state_of, steps_on, wait_until

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def tags(cli: Cli) -> dict[int, list[str]]:
    """What ``ls`` shows, by step."""
    return {c["step"]: c["tags"] for c in cli.json("ls")["checkpoints"]}


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved) -> Cli:
    cli = make_cli(disk={}, far={"flush": {"every": 2}})
    saved(cli, [1, 2])
    return cli


def test_a_bad_tag_and_a_step_that_is_not_there_are_refused(cli: Cli) -> None:
    for words in (("tag", "no/folder", "1"), ("untag", "", "1"), ("tag", "x" * 129, "1")):
        assert "is not a usable name; expected at most 128 " in cli(*words, code=2).err
    assert "tag: step 7 is not there" in cli("tag", "release", "1", "7", code=1).err
    assert tags(cli) == {1: [], 2: []}
    answer = cli("tag", "good", "1", "2")
    assert answer.out == "tagged 1@1 on disk\ntagged 2@1 on disk, far\n"
    assert "1@1 has no tag 'god'; its tags: good" in cli("untag", "god", "1", code=1).err
    assert tags(cli) == {1: ["good"], 2: ["good"]}


# Beside a trainer ------------------------------------------------------------------------------------


def test_what_is_tagged_from_outside_is_kept_by_the_rule_of_a_trainer(
    make_cli: MakeCli, tmp_path: Path
) -> None:
    cli = make_cli(disk={"retain": {"last": 1, "tags": ["release"]}}, far={})

    def held() -> list[str]:
        return [id for id, copies in cli.steps().items() if "disk" in copies]

    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        answer = cli("tag", "release", "1")
        assert answer.out.startswith("tagged 1@1 on disk, far: the trainer (process ")
        assert "reads that at its next commit there, and within a minute" in answer.out
        for step in (2, 3):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: held() == ["1@1", "3@1"], "2 has gone")
        assert ckpt.checkpoints()[0].tags == ("release",)
        left = cli.json("untag", "release", "1")["left_to"]
        assert left["pid"] > 0
        ckpt.save(4, state_of(4), block=True)
        wait_until(lambda: held() == ["4@1"], "nothing keeps 1 any more")
        assert steps_on(tmp_path / "far") == [1, 2, 3, 4]
