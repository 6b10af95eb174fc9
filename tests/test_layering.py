"""The house: each folder of the package imports only folders before it in a list. Read from the sources, not by
importing. The tests of the contract use public names alone."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "policies", "backends", "tiers")
"""They stand at the root, and are linked into the package."""

FOLDERS = (
    "tierfall.core",
    "tierfall.core.types",
    "tierfall.core.format",
    "tierfall.core.tensors",
    "tierfall.policies",
    "tierfall.backends.toolkit",
    "tierfall.backends.conformance",
    "tierfall.backends.object",
    "tierfall.core.runtime",
    "tierfall.core.ranks",
    "tierfall.core.state",
    "tierfall.backends.posix",
    "tierfall.backends.s3",
    "tierfall.backends.fsspec",
    "tierfall.backends",
    "tierfall.core.compression",
    "tierfall.core.image",
    "tierfall.core.load",
    "tierfall.core.sampling",
    "tierfall.core.capture",
    "tierfall.core.copies",
    "tierfall.core.restore",
    "tierfall.core.flush",
    "tierfall.plan",
    "tierfall.tiers",
    "tierfall.config",
    "tierfall.launch",
    "tierfall.telemetry",
    "tierfall.setup",
    "tierfall.ops",
    "tierfall.run",
    "tierfall.export",
    "tierfall.integrations.dcp",
    "tierfall.integrations",
    "tierfall.imports",
    "tierfall.demo",
    "tierfall.cli",
    "tierfall",
)
"""A folder imports those before it. ``import tierfall`` itself is left to the demo and the command line."""

LINES = {
    ("core/types",): 2_075,
    ("core/format",): 1_355,
    ("core/state", "core/tensors"): 3_743,
    ("core/image",): 2_579,
    ("core/runtime",): 2_139,
    ("core/ranks",): 2_200,
    ("core/capture", "core/sampling"): 3_965,
    ("core/restore", "core/load", "core/copies"): 7_589,
    ("core/compression",): 360,
    ("core/flush",): 7_285,
    ("policies",): 2_259,
    ("backends",): 5_759,
    ("tiers",): 4_658,
    ("tierfall/config",): 2_086,
    ("tierfall/launch", "tierfall/run", "tierfall/setup"): 8_115,
    ("tierfall/ops",): 4_456,
    ("tierfall/telemetry",): 1_950,
    ("tierfall/cli",): 4_338,
    ("tierfall/integrations",): 3_520,
    ("tierfall/imports", "tierfall/export"): 2_753,
    ("tierfall/plan",): 1_698,
    ("tierfall/demo",): 620,
    ("tierfall", "core"): 451,
}
"""The budget of each room, in lines; the last one is what no other room has. Lower a figure with the lines that go."""

FRAMEWORKS = {
    "accelerate",
    "deepspeed",
    "lightning",
    "megatron",
    "ray",
    "torchtitan",
    "transformers",
}
MAY_USE_PRIVATE = {
    "tierfall/export/export.py": ["getattr(value, '_untyped_storage', value)"],
    "tierfall/imports/dcp_files.py": ["pickle._Unpickler"],
    "tierfall/integrations/accelerate.py": [
        f"accelerator.{name}"
        for name in ("_custom_objects", "_dataloaders", "_optimizers", "_schedulers", "_models")
    ],
    "tierfall/integrations/lightning.py": ["trainer.fit_loop._data_fetcher"],
    "tierfall/run/checkpointer.py": ["ckpt._opened"],
    "tierfall/launch/launcher.py": ["distributed.distributed_c10d._get_default_store"],
    "tierfall/launch/signal_hub.py": ["os._exit"],
}
"""What else than ``self._name`` these files use. ``ckpt._opened`` is where integrations reach the parts of a
Checkpointer. Lightning, accelerate and pickle have no public names for these; that of torch warns."""

MAY_IMPORT_THE_PACKAGE = (
    "tierfall.integrations",
    "tierfall.demo",
    "tierfall.cli",
    "tierfall",
)

# A policy is a pure function: it does no I/O, reads no clock, holds no state.
IMPURE = {
    *("time", "datetime", "random", "secrets", "os", "io", "pathlib", "shutil", "socket"),
    *("subprocess", "threading", "logging", "torch"),
}


def sources() -> dict[str, Path]:
    """Every module of the package by its full name."""
    found = {}
    for room in (*ROOMS, "tierfall"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.resolve() == path:
                parts = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(parts if room == "tierfall" else ("tierfall", *parts))
                found[name] = path
    return found


SOURCES = sources()
INIT = (ROOT / "tierfall/__init__.py").read_text()
MODULES = {name.removesuffix(".__init__") for name in SOURCES}


def folder_of(module: str) -> str:
    """Return the folder of a module; a package's own ``__init__`` is in it."""
    return module if f"{module}.__init__" in SOURCES else module.rpartition(".")[0]


