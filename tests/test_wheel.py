"""The installed package has every module once, under tierfall/, and each imports alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "policies", "backends", "tiers")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "tierfall", *ROOMS)
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
IMPORT_ALL = """
import importlib, pathlib, sys
site = pathlib.Path(sys.argv[1]).resolve()
sys.path.insert(0, str(site))
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert site in pathlib.Path(module.__file__).resolve().parents, module.__file__
"""


def run(*arguments: str, cwd: Path) -> str:
    """Run Python apart from this process; its output is the message of a failure."""
    done = subprocess.run(
        [sys.executable, "-I", *arguments], cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, tree: Path, target: Path) -> Path:
    target.mkdir()
    return target / run("-c", BUILD, kind, str(target), cwd=tree).splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("built") / "wheel")


def files_in_tree(tree: Path) -> list[str]:
    """Every file of the package, by the place where it is to be installed."""
    top = [
        path
        for path in (tree / "tierfall").rglob("*")
        if path.relative_to(tree).parts[1] not in ROOMS
    ]
    rooms = [path for room in ROOMS for path in (tree / room).rglob("*")]
    names = [str(path.relative_to(tree)) for path in top if path.is_file()]
    return sorted(
        names + [f"tierfall/{path.relative_to(tree)}" for path in rooms if path.is_file()]
    )


def packaged(names: list[str]) -> list[str]:
    return sorted(name for name in names if ".dist-info/" not in name)


def test_wheel_holds_every_file_once_under_the_package(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = packaged(archive.namelist())
    assert found == files_in_tree(tree)
    assert {"tierfall/py.typed", *(f"tierfall/{room}/__init__.py" for room in ROOMS)} < set(found)


def test_wheel_declares_license_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "Apache License" in texts["LICENSE"]
    assert "tierfall = tierfall.cli:main" in texts["entry_points.txt"]


def test_sdist_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", tree, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    (unpacked,) = (tmp_path / "out").iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert packaged(first.namelist()) == packaged(second.namelist())
        for name in packaged(first.namelist()):
            assert first.read(name) == second.read(name), name


def test_wheel_imports_without_the_checkout(tree: Path, wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names = [
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in files_in_tree(tree)
        if path.endswith(".py") and not path.endswith("__main__.py")
    ]
    assert len(names) > len(ROOMS)
    run("-c", IMPORT_ALL, str(site), *names, cwd=tmp_path)
