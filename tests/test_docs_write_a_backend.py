"""docs/write-a-backend.md: the backend that it shows passes the conformance suite and works as a tier."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tierfall
from tests.memory_backend import MemoryStore
from tierfall.backends import conformance, register, toolkit
from tierfall.backends.conformance import CHECKS
from tierfall.backends.open import is_remote, open_backend
from tierfall.backends.toolkit import object_store
from tierfall.config import load_config
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import LossClass
from tierfall.setup.tiers import tier_rules

PAGE = Path(__file__).resolve().parents[1] / "docs" / "write-a-backend.md"
TEXT = PAGE.read_text()
EXAMPLE = PAGE.parents[1] / "examples" / "plugins" / "table.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    known = dict(object_store._registered)
    yield
    object_store._registered.clear()
    object_store._registered.update(known)
    sys.modules.pop("table", None)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the page's module in it."""
    (tmp_path / "table.py").write_text(EXAMPLE.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def table(desk: Path) -> Any:
    import table  # type: ignore[import-not-found]

    return table


def test_the_page_shows_the_example_whole() -> None:
    assert [len(blocks(language)) for language in ("python", "yaml", "toml")] == [3, 1, 1]
    assert blocks("python")[0] == EXAMPLE.read_text()
    assert len(EXAMPLE.read_text().splitlines()) <= 46


def test_the_page_names_what_the_toolkit_has() -> None:
    """Each name that the page sets as code and that looks like one of the toolkit's is there."""
    words = set(re.findall(r"`(?:toolkit\.)?([A-Z][A-Za-z]+)`", TEXT))
    assert words - {"None", "AssertionError", "OSError", "ENOSPC", "PermissionError"} <= {
        *toolkit.__all__
    }


def test_all_that_the_toolkit_offers_says_what_it_is_for() -> None:
    members = [(name, getattr(toolkit, name)) for name in toolkit.__all__]
    for name, member in list(members):
        if isinstance(member, type) and not issubclass(member, Exception):
            own = [(f"{name}.{n}", v) for n, v in vars(member).items() if not n.startswith("_")]
            members += [(n, v) for n, v in own if callable(v)]
    undocumented = {name for name, member in members if not (member.__doc__ or "").strip()}
    assert undocumented == set()


@pytest.mark.parametrize("name", CHECKS)
def test_the_pages_backend_keeps_each_promise(
    name: str, table: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[2], str(PAGE), "exec"), names)
    names["test_promise"](name, tmp_path_factory)


def test_it_promises_all_that_a_run_wants(table: Any, tmp_path: Path) -> None:
    """It commits as SQLite has to, so that a power cut takes nothing back."""
    backend = open_backend(f"table://{tmp_path}/x.db")
    assert backend.traits.durable
    assert backend.traits.conditional_create
    statements: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        connect = sqlite3.connect

        def traced(*arguments: Any, **named: Any) -> sqlite3.Connection:
            db = connect(*arguments, **named)
            db.set_trace_callback(statements.append)
            return db

        patch.setattr(sqlite3, "connect", traced)
        with backend.create("run/key") as writer:
            writer.publish()
    (level,) = {s.partition("=")[2] for s in statements if "synchronous" in s}
    assert level in ("FULL", "EXTRA")
    assert statements.index("COMMIT") > statements.index(f"PRAGMA synchronous={level}")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (sqlite3.OperationalError("database or disk is full"), StorageFullError),
        (sqlite3.OperationalError("database is locked"), UnreachableError),
        (sqlite3.DataError("string or blob too big"), BackendError),
    ],
)
def test_a_full_disk_and_a_lock_are_distinguished(
    raised: Exception,
    kind: type[BackendError],
    table: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise raised

    backend = open_backend(f"table://{tmp_path}/x.db")
    monkeypatch.setattr(sqlite3, "connect", fail)
    with pytest.raises(BackendError) as caught:
        backend.stat("run/key")
    assert type(caught.value) is kind


def test_the_pages_way_to_run_the_suite_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "CHECKS", dict(list(CHECKS.items())[:1]))
    exec(compile(blocks("python")[1], str(PAGE), "exec"), {})


def test_a_run_trains_on_it_and_is_loaded_from_it(desk: Path, table: Any, memory: Path) -> None:
    document = yaml.safe_load(blocks("yaml")[0])
    place = document["tiers"][1]
    assert place["url"] == "table:///data/checkpoints.db"
    place["url"] = f"table://{desk}/checkpoints.db"
    place["retain"] = {"last": 1}
    document["tiers"][0]["folder"] = str(memory)
    with tierfall.open(document) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((1000,), float(step))}, block=True)
    loaded = tierfall.load(load_config(document))
    assert torch.equal(loaded["w"], torch.full((1000,), 2.0))
    keys = [stored.key for stored in open_backend(place["url"], read_only=True).scan("x/")]
    assert any("step-00000002-a0001/commit.json" in key for key in keys)
    assert not any("step-00000001" in key for key in keys)


