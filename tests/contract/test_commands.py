"""What all commands share: words, exit codes, one JSON document, which file they read, how a problem is told."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierfall
from tests.contract.kit import Place, files_below, new_place, state_of, tierfall_command, wait_until
from tests.contract.trainer import save

COMMANDS = (
    *("init", "ls", "latest", "runs", "show", "check", "verify", "export", "import", "copy"),
    *("prune", "pin", "unpin", "rm", "forget", "drain", "watch", "schema", "demo"),
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Steps 1 and 2 on two tiers, which the tests only read; step 1 is pinned."""
    with new_place(tmp_path_factory.mktemp("two")) as place:
        place.config(disk={}, far={})
        save(place, 1, 2)
        place.cli("pin", "1")
        yield place


# Words -----------------------------------------------------------------------------------------------


def test_help_lists_the_commands() -> None:
    for words in (["--help"], []):
        answer = tierfall_command(*words)
        text = answer.out + answer.err
        listed = {line.split()[0] for line in text.splitlines() if line.strip()}
        assert listed >= set(COMMANDS)
    text = tierfall_command("show", "-h").out
    assert text == tierfall_command("show", "--what", "--help").out
    assert "--config" in text
    for command in COMMANDS:
        assert not re.search(r"<(str|int|path|list|StepName)", tierfall_command(command, "-h").out)


def test_version_and_schema_are_of_the_package() -> None:
    assert tierfall_command("--version").out == f"tierfall {tierfall.__version__}\n"
    for words in (["schema"], ["schema", "--json"]):
        assert json.loads(tierfall_command(*words).out) == tierfall.Config.model_json_schema()


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["show"], "STEP"),
        (["rm", "1", "--what"], "--what"),
        (["forget", "1", "2"], "argument"),
        (["lss"], "lss"),
        (["ls", "--run"], "--run"),
        (["export", "1", "2", "--to", "out"], "argument"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(words: list[str], about: str) -> None:
    answer = tierfall_command(*words)
    assert (answer.code, answer.out) == (2, "")
    assert about in answer.err
    assert answer.err.startswith("tierfall: ")
    assert answer.err.endswith(" --help\n")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--config", "x.yaml", "ls", "--last", "2"], "tierfall ls --last 2 --config x.yaml"),
        (["-c", "x.yaml", "--json", "show", "4"], "tierfall show 4 -c x.yaml --json"),
    ],
)
def test_an_option_before_the_command_is_refused_with_the_line_that_was_meant(
    words: list[str], meant: str
) -> None:
    answer = tierfall_command(*words)
    assert answer.code == 2
    assert meant in answer.err


def test_a_step_is_a_number_a_number_of_an_attempt_or_latest(two: Place) -> None:
    for step in ("2", "2@1", "latest"):
        assert two.json("show", step)["step"] == 2
    for wrong in ("x", "-1", "1@", "1.5", ""):
        assert "400@7" in two.cli("show", "--", wrong, code=2).err


def test_a_step_that_is_not_there_names_those_that_are(two: Place) -> None:
    for words in (
        *(["show", "7"], ["verify", "7"], ["pin", "7"], ["rm", "7"]),
        *(["export", "7", "--to", "out"], ["copy", "7", "--to", "disk"]),
    ):
        answer = two.cli(*words, code=1)
        assert "1@1, 2@1" in answer.err
        assert (answer.out, answer.err.count("\n")) == ("", 1)


def test_of_several_steps_all_are_looked_up_before_anything_is_done(place: Place) -> None:
    place.config(disk={}, far={"flush": {"every": 9}})
    save(place, 1, 2, 3)
    before = files_below(place.root)
    for words in (["pin"], ["rm"], ["copy", "--to", "far"], ["verify", "--repair"], ["show"]):
        answer = place.cli(words[0], "1", "7", *words[1:], code=1)
        assert "7" in answer.err
        assert answer.out == ""
    assert files_below(place.root) == before
    found = place.json("pin", "1", "3@1")
    assert [(one["step"], one["done"]) for one in found["steps"]] == [(1, ["disk"]), (3, ["disk"])]
    assert [one["step"] for one in place.json("show", "1", "2")["steps"]] == [1, 2]
    assert place.cli("rm", "2").out.startswith("deleted 2@1 on disk")


