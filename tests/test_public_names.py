"""The public names, arguments and defaults. Changing one here breaks users."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest

import tierfall
from tierfall.core.types import errors

FUNCTIONS = {
    "open": "config, *, run=None, process_group=None, fresh=False, replace=False",
    "load": "config_or_path, *, step=None, attempt=None, only=None, map_location='cpu', cache=None, "
    "cache_bytes=None, group=None, share=False",
    "open_tensors": "source, *, step=None, attempt=None, cache=None, cache_bytes=None",
    "close_all": "",
    "read_pointer": "folder",
    "register_codec": "type, name, encode, decode",
    "block": "tensor, *, shape, offset",
    "item": "value, *, changes=None, on_resize='reshard'",
}
CHECKPOINTER = {
    "save": "self, step, state, *, metrics=None, tags=(), block=False",
    "maybe_save": "self, step, state, *, metrics=None, tags=(), block=False",
    "restore": "self, state, *, step=None, attempt=None, tier=None, only=None, skip=(), rename=None, retype=(), "
    "resize=(), strict=True, unreachable='raise'",
    "load": "self, step=None, *, attempt=None, only=None, map_location='cpu', resume=True",
    "begin": "self",
    "write_pointer": "self, folder, step, *, attempt=None",
    "wait_captured": "self, timeout=None",
    "guard": "self",
    "checkpoints": "self",
    "pin": "self, step, *, attempt=None",
    "unpin": "self, step, *, attempt=None",
    "tag": "self, step, tag, *, attempt=None",
    "untag": "self, step, tag, *, attempt=None",
    "delete": "self, step, *, attempt=None, even_the_last=False",
    "prune": "self, *, dry_run=False",
    "drain": "self, deadline=None",
    "close": "self",
    "statistics": "self",
    "metrics_dict": "self",
    "subscribe": "self, fn",
}
SAVE_HANDLE = {
    "captured": "self, timeout=None",
    "wait": "self, tier=None, timeout=None",
    "done": "self, tier=None",
    "exception": "self",
    "add_done_callback": "self, fn, tier=None",
}
VALUES = {
    "RestoreReport": {"step", "attempt", "sources", "bytes", "seconds", "fallbacks"},
    "CheckpointInfo": {
        "step",
        "attempt",
        "copies",
        "bytes",
        "wall_time_s",
        "tags",
        "pinned",
        "metrics",
        "abandoned",
    },
    "CopyInfo": {"state", "bytes", "damage"},
    "DrainForecast": {"step", "attempt", "tier", "arrives", "left_bytes", "reason"},
    "DrainReport": set(),
    "LossBound": {"survives", "tier", "steps_lost", "seconds_lost", "restore_seconds"},
    "PeerSurvival": {"tier", "step", "attempt", "certain", "chances"},
    "SurvivalChance": {"losses", "probability", "exact"},
    "Statistics": set(),
    "Compression": set(),
    "CadenceReport": set(),
    "TierCadence": set(),
    "SaveStats": set(),
    "ShardSource": set(),
    "Pointer": {"run", "step", "attempt", "tiers"},
    "UnknownValue": {"name", "value", "reason"},
    "Fallback": set(),
}
OTHERS = {"Checkpointer", "Config", "SaveHandle", "Tensors", "errors"}
LAZY = {*FUNCTIONS, *VALUES, *OTHERS} - {"errors"}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def promised(signature: str) -> list[tuple[str, Any, Any]]:
    """Read a signature from text, with nothing but literals for defaults."""
    names = ast.parse(f"def promise({signature}): ...").body[0]
    assert isinstance(names, ast.FunctionDef)
    arguments = names.args
    required = len(arguments.args) - len(arguments.defaults)
    plain = [None] * required + list(arguments.defaults)
    kinds = inspect.Parameter
    return [
        (name.arg, kind, kinds.empty if default is None else ast.literal_eval(default))
        for kind, group, defaults in (
            (kinds.POSITIONAL_OR_KEYWORD, arguments.args, plain),
            (kinds.KEYWORD_ONLY, arguments.kwonlyargs, arguments.kw_defaults),
        )
        for name, default in zip(group, defaults, strict=True)
    ]


def test_all_holds_what_is_promised_and_no_more() -> None:
    assert set(tierfall.__all__) == {*FUNCTIONS, *VALUES, *OTHERS, *error_classes()}
    assert len(tierfall.__all__) == len(set(tierfall.__all__))


def test_nothing_public_is_left_out_of_all() -> None:
    """Names are imported when they are first used; type checkers and documents see imports that are never run."""
    tree = ast.parse(inspect.getsource(tierfall))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    assert {alias.name for node in imports for alias in node.names} == LAZY
    submodules = {"backends", "policies"}
    assert dir(tierfall) == sorted({*tierfall.__all__, *submodules, "__version__"})
    assert all(isinstance(getattr(tierfall, name), ModuleType) for name in submodules)


@pytest.mark.parametrize("name", sorted(LAZY))
def test_a_name_is_what_type_checkers_take_it_for(name: str) -> None:
    block = next(n for n in ast.parse(inspect.getsource(tierfall)).body if isinstance(n, ast.If))
    (source,) = (
        node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
    )
    assert source is not None
    assert getattr(tierfall, name) is getattr(importlib.import_module(source), name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tierfall' has no attribute 'opne'"):
        tierfall.opne  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_what_is_promised(name: str) -> None:
    assert parameters(getattr(tierfall, name)) == promised(FUNCTIONS[name])


@pytest.mark.parametrize("name", CHECKPOINTER)
def test_a_method_of_the_checkpointer_takes_what_is_promised(name: str) -> None:
    assert parameters(getattr(tierfall.Checkpointer, name)) == promised(CHECKPOINTER[name])


def test_the_checkpointer_has_no_other_methods() -> None:
    assert {name for name in vars(tierfall.Checkpointer) if not name.startswith("_")} == set(
        CHECKPOINTER
    )
    assert {"__enter__", "__exit__"} < set(vars(tierfall.Checkpointer))


@pytest.mark.parametrize("name", SAVE_HANDLE)
def test_a_method_of_the_handle_takes_what_is_promised(name: str) -> None:
    assert parameters(getattr(tierfall.SaveHandle, name)) == promised(SAVE_HANDLE[name])


@pytest.mark.parametrize("name", ["step", "outcome", "stats"])
def test_the_handle_has_the_promised_attributes_and_none_can_be_set(name: str) -> None:
    member = inspect.getattr_static(tierfall.SaveHandle, name)
    assert isinstance(member, property)
    assert member.fset is None


@pytest.mark.parametrize("name", VALUES)
def test_a_report_is_an_immutable_value_with_the_promised_members(name: str) -> None:
    value = getattr(tierfall, name)
    assert is_dataclass(value)
    assert value.__dataclass_params__.frozen
    assert VALUES[name] <= {field.name for field in fields(value)}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *VALUES, *OTHERS}))
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(tierfall, name))


@pytest.mark.parametrize("name", CHECKPOINTER)
def test_every_method_says_what_it_does(name: str) -> None:
    assert inspect.getdoc(getattr(tierfall.Checkpointer, name))


def error_classes() -> dict[str, type[BaseException]]:
    return {name: value for name, value in vars(errors).items() if inspect.isclass(value)}


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    drawn: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"(?P<indent>[ |`-]*)(?P<name>[A-Z]\w*Error)\b", line):
            depth = max(0, len(match["indent"]) // 4 - 1)
            path[depth:] = [match["name"]]
            drawn[match["name"]] = path[depth - 1] if depth else None
    parents = {
        name: next((b.__name__ for b in kind.__bases__ if b.__name__ in error_classes()), None)
        for name, kind in error_classes().items()
    }
    assert {
        name: parent for name, parent in parents.items() if drawn.get(name, name) != parent
    } == {}
    assert set(drawn) == set(error_classes())


def test_the_errors_that_are_promised_are_there() -> None:
    promised_names = {
        *("TierfallError", "ConfigError", "CaptureError", "FlushError", "RestoreError"),
        *("IntegrityError", "CapacityError", "BackendError", "StateChangedError"),
    }
    assert promised_names <= set(error_classes())
    assert all(issubclass(kind, errors.TierfallError) for kind in error_classes().values())


def test_every_error_is_shown_by_a_name_that_catches_it() -> None:
    assert set(tierfall.errors.__all__) == set(error_classes())
    kinds, seen = [*error_classes().values()], set[type[BaseException]]()
    importlib.import_module("tierfall.cli.app")  # and with it every module that defines errors
    importlib.import_module("tierfall.ops.tensors")
    while kinds:
        seen.add(kind := kinds.pop())
        kinds += kind.__subclasses__()
        if not kind.__module__.startswith("tierfall"):
            continue  # of another test
        error = kind.__new__(kind, "why")  # some take more than their text
        for shown in (error, pickle.loads(pickle.dumps(error))):
            name = traceback.format_exception_only(shown)[0].partition(":")[0].strip()
            assert name.startswith("tierfall.")
            assert isinstance(shown, getattr(tierfall, name.removeprefix("tierfall.")))
    assert len(seen) > len(error_classes())


def test_an_error_of_the_file_system_keeps_its_filename_in_a_pickle() -> None:
    error = tierfall.KeyNotFoundError(2, "there is no such object", "step_1/commit.json")
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errno, again.filename) == (str(error), 2, "step_1/commit.json")
    assert again.__notes__ == ["a note"]
