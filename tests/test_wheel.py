"""The package as it is installed: every module once, under tierfall/, each imports alone; wheel and sdist save and
restore in an environment of their own; what the package index shows of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import tierfall

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "policies", "backends", "tiers")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in")
SOURCES = (*FILES, "tierfall", *ROOMS, "docs", "examples", "tests", "benchmarks")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
USE_ALL = """
import importlib, pathlib, sys
site = pathlib.Path(sys.argv[1]).resolve()
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name.startswith(f"tierfall.integrations.{error.name}"):  # of a library that is not installed here
            continue
        raise
    assert site in pathlib.Path(module.__file__).resolve().parents, module.__file__
import torch, tierfall
steps, sums = [], []
for start in range(2):
    model = torch.nn.Linear(4, 4)
    with tierfall.open({"run": "x", "tiers": "folder"}) as ckpt:
        report = ckpt.restore({"model": model})
        steps.append(report and report.step)
        sums.append(model.weight.sum().item())
        if report is None:
            ckpt.save(7, {"model": model}, block=True)
assert steps == [None, 7] and sums[0] == sums[1], (steps, sums)
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


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("built") / "sdist")


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


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_package_index_shows_version_authors_and_where_things_are(wheel: Path) -> None:
    shown = metadata(wheel)
    assert shown["Version"] == tierfall.__version__
    assert f"\n## {tierfall.__version__} (" in (ROOT / "CHANGELOG.md").read_text()
    assert shown["Author"] == "the tierfall authors"
    urls = dict(line.split(", ") for line in shown.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Issues", "Changelog"}
    assert {url for url in urls.values() if not url.startswith(urls["Homepage"])} == set()
    assert "Operating System :: POSIX :: Linux" in shown.get_all("Classifier", [])


def test_readme_on_the_package_index_has_no_relative_link(wheel: Path) -> None:
    text = str(metadata(wheel).get_payload())
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not re.match(r"https://|#", link)] == []


def test_sdist_has_the_pictures_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    images = {f"docs/images/{path.name}" for path in (ROOT / "docs" / "images").iterdir()}
    assert {*images, *FILES, "docs/README.md", "examples/train.py"} <= names
    assert [name for name in names if name.startswith(("tests", "benchmarks"))] == []


def test_what_is_installed_in_a_fresh_environment_imports_saves_and_restores(
    tree: Path, wheel: Path, tmp_path: Path
) -> None:
    """Every module imports without the checkout.

    Only tierfall is installed there; what it needs comes from this environment."""
    fresh = tmp_path / "fresh"
    run("-m", "venv", "--without-pip", str(fresh), cwd=tmp_path)
    site = next((fresh / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def in_fresh(*words: str) -> str:
        apart = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TIERFALL"))}
        words = (str(fresh / "bin" / words[0]), *words[1:])
        done = subprocess.run(
            words, cwd=tmp_path, env=apart, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = "-m pip --disable-pip-version-check install --no-deps --no-index --ignore-installed --no-compile"
    in_fresh("python", *pip.split(), "--no-build-isolation", str(wheel))
    assert in_fresh("tierfall", "--version") == f"tierfall {tierfall.__version__}\n"
    names = [
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in files_in_tree(tree)
        if path.endswith(".py") and not path.endswith("__main__.py")
    ]
    assert len(names) > len(ROOMS)
    in_fresh("python", "-c", USE_ALL, str(site), *names)


def test_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    (unpacked,) = (tmp_path / "out").iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert packaged(first.namelist()) == packaged(second.namelist())
        for name in packaged(first.namelist()):
            assert first.read(name) == second.read(name), name