# JSON, exit codes, colours ----------------------------------------------------------------------------


def test_json_is_all_of_stdout_and_says_whether_it_went_well(two: Place) -> None:
    for words in (["ls"], ["show", "1"], ["verify"], ["prune", "--dry-run"], ["latest"]):
        document = two.json(*words)
        assert (document["ok"], document["problems"], document["run"]) == (True, [], "run")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *((["show", "400"], 1), (["pin", "400"], 1), (["rm", "1"], 1), (["show", "x"], 2)),
        *((["drain", "--deadline", "soon"], 2), (["verify", "--tier", "x"], 2), (["show"], 2)),
        *((["check", "--size", "much"], 2), (["copy", "1", "--to", "host"], 2)),
        (["export", "1", "--to", "out", "--format", "zip"], 2),
        (["ls", "--last", "0"], 2),
        (["watch", "--every", "10ms"], 2),
        (["watch", "--once", "--prometheus", "1"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refusal_is_a_line_and_with_json_a_document_too(
    two: Place, words: list[str], code: int
) -> None:
    answer = two.cli(*words, "--json", code=code)
    (problem,) = answer.document["problems"]
    assert answer.document["ok"] is False
    assert answer.err == f"tierfall: {problem}\n"


def test_a_command_that_is_interrupted_leaves_nothing_and_has_an_exit_code_of_its_own(
    place: Place,
) -> None:
    place.config(disk={}, host={"capacity": "16MiB"})
    save(place, 1, elements=500_000)
    (place.root / "slow").mkdir()
    place.config(disk={}, slow={"bandwidth": "300kB/s"})
    copying = place.begin("copy", "1", "--to", "slow", "--json")
    wait_until(lambda: any((place.root / "slow").rglob("step-*")), "the copy has begun")
    copying.signal(signal.SIGINT)
    answer = copying.end()
    assert (answer.code, answer.document["ok"]) == (130, False)
    assert "interrupted" in answer.err
    assert place.folders("slow") == []
    assert place.json("verify")["ok"]


def test_what_is_piped_has_neither_colours_nor_trailing_spaces_unless_they_are_asked_for(
    two: Place,
) -> None:
    for words in (["ls"], ["show", "1"], ["verify"], ["prune", "--dry-run"], ["watch", "--once"]):
        text = two.cli(*words).out
        assert "\x1b" not in text
        assert "\r" not in text
        assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert "\x1b[" not in two.cli("ls", NO_COLOR="1").out


# Which file, which run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (None, "none.yaml"),
        ("run: [", "none.yaml"),
        ("run: x\ntiers: ./here\nwhat: 1\n", "none.yaml:3: what"),
        ("run: x\ntiers: ./here\nmax_wait: ${env:A_SECRET}\n", "none.yaml:3: max_wait"),
    ],
)
def test_a_wrong_file_is_wrong_usage_names_its_line_and_shows_no_secret(
    tmp_path: Path, text: str | None, place: str
) -> None:
    path = tmp_path / "none.yaml"
    if text is not None:
        path.write_text(text)
    answer = tierfall_command("ls", "-c", str(path), "--json", A_SECRET="hunter2!")
    assert answer.code == 2
    assert not answer.document["ok"]
    assert place in answer.err
    assert "hunter2" not in answer.out + answer.err


def test_another_run_may_be_named(two: Place) -> None:
    assert two.json("ls", "--run", "other")["checkpoints"] == []
    config = json.loads(two.yaml.read_text())
    other = two.root / "other.yaml"
    other.write_text(json.dumps({**config, "run": "other"}))
    answer = tierfall_command("latest", "--run", "run", "-c", str(other))
    assert answer.out == "2@1\n"


