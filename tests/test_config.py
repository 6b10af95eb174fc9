"""The configuration: accepted, or refused with the place of every problem and without a secret in any message."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.config import Config, load_config
from tierfall.core.types.errors import ConfigError

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the text of a file named tiers.yaml."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, **options: Any) -> Config:
        (tmp_path / "tiers.yaml").write_text(text)
        return load_config("tiers.yaml", **options)

    return load_text


def config_of(**members: Any) -> dict[str, Any]:
    """A good configuration with some members replaced."""
    return {"run": "x", "tiers": "./checkpoints", **members}


# What a good configuration reads as.


def test_a_config_that_is_made_directly_is_refused_in_the_same_words() -> None:
    two = config_of(tiers=[{"name": "host", "kind": "host"}] * 2)
    for values in (
        {"run": "x"},
        config_of(intervall=3),
        config_of(tiers=[{"name": "host", "kind": "host", "pth": "x"}]),
        two,
    ):
        with pytest.raises(ConfigError) as caught:
            Config(**values)
        with pytest.raises(ConfigError) as of_dict:
            load_config(values)
        assert str(caught.value) == str(of_dict.value)
    assert Config(**config_of()) == load_config(config_of())


def test_paths_are_absolute_and_the_home_folder_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    assert load_config(config_of(tiers="~/c")).stored[0].path == Path("/home/somebody/c")
    config = load_config(config_of(tiers="c"))
    monkeypatch.chdir("/")
    assert config.stored[0].path == tmp_path / "c"


def test_a_model_cannot_be_built_past_its_rules() -> None:
    with pytest.raises(ValueError, match="host tier"):
        Config.model_validate({"run": "x", "tiers": [{"name": "a", "kind": "file", "path": "."}]})
    with pytest.raises(ValueError, match="cannot stand together"):
        Config.model_validate(config_of(interval={"mtbf": "4h", "every": 100}))


def test_a_merge_key_fills_a_tier(load: Load) -> None:
    config = load(
        "run: x\ntiers:\n"
        "- {name: host, kind: host}\n"
        "- &a {name: a, kind: file, path: ./a, retain: {last: 3}}\n"
        "- {<<: *a, name: b, path: ./b}\n"
    )
    assert [(tier.name, tier.retain.last) for tier in config.stored] == [("a", 3), ("b", 3)]


def test_a_name_that_looks_like_a_date_is_a_name(load: Load) -> None:
    assert load("run: 2026-01-31\ntiers: ./c").run == "2026-01-31"


# Where something is wrong.


def _nested(line: str, repeated: str, times: int) -> str:
    """Lines of which each has the one before several times, by its alias."""
    lines = (
        line.format(n=n, aliases=", ".join([repeated.format(n=n - 1)] * times))
        for n in range(1, 40)
    )
    return "run: r\ntiers: ./c\na0: &a0 {x: 1}\n" + "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        _nested("a{n}: &a{n} [{aliases}]", "*a{n}", 9),
        _nested("a{n}: &a{n} {{<<: [{aliases}]}}", "*a{n}", 2),
        _nested("a{n}: &a{n} {{? [{aliases}] : 1}}", "*a{n}", 2),
        "run: r\ntiers: [" + "1, " * 10_100 + "1]",
    ],
    ids=["values", "merges", "keys", "no alias"],
)
def test_a_file_of_very_many_values_is_refused_at_once(load: Load, text: str) -> None:
    began = time.process_time()
    with pytest.raises(
        ConfigError, match=r"tiers.yaml:\d+:\d+: not valid YAML: (more than 10000|a key that)"
    ):
        load(text)
    assert time.process_time() - began < 10


@settings(deadline=None, max_examples=80)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=8)
        | st.sampled_from(["host", "file", "16GiB", "${env:HOME}", "${", "10m", "./c", "zstd"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "run",
                        "tiers",
                        "name",
                        "kind",
                        "path",
                        "flush",
                        "every",
                        "interval",
                        "retain",
                        "best",
                        1,
                    ]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=15,
    )
)
def test_nothing_but_our_own_error_comes_out(value: Any) -> None:
    for source in (
        {"run": "x", "tiers": value},
        value if isinstance(value, Mapping) else {"run": value},
    ):
        with contextlib.suppress(ConfigError):
            assert isinstance(load_config(source), Config)


# The environment.


def test_what_a_variable_holds_is_not_looked_at_again() -> None:
    config = load_config(config_of(tiers="${env:A}"), environ={"A": "/${env:B}/${"})
    assert config.stored[0].path == Path("/${env:B}/${")


SECRET = "hunter2-!/\\\"' ü"


def test_no_traceback_shows_what_a_variable_holds() -> None:
    """Nor does what pydantic raised, which is chained: it has the values that it was given."""
    for members in (
        {"interval": {"every": "${env:S}"}},
        {"tiers": ["${env:S}"]},
        {"tiers": [{"name": "o", "kind": "object", "url": "${env:S}", "options": "${env:S}"}]},
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(config_of(**members), environ={"S": SECRET})
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))
        assert "hunter2" not in repr(caught.value.__cause__ or caught.value.__context__)


# The schema.


def test_the_schema_serves_editors() -> None:
    schema = Config.model_json_schema()
    sections = {name: part for name, part in schema["$defs"].items() if "properties" in part}
    for name, section in {"Config": schema, **sections}.items():
        own = name in ("RetainSection", "IntervalSection")  # policies of a user's own
        of_its_own = {"type": "object"} if own else False
        assert section["additionalProperties"] == of_its_own, name
        for key, member in section["properties"].items():
            assert member["description"], f"{name}: {key}"
    first = schema["properties"]
    assert first["on_error"]["$ref"] == "#/$defs/OnError"
    assert schema["$defs"]["OnError"]["enum"] == ["warn", "raise"]
    assert first["max_wait"]["default"] == "60s"
    assert {"type": "number", "exclusiveMinimum": 0} in first["max_wait"]["anyOf"]
    assert any("pattern" in way for way in first["chunk"]["anyOf"])
    assert sections["FlushSection"]["properties"]["every"]["minimum"] == 1
    json.dumps(Config.model_json_schema())
