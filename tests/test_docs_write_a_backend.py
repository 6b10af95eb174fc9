"""docs/write-a-backend.md: the backend that it shows keeps every promise, and is a tier, as it stands there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tierfall
from tierfall.backends import register, registry
from tierfall.backends.conformance.suite import CHECKS, check_promise
from tierfall.backends.open import is_remote, open_backend
from tierfall.config import load_config
from tierfall.core.types.errors import BackendError, ConfigError, KeyNotFoundError, UnreachableError
from tierfall.core.types.values import Driver, LossClass
from tierfall.setup.tiers import tier_rules

PAGE = Path(__file__).resolve().parents[1] / "docs" / "write-a-backend.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    known = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(known)
    sys.modules.pop("table", None)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the page's module in it."""
    (tmp_path / "table.py").write_text("".join(blocks("python")[:2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def table(desk: Path) -> Any:
    import table  # type: ignore[import-not-found]

    return table


def test_the_page_has_what_is_run_here() -> None:
    assert [len(blocks(language)) for language in ("python", "yaml", "toml")] == [4, 1, 1]
    assert "check_backend(" in blocks("python")[2]
    assert "check_promise(" in blocks("python")[3]


@pytest.mark.parametrize("name", CHECKS)
def test_the_pages_backend_keeps_each_promise(
    name: str, table: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def make() -> Any:
        return table.TableBackend(f"{tmp_path_factory.mktemp('tier')}/objects.db")

    def reopen(backend: Any) -> Any:
        return table.TableBackend(backend.place.removeprefix("table://"))

    check_promise(name, make, reopen=reopen, leaves_unfinished=False)


def test_the_pages_two_ways_to_run_the_suite_run(desk: Path) -> None:
    exec(compile(blocks("python")[2], str(PAGE), "exec"), {})
    names: dict[str, Any] = {}
    exec(
        compile("from table import TableBackend\n" + blocks("python")[3], str(PAGE), "exec"), names
    )
    (mark,) = names["test_promise"].pytestmark
    assert mark.args == ("name", CHECKS)


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
    registry._registered.clear()
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


def opener(**said: Any) -> Callable[..., Any]:
    def open_it(url: str, *, options: Any, read_only: bool) -> Any:
        said["calls"].append((url, options, read_only))
        return said.get("answer")

    return open_it


def test_two_functions_cannot_open_one_protocol() -> None:
    first, second = opener(calls=[]), opener(calls=[])
    second.__qualname__ = "another"
    register("kv")(first)
    register("kv")(first)
    with pytest.raises(ConfigError, match=r"kv:// is opened by .* already; choose another"):
        register("kv")(second)


def test_options_come_to_it_as_they_are_and_a_driver_passes_it_by() -> None:
    calls: list[Any] = []
    register("kv")(opener(calls=calls, answer="it"))
    assert open_backend("kv://place", options={"a": 1}, read_only=True) == "it"
    assert calls == [("kv://place", {"a": 1}, True)]
    with pytest.raises(ConfigError):
        open_backend("kv://place", driver=Driver.FSSPEC)
    assert len(calls) == 1


def test_what_it_raises_of_its_own_is_a_backend_error_that_names_it() -> None:
    @register("kv")
    def broken(url: str, *, options: Any, read_only: bool) -> Any:
        raise RuntimeError("out of order")

    with pytest.raises(BackendError, match=r"^open kv://: its backend failed: RuntimeError\('out"):
        open_backend("kv://place")


def test_only_what_is_said_to_be_remote_survives_the_site() -> None:
    register("here")(opener(calls=[]))
    register("there", remote=True)(opener(calls=[]))
    host = {"name": "host", "kind": "host"}
    stored = [{"name": s, "kind": "object", "url": f"{s}://place"} for s in ("here", "there")]
    rules = tier_rules(load_config({"run": "x", "tiers": [host, *stored]}))
    assert [tier.survives for tier in rules[1:]] == [LossClass.PROCESS, LossClass.SITE]
    assert [is_remote(f"{s}://x") for s in ("here", "there", "s3", "ftp")] == [
        *(False, True, True, False),
    ]