@functools.cache
def imports_of(source: str, package: str) -> list[str]:
    """Return the full name of everything that a module imports, ``from a import b`` as ``a.b``, wherever in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(
                [*(above if node.level else ()), *([node.module or ""][: 1 if node.module else 0])]
            )
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def imported_folders(source: str, package: str) -> set[str]:
    """Name the folders of the package that a module of ``package`` imports from."""
    found = set()
    for name in imports_of(source, package):
        if name.split(".")[0] != "tierfall":
            continue
        while name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(folder_of(name))
    return found - {package}


def goes_up(folder: str, imported: str) -> bool:
    if imported == "tierfall":
        return folder not in MAY_IMPORT_THE_PACKAGE
    return FOLDERS.index(imported) > FOLDERS.index(folder)


def test_every_folder_has_its_place() -> None:
    assert {name.rpartition(".")[0] for name in SOURCES} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_folders_before_it(folder: str) -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in SOURCES.items()
        if name.rpartition(".")[0] == folder
        for imported in sorted(imported_folders(path.read_text(), folder))
        if goes_up(folder, imported)
    ]
    assert wrong == []


ADAPTERS = {
    name: path
    for name, path in SOURCES.items()
    if name.startswith("tierfall.integrations.") and name.split(".")[2] in FRAMEWORKS
}
"""An adapter is named by its framework."""


def test_every_framework_has_an_adapter() -> None:
    assert {name.split(".")[2] for name in ADAPTERS} >= FRAMEWORKS
    wrong = [
        name
        for name, path in SOURCES.items()
        for imported in imports_of(path.read_text(), name.rpartition(".")[0])
        if imported.split(".")[0] in FRAMEWORKS and name not in ADAPTERS
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_uses_what_a_user_could(name: str) -> None:
    """Names of ``tierfall`` itself, errors, and what the adapters share."""
    public = {f"tierfall.{x}" for x in re.findall(r'^    "(\w+)",$', INIT, re.MULTILINE)}
    wrong = [
        imported
        for imported in imports_of(ADAPTERS[name].read_text(), name.rpartition(".")[0])
        if imported.split(".")[0] == "tierfall" and imported not in {"tierfall", *public}
        if not imported.startswith(("tierfall.errors.", "tierfall.integrations."))
    ]
    assert wrong == []


def private_uses(source: str) -> list[str]:
    """Return each ``x._name`` but those of ``self``, ``cls`` and ``super()``, and each private name that is imported or
    looked up by ``getattr`` and its like."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if is_private(name):
                found.append(ast.unparse(node))
            case ast.ImportFrom(names=names):
                found += [alias.name for alias in names if is_private(alias.name)]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if is_private(name):
                found.append(ast.unparse(node))
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_private_name_of_another_object_is_used() -> None:
    uses = {
        str(path.relative_to(ROOT)): found
        for name, path in SOURCES.items()
        if name.split(".")[1] not in ROOMS and (found := private_uses(path.read_text()))
    }
    assert uses == MAY_USE_PRIVATE


def lines_of_rooms() -> dict[tuple[str, ...], int]:
    """Count the lines of each room; a module belongs to the first one that has its folder."""
    lines = dict.fromkeys(LINES, 0)
    for path in SOURCES.values():
        where = path.relative_to(ROOT)
        room = next(room for room in LINES if any(where.is_relative_to(each) for each in room))
        lines[room] += len(path.read_text().splitlines())
    return lines


def test_no_room_exceeds_its_budget() -> None:
    over = [
        f"{' and '.join(room)}: {lines} lines, and its budget is {LINES[room]}"
        for room, lines in lines_of_rooms().items()
        if lines > LINES[room]
    ]
    assert over == [], (
        "a budget is met by fewer mechanisms; raising one in LINES needs a commit whose message names the promise that "
        "needs it"
    )


def test_policies_are_pure() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in SOURCES.items()
        if name.startswith("tierfall.policies.")
        for imported in imports_of(path.read_text(), "tierfall.policies")
        if imported.split(".")[0] in IMPURE
    ]
    assert wrong == []