def test_as_an_entry_point_it_is_loaded_when_an_address_asks_for_it(desk: Path) -> None:
    points = desk / "tables-1.0.dist-info"
    points.mkdir()
    (points / "METADATA").write_text("Metadata-Version: 2.1\nName: tables\nVersion: 1.0\n")
    found = re.search(r"^(table) = \"(\w+)\"", blocks("toml")[0], re.MULTILINE)
    assert found is not None
    (points / "entry_points.txt").write_text(f"[tierfall.backends]\n{found[1]} = {found[2]}\n")
    open_backend(f"file://{desk}/folder").close()
    assert "table" not in sys.modules
    assert open_backend(f"table://{desk}/x.db").place == f"table://{desk}/x.db"
    (desk / "table.py").write_text("1 / 0")
    object_store._registered.clear()
    del sys.modules["table"]
    with pytest.raises(
        ConfigError, match=r"^table://: the plug-in table of tables could not be loaded: ZeroDiv"
    ):
        open_backend(f"table://{desk}/x.db")
    (desk / "table.py").write_text("'nothing is registered here, and it is longer'")
    with pytest.raises(ConfigError, match=r"no such protocol; expected @tierfall.backends.regist"):
        open_backend(f"table://{desk}/x.db")


def test_a_place_that_is_not_there_is_not_made_by_looking(desk: Path, table: Any) -> None:
    with pytest.raises(UnreachableError):
        list(open_backend(f"table://{desk}/none.db", read_only=True, sleep=lambda s: None).scan(""))
    assert not (desk / "none.db").exists()
    with pytest.raises(KeyNotFoundError):
        open_backend(f"table://{desk}/new.db").stat("a")


# Registering -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("KV", "'KV' is no protocol; expected one such as kv"),
        ("kv://", "is no protocol"),
        ("s3", "s3:// is built in; choose another protocol"),
        ("file", "file:// is built in"),
    ],
)
def test_a_protocol_that_cannot_be_registered_is_refused(scheme: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register(scheme)


def opener(**output: Any) -> Callable[..., Any]:
    def open_it(url: str, *, options: Any, read_only: bool) -> Any:
        output["calls"].append((url, options, read_only))
        return output.get("answer")

    return open_it


def test_what_it_raises_of_its_own_is_a_backend_error_that_names_it() -> None:
    @register("kv")
    def broken(url: str, *, options: Any, read_only: bool) -> Any:
        raise RuntimeError("out of order")

    with pytest.raises(BackendError, match=r"^open kv://: its backend failed: RuntimeError\('out"):
        open_backend("kv://place")


class Undecided(MemoryStore):
    durable = "yes"  # type: ignore[assignment]


class Short(MemoryStore):
    def put(self, key: str, data: memoryview) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("it", r"^open kv://: str is no ObjectStore; derive the class from it \(docs/write-a-back"),
        (Undecided(), "Undecided does not set durable; expected durable = True or"),
        (Short(), r"Short.put: its parameters are \(.*\); expected \(key, data, if_absent\)"),
    ],
)
def test_what_is_no_store_is_refused_with_what_it_lacks(answer: Any, message: str) -> None:
    register("kv")(opener(calls=[], answer=answer))
    with pytest.raises(ConfigError, match=message):
        open_backend("kv://place")


def test_a_store_that_lacks_a_method_is_refused_where_it_is_registered() -> None:
    class Half(toolkit.ObjectStore):
        def get(self, key: str, start: int, end: int) -> tuple[bytes, int] | None: ...

        def delete(self, key: str) -> None: ...

    with pytest.raises(
        ConfigError, match=r"^register: kv://: .*Half lacks list, put; an ObjectStore has get"
    ):
        register("kv")(Half)


def test_only_what_is_reported_to_be_remote_survives_the_site() -> None:
    register("here")(opener(calls=[]))
    register("there", remote=True)(opener(calls=[]))
    host = {"name": "host", "kind": "host"}
    stored = [{"name": s, "kind": "object", "url": f"{s}://place"} for s in ("here", "there")]
    rules = tier_rules(load_config({"run": "x", "tiers": [host, *stored]}))
    assert [tier.survives for tier in rules[1:]] == [LossClass.PROCESS, LossClass.SITE]
    assert [is_remote(f"{s}://x") for s in ("here", "there", "s3", "ftp")] == [
        *(False, True, True, False),
    ]
