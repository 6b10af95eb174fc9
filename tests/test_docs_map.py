"""The map of the project: every place that ARCHITECTURE.md names exists; every page and public name is listed."""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path

import pytest
import yaml

import tierfall
import tierfall.backends.toolkit
import tierfall.integrations.accelerate
import tierfall.integrations.dcp
import tierfall.policies
from tierfall.cli.output import STYLES
from tierfall.core.types.values import CopyState

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"`((?:core|tiers|backends|policies|tierfall|tests)/[\w/]+\.py)(?::([\w.]+))?`")
ROOMS = ("core", "tiers", "backends", "policies", "tierfall")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
OURS = "https://github.com/tierfall/tierfall/blob/main/"
PICTURES = "https://raw.githubusercontent.com/tierfall/tierfall/main/"
MAPS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/format.md", "docs/glossary.md")


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def places() -> list[tuple[str, str, str]]:
    found = [
        (page, *m.groups()) for page in MAPS for m in PLACE.finditer((ROOT / page).read_text())
    ]
    return sorted({(page, file, name or "") for page, file, name in found})


@pytest.mark.parametrize(("page", "file", "name"), places())
def test_what_a_map_names_exists(page: str, file: str, name: str) -> None:
    scope: ast.AST = tree_of(ROOT / file)
    for part in filter(None, name.split(".")):
        inside = [n for n in ast.iter_child_nodes(scope) if getattr(n, "name", None) == part]
        assert inside, f"{page} names {file}:{name}, where {part} is not"
        scope = inside[0]


def test_the_maps_name_places() -> None:
    assert len(places()) > 60


def test_every_word_of_the_glossary_occurs_in_the_code() -> None:
    table = (ROOT / "docs/glossary.md").read_text().partition("| word |")[2]
    words = re.findall(r"^\| (\w[\w ]*) \|", table, re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    code = "\n".join(p.read_text() for room in ROOMS for p in (ROOT / room).rglob("*.py")).lower()
    assert [w for w in words if not re.search(w.replace(" ", "[ _]?"), code)] == []


def test_the_glossary_has_every_state_of_a_copy_that_commands_print() -> None:
    states = (ROOT / "docs/glossary.md").read_text().partition("| word |")[0]
    shown = {str(state) for state in CopyState} - {CopyState.ABSENT} | set(STYLES) - {"DAMAGED"}
    assert set(re.findall(r"^\| `([^`]+)` \|", states, re.MULTILINE)) == shown | {"-"}


def local_text(page: Path) -> str:
    """Return a page with its addresses of this repository as local links. README has those alone: the package index
    shows it, too."""
    inside = os.path.relpath(ROOT, page.parent) + "/"
    return re.sub(
        rf"\]\({re.escape(OURS)}", f"]({inside}", re.sub(PICTURES, OURS, page.read_text())
    )


def links(page: Path) -> list[Path]:
    found = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", local_text(page))
    return [(page.parent / link).resolve() for link in found]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_page_is_in_the_index() -> None:
    pages = set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/README.md"}
    assert pages - set(links(ROOT / "docs/README.md")) == set()


def test_links_of_the_readme_are_looked_up_here() -> None:
    assert {ROOT / "docs/README.md", ROOT / "examples/train.py"} < set(links(ROOT / "README.md"))


@pytest.mark.parametrize("verb", ["demo", "test-quick", "test"])
def test_the_readme_names_each_make_verb_on_a_line_of_its_own(verb: str) -> None:
    """``.ci/run`` runs the command that the README names for the tests; a newcomer copies a line."""
    line = rf"^(\$ )?make {verb}( +#.*)?$"
    assert re.search(line, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


PAGES = [
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
    *(page for page in (*MAPS, "README.md", "CHANGELOG.md") if not page.startswith("docs/")),
]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    assert [link for link in links(ROOT / page) if not link.exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_into_a_page_leads_to_a_heading(page: str) -> None:
    path = ROOT / page
    found = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", local_text(path))
    assert [
        f"{name}#{anchor}"
        for name, anchor in found
        if anchor not in anchors((path.parent / name) if name else path)
    ] == []


@pytest.mark.parametrize("page", [page for page in PAGES if "decisions/0" not in page])
def test_a_page_begins_with_for_whom_it_is(page: str) -> None:
    first = re.sub(r"^# .*\n+", "", (ROOT / page).read_text()).partition("\n")[0]
    assert page == "CHANGELOG.md" or re.match(r"For .*\w", first), first


def test_the_navigation_is_the_index() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    sections = {
        title: pages for item in nav if isinstance(item, dict) for title, pages in item.items()
    }
    index = (ROOT / "docs/README.md").read_text()
    parts = re.split(r"^## ", index, flags=re.MULTILINE)[1:]
    for part in parts:
        title = re.split(r"[:\n]", part)[0]
        named = re.findall(r"\]\(([^)#]+)\)", part)
        paths = [str((ROOT / "docs" / n).resolve().relative_to(ROOT)) for n in named]
        assert sections[title] == [p for p in paths if p != "README.md"], title


def test_the_reference_has_every_public_name() -> None:
    named = set(re.findall(r"^::: (\S+)", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    for module in (tierfall, tierfall.integrations.dcp, tierfall.integrations.accelerate):
        public = {f"{module.__name__}.{name}" for name in module.__all__}
        public -= {f"tierfall.{name}" for name in tierfall.errors.__all__}  # one page of all
        assert public - named == set()
    assert {tierfall.policies.__name__, tierfall.backends.toolkit.__name__} <= named


NOT_OURS = {
    "Py_buffer",
    "cudaGetLastError",
    "flock",
    "record_stream",
    "Gb",
    "swap_tensors",
    "keep_vars",
} | {
    *("get_optimizer_state_dict", "layer", "load_from_checkpoint"),
}
"""Names of torch, Python and the system, and an example."""


def test_every_name_that_a_docstring_quotes_is_there() -> None:
    """A module, class or function that was renamed is renamed where it is spoken of."""
    paths = [p for room in ROOMS for p in (ROOT / room).rglob("*.py") if p.resolve() == p]
    known = {
        part for path in paths for part in path.relative_to(ROOT).with_suffix("").parts
    } | NOT_OURS
    quoted: list[tuple[Path, str]] = []
    for path in paths:
        lines = path.read_text().splitlines()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
                names = re.findall(r"``([A-Za-z_][\w.]*)(?:\(\))?``", text)
                quoted += [(path, name) for name in names]
                first, last = node.body[0].lineno, node.body[0].end_lineno
                lines[first - 1 : last] = [""] * (last - first + 1)  # type: ignore[operator]
        known |= set(re.findall(r"\w+", "\n".join(lines)))
    unknown = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in quoted
        if not set(name.split(".")) <= known
    ]
    assert unknown == []
