"""Imports go down only: core <- policies, backends, tiers <- tierfall. Read from the sources, not by importing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "policies", "backends", "tiers")
# What else of tierfall a room may import, besides itself.
BELOW = {
    "core": (),
    "policies": ("tierfall.core",),
    "backends": ("tierfall.core",),
    "tiers": ("tierfall.core",),
}
# A policy is a pure function: it does no I/O, reads no clock, holds no state.
IMPURE = {
    *(
        "time",
        "datetime",
        "random",
        "secrets",
        "os",
        "io",
        "pathlib",
        "shutil",
        "socket",
        "subprocess",
    ),
    *("threading", "logging", "torch"),
}


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Give the full name of everything that a module imports, ``from a import b`` as ``a.b``."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def forbidden(room: str, imported: str) -> bool:
    """Say whether a room must not import this."""
    if imported.endswith(".*") or (room == "policies" and imported.split(".")[0] in IMPURE):
        return True
    if not within(imported, "tierfall"):
        return False
    return not any(within(imported, allowed) for allowed in (f"tierfall.{room}", *BELOW[room]))


def modules_of(room: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(["tierfall", *parts]).removesuffix(".__init__"), path


def imports_in(path: Path, module: str) -> set[str]:
    found = imports_of(path.read_text(), module, is_package=path.name == "__init__.py")
    return set(found)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down_only(room: str) -> None:
    modules = list(modules_of(room))
    assert modules, f"there is no module in {room}/: this test looks in the wrong place"
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for module, path in modules
        for imported in sorted(imports_in(path, module))
        if forbidden(room, imported)
    ]
    assert wrong == []


def test_top_of_package_imports_no_name_by_star() -> None:
    paths = [path for path in (ROOT / "tierfall").rglob("*.py") if path.resolve() == path]
    assert paths
    starred = [
        str(path.relative_to(ROOT))
        for path in paths
        if any(name.endswith(".*") for name in imports_in(path, "tierfall.x"))
    ]
    assert starred == []


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "tierfall" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "import tierfall"),
        ("core", "from tierfall import Config"),
        ("core", "from tierfall.config import Config"),
        ("core", "from tierfall.backends import posix"),
        ("core", "from .. import tiers"),
        ("core", "from ..tiers.arena import Arena"),
        ("core", "from tierfall.core.errors import *"),
        ("core", "def f():\n    from tierfall.policies import flush"),
        ("core", "if TYPE_CHECKING:\n    import tierfall.tiers.host"),
        ("tiers", "from tierfall.backends.posix import PosixBackend"),
        ("policies", "from tierfall.tiers import arena"),
        ("policies", "import time"),
        ("policies", "from os import path"),
        ("backends", "import tierfall.policies.flush"),
    ],
)
def test_an_import_that_goes_up_is_found(room: str, source: str) -> None:
    found = imports_of(source, f"tierfall.{room}.module", is_package=False)
    assert any(forbidden(room, imported) for imported in found)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "from tierfall.core import names"),
        ("core", "from . import names"),
        ("core", "import time, os, torch"),
        ("tiers", "from tierfall.core.contracts import Backend"),
        ("policies", "import math\nfrom tierfall.core.values import CheckpointId"),
        ("backends", "import tierfallen"),
    ],
)
def test_an_import_that_goes_down_is_allowed(room: str, source: str) -> None:
    found = imports_of(source, f"tierfall.{room}.module", is_package=False)
    assert not any(forbidden(room, imported) for imported in found)


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert list(imports_of("from . import a", "tierfall.core.image", is_package=True)) == [
        "tierfall.core.image.a"
    ]
