"""docs/exact-resume.md: its programs run and print what the page shows, and log what it quotes."""

from __future__ import annotations

import gc
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exact-resume.md"
TEXT = PAGE.read_text()
PROGRAMS = {
    name: code
    for name, code in re.findall(
        r"^```python\n# (\w+)\.py\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE
    )
}
SESSIONS: dict[str, list[tuple[list[str], str]]] = {}
for _session in re.findall(r"^```\n(\$ .*?)^```", TEXT, re.DOTALL | re.MULTILINE):
    for _name, _words, _out in re.findall(
        r"^\$ python (\w+)\.py(.*)\n((?:[^$\n].*\n)*)", _session, re.M
    ):
        SESSIONS.setdefault(_name, []).append((_words.split(), _out))
QUOTED = [
    (" ".join(text.split()), name)
    for text, name in zip(
        re.findall(r"^```text\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE),
        ["shuffled", "accumulated"],
        strict=True,
    )
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    gc.collect()  # the DataLoaders of other tests
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tierfall.tiers.host_folder.SHARED_MEMORY", memory)


def run(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    exec(compile(PROGRAMS[name], f"{name}.py", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_the_page_shows(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if name == "stateful":
        warnings.simplefilter("ignore")  # torchdata calls what torch deprecates
    caplog.set_level(logging.WARNING, logger="tierfall")
    for words, shown in SESSIONS[name]:
        run(name, words, monkeypatch)
        assert [
            line.rstrip() for line in capsys.readouterr().out.splitlines()
        ] == shown.splitlines()
    logged = [record.getMessage() for record in caplog.records]
    for text, of in QUOTED:
        assert (text in logged) == (of == name)


def test_every_case_is_played() -> None:
    assert len(PROGRAMS) == TEXT.count("```python") == 4
    assert set(SESSIONS) == set(PROGRAMS)
    assert [len(played) for played in SESSIONS.values()] == [3, 3, 3, 1]
    assert all(shown for played in SESSIONS.values() for _, shown in played)


def test_only_a_loader_that_shuffles_alone_goes_on_with_other_batches() -> None:
    """What the page says follows from what it shows."""
    for name in ("shuffled", "generator", "stateful"):
        (_, whole), (_, stopped), (_, resumed) = SESSIONS[name]
        both = f"{stopped.strip()}  {resumed.strip()}"
        assert (both == whole.strip()) == (name != "shuffled")