def test_no_name_is_imported_by_star() -> None:
    """But the errors, which have one list of names."""
    starred = [
        name
        for name, path in SOURCES.items()
        if any(i.endswith(".*") for i in imports_of(path.read_text(), name.rpartition(".")[0]))
    ]
    assert sorted(starred) == ["tierfall.__init__", "tierfall.errors"]


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "tierfall" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("tierfall.core.types", "import tierfall"),
        ("tierfall.core.types", "from tierfall import Config"),
        (
            "tierfall.core.copies",
            "from tierfall.backends import open\nfrom tierfall.tiers import host",
        ),
        ("tierfall.core", "from .. import tiers"),
        ("tierfall.core.format", "def f():\n    from tierfall.core.image import layout"),
        ("tierfall.core.format", "if TYPE_CHECKING:\n    import tierfall.tiers.host"),
        ("tierfall.tiers", "from tierfall.setup.tiers import open_slot"),
        ("tierfall.setup", "from tierfall.run.checkpointer import Checkpointer"),
    ],
)
def test_an_import_that_goes_up_is_found(folder: str, source: str) -> None:
    assert any(goes_up(folder, imported) for imported in imported_folders(source, folder))


# The contract's tests --------------------------------------------------------------------------------

CONTRACT = sorted((ROOT / "tests" / "contract").rglob("*.py"))
PUBLIC_MODULES = (
    "tierfall.errors",
    "tierfall.policies",
    "tierfall.backends.toolkit",
    "tierfall.integrations.dcp",
)
HELPERS = ("tests.contract", "tests.forked", "tests.object_store", "tests.throttling_proxy")
"""What the contract's tests may import of the other tests: servers and processes."""


@functools.cache
def public_names() -> set[str]:
    """Every name that a test of the contract may import or use."""
    found = {"tierfall", "tierfall.backends", "tierfall.integrations", *PUBLIC_MODULES}
    for module in ("tierfall", *PUBLIC_MODULES):
        exported: list[str] = importlib.import_module(module).__all__
        found |= {f"{module}.{name}" for name in exported}
    on_disk = {"tierfall.values"}  # an entry of an image's metadata (docs/format.md)
    return found | {"tierfall.__version__", "tierfall.__all__"} | on_disk


def internal_uses(source: str) -> Iterator[str]:
    """Give each name of tierfall that is imported, used, or named in a text, and is not public; also in programs that
    are texts. Of other tests, what is not one of the helpers."""
    public = public_names()
    for name in imports_of(source, "tests.contract"):
        if name.split(".")[0] == "tests" and not name.startswith(HELPERS):
            yield name
        if name.split(".")[0] == "tierfall" and name not in public:
            yield name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("tierfall."):
            below = any(f"{name}.".startswith(f"{known}.") for known in public - ROOTS)
            yield from () if below or name in ROOTS else (name,)
        if isinstance(node, ast.Constant) and isinstance(text := node.value, str):
            if re.fullmatch(r"tierfall(\.\w+)+", text) and Path(text).suffix not in (
                ".json",
                ".yaml",
            ):
                yield from {text} - public
            if "import" in text and (program := parsed(text)):
                yield from internal_uses(program)


ROOTS = {"tierfall", "tierfall.backends", "tierfall.integrations"}
"""Packages whose names are public one by one."""


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` of an expression that is no more than that, else an empty text."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if base := dotted(value):
            return f"{base}.{name}"
    return ""


def parsed(text: str) -> str:
    """Return a text without its indentation if it is a program, else an empty one."""
    program = textwrap.dedent(text)
    try:
        ast.parse(program)
    except SyntaxError:
        return ""
    return program


@pytest.mark.parametrize("path", CONTRACT, ids=lambda path: path.stem)
def test_a_test_of_the_contract_uses_public_names_alone(path: Path) -> None:
    """They survive a redesign of everything behind these names."""
    assert sorted(set(internal_uses(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import tierfall.run",
        "from tierfall.core.types.errors import ConfigError",
        "from tierfall import run",
        "def f():\n    from tierfall.errors import TierfallErrors",
        "tierfall.run.open_run",
        "x = tierfall.backends.posix",
        "patch('tierfall.core.runtime.retries.FIRST_S', 1)",
        "CODE = '''\n    import tierfall.cli\n'''",
        "from tests.steps import state_of",
        "from ..steps import state_of",
    ],
)
def test_an_internal_use_is_found(source: str) -> None:
    assert [*internal_uses(source)]