def test_a_folder_or_an_address_is_read_without_a_file_and_never_changed(two: Place) -> None:
    before = files_below(two.root / "disk")
    disk = str(two.root / "disk")
    for there in (disk, f"{disk}/run", f"file://{disk}"):
        assert tierfall_command("latest", "--config", there).out == "2@1\n"
    for words in (["ls"], ["show", "2"], ["watch", "--once"], ["verify"], ["runs"]):
        answer = tierfall_command(*words, "--config", disk)
        assert (answer.code, answer.err) == (0, ""), words
    for words in (
        *(["pin", "1"], ["unpin", "1"], ["rm", "1"], ["rm", "--run", "run", "--all"], ["prune"]),
        *(["forget", "disk"], ["drain"], ["copy", "1", "--to", "disk"], ["verify", "--repair"]),
        *(["import", "x", "--as-step", "9"], ["check"]),
    ):
        answer = tierfall_command(*words, "--config", disk)
        assert (answer.code, answer.out) == (2, ""), words
        assert answer.err.count("\n") == 1
    assert files_below(two.root / "disk") == before


def test_of_a_folder_with_several_runs_one_is_named(place: Place) -> None:
    place.config()
    save(place, 1)
    with place.open(run="other") as ckpt:
        ckpt.save(7, state_of(7), block=True)
    disk = str(place.root / "disk")
    answer = tierfall_command("ls", "--config", disk)
    assert answer.code == 2
    assert "other, run" in answer.err
    assert "--run" in answer.err
    assert tierfall_command("latest", "--config", disk, "--run", "other").out == "7@1\n"
    found = json.loads(tierfall_command("runs", "--config", disk, "--json").out)["runs"]
    assert {one["run"] for one in found} == {"other", "run"}


# Completion -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(shell: str) -> None:
    answer = tierfall_command(_TIERFALL_COMPLETE=f"source_{shell}")
    assert f"_TIERFALL_COMPLETE=complete_{shell}" in answer.out


def test_commands_options_and_names_of_tiers_are_completed(two: Place, tmp_path: Path) -> None:
    def offered(line: str, config: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        return tierfall_command(
            _TIERFALL_COMPLETE="complete_bash", **words, TIERFALL_CONFIG=config
        ).out.split()

    named = str(two.yaml)
    assert offered("tierfall wa", named) == ["watch"]
    assert "--config" in offered("tierfall pin --co", named)
    assert offered("tierfall verify --tier ", named) == ["host", "disk", "far"]
    assert offered("tierfall verify --tier ", str(tmp_path / "none")) == []


# A tier that cannot be read ---------------------------------------------------------------------------


def test_a_tier_that_cannot_be_read_is_named_and_the_others_are_shown(place: Place) -> None:
    place.config(disk={}, far={})
    save(place, 1, 2)
    shutil.move(place.root / "far", place.root / "unmounted")
    for words in (
        *(["ls"], ["latest"], ["show", "2"], ["runs"], ["verify"], ["watch", "--once"]),
        ["prune", "--dry-run"],
    ):
        answer = place.cli(*words, "--json", code=1)
        assert f"{place.root / 'far'} is not there" in answer.err, words
        assert "2" in answer.out, words
        assert any("far" in problem for problem in answer.document["problems"]), words
    for words in (["ls"], ["latest"], ["show", "2"]):
        answer = place.cli(*words, code=1)
        assert f"{place.root / 'far'} is not there" in answer.err, words
        assert "2" in answer.out, words
    assert place.ls()["2@1"]["disk"] == "committed"
    assert not (place.root / "far").exists()


def test_a_step_that_an_unread_tier_may_hold_is_not_called_absent(place: Place) -> None:
    place.config(disk={}, far={})
    save(place, 1)
    shutil.move(place.root / "far", place.root / "unmounted")
    for words in (["show", "7"], ["pin", "7"], ["rm", "7"], ["export", "7", "--to", "x"]):
        answer = place.cli(*words, code=1)
        assert "far" in answer.err
        assert "7 is not there" not in answer.err
