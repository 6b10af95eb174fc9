"""docs/which-tiers.md: each of its files is valid, and declares what its text and its table say. So are the files of
all other pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tierfall.config import Config, load_config
from tierfall.core.types.values import TierKind

PAGE = Path(__file__).resolve().parents[1] / "docs" / "which-tiers.md"
TEXT = PAGE.read_text()
FILES = dict(re.findall(r"^```yaml\n# ([\w-]+)\.yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
NAMES = {"SLURM_JOB_NAME": "7b", "JOB_NAME": "gpt"}
KINDS = {
    "laptop": ["host", "file"],
    "one-node": ["host", "file", "file"],
    "slurm": ["host", "file", "file"],
    "kubernetes": ["host", "object"],
    "spot": ["host", "object"],
}


def settings(name: str, folder: Path) -> Config:
    (folder / "tiers.yaml").write_text(FILES[name])
    return load_config(folder / "tiers.yaml", environ=NAMES)


def test_there_is_a_file_for_each_machine() -> None:
    assert set(FILES) == set(KINDS)
    assert len(re.findall(r"^## ", TEXT, re.MULTILINE)) == len(FILES) == TEXT.count("```yaml")


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_valid_and_has_the_chain_of_the_table(name: str, tmp_path: Path) -> None:
    assert [tier.kind.value for tier in settings(name, tmp_path).chain] == KINDS[name]


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"laptop"}))
def test_all_but_the_laptop_survive_the_loss_of_the_node(name: str, tmp_path: Path) -> None:
    last = settings(name, tmp_path).stored[-1]
    assert last.shared or last.kind is TierKind.OBJECT


@pytest.mark.parametrize("page", [page.name for page in sorted(PAGE.parent.glob("*.md"))])
def test_each_file_that_a_page_shows_is_valid(page: str) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (PAGE.parent / page).read_text(), re.DOTALL | re.M)
    environ = {name: "x" for block in blocks for name in re.findall(r"\$\{env:(\w+)\}", block)}
    for block in blocks:
        shown = yaml.safe_load(block)
        if isinstance(shown, dict) and "tiers" in shown and "plugins" not in shown:
            load_config({"run": "x", **shown}, environ=environ)
