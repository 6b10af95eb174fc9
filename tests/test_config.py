"""The configuration: accepted, or refused with the place of every problem and without a secret in any message."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.config import Config, FileTierConfig, HostTierConfig, load_config
from tierfall.core.types.errors import ConfigError, NotSupportedError
from tierfall.core.types.values import CaptureMode, OnError, TierKind, Verify, WhenFull

Load = Callable[..., Config]
DOCUMENTATION = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

FULL = """\
run: gpt-small
interval: {every: 100}
capture: {mode: blocking, verify: full, bandwidth: null}
on_error: raise
max_wait: 90s
chunk: 4MiB
tiers:
  - {name: ram, kind: host, capacity: 16GiB, when_full: wait, folder: /dev/shm/here}
  - name: nvme
    kind: file
    path: /local/checkpoints
    shared: false
    capacity: 500GiB
    flush: {every: 1}
    retain: {last: 3}
  - name: lustre
    kind: file
    path: /lustre/checkpoints
    shared: true
    flush: {every: 10, order: in_order}
    compress: {codec: none}
    bandwidth: 500MB/s
"""


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


def tier_of(**members: Any) -> dict[str, Any]:
    """A good configuration whose file tier has these members as well."""
    tier = {"name": "disk", "kind": "file", "path": "./c", **members}
    return config_of(tiers=[{"name": "host", "kind": "host"}, tier])


def host_of(**members: Any) -> dict[str, Any]:
    return config_of(tiers=[{"name": "host", "kind": "host", **members}])


def peer_of(**members: Any) -> dict[str, Any]:
    tiers = [{"name": "host", "kind": "host"}, {"name": "peers", "kind": "peer", **members}]
    return config_of(tiers=tiers)


def problems(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    lines = str(error.value).splitlines()
    return [line.strip() for line in lines[1:]] if len(lines) > 1 else lines


# What a good configuration reads as.


def test_a_whole_file_reads_as_numbers(load: Load) -> None:
    config = load(FULL)
    assert config.run == "gpt-small"
    assert config.interval.every == 100
    assert config.capture.mode is CaptureMode.BLOCKING
    assert config.capture.verify is Verify.FULL
    assert config.on_error is OnError.RAISE
    assert config.max_wait_s == 90.0
    assert config.chunk_bytes == 4 << 20
    assert [tier.kind for tier in config.tiers] == [TierKind.HOST, TierKind.FILE, TierKind.FILE]
    assert config.host.capacity_bytes == 16 << 30
    assert config.host.folder == Path("/dev/shm/here")
    nvme, lustre = config.stored
    assert (nvme.path, nvme.shared, nvme.capacity_bytes) == (
        Path("/local/checkpoints"),
        False,
        500 << 30,
    )
    assert (nvme.flush.every, nvme.retain.last, nvme.bandwidth_bytes_per_s) == (1, 3, None)
    assert (lustre.flush.every, lustre.retain.last, lustre.bandwidth_bytes_per_s) == (
        10,
        None,
        500_000_000,
    )


@pytest.mark.parametrize(
    ("written", "verify"),
    [
        ("sample", Verify.SAMPLE),
        ("full", Verify.FULL),
        ("off", Verify.OFF),
        ("'off'", Verify.OFF),
        ("true", Verify.FULL),
        ("false", Verify.OFF),
    ],
)
def test_capture_verify_is_a_word_or_what_was_written_before(
    load: Load, written: str, verify: Verify
) -> None:
    text = f"run: x\ntiers: ./checkpoints\ncapture: {{verify: {written}}}\n"
    assert load(text).capture.verify is verify


def test_a_path_alone_means_host_memory_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config({"run": "x", "tiers": "./checkpoints"})
    host, disk = config.tiers
    assert isinstance(host, HostTierConfig)
    assert (host.name, host.capacity_bytes, host.folder) == ("host", None, None)
    assert isinstance(disk, FileTierConfig)
    assert (disk.name, disk.path) == ("disk", tmp_path / "checkpoints")
    assert config.interval.budget == pytest.approx(0.035)
    assert (config.capture.mode, config.capture.verify) == (CaptureMode.LAZY, Verify.SAMPLE)
    assert (config.on_error, config.max_wait_s, config.chunk_bytes) == (
        OnError.WARN,
        60.0,
        16 << 20,
    )
    assert load_config({"run": "x", "tiers": Path("checkpoints")}) == config


@pytest.mark.parametrize(
    ("written", "steps", "seconds", "budget"),
    [
        ({}, None, None, 0.035),
        ({"at_end": True, "on_signal": ["SIGTERM", "SIGUSR1"]}, None, None, 0.035),
        ({"overhead": "10%"}, None, None, 0.1),
        ({"every": 100, "at_end": True}, 100, None, None),
        ({"every": "100"}, 100, None, None),
        ({"every": "10m"}, None, 600.0, None),
        ({"mtbf": "4h"}, None, None, None),
    ],
)
def test_an_interval_has_one_measure_and_survives_being_dumped(
    written: dict[str, Any], steps: int | None, seconds: float | None, budget: float | None
) -> None:
    config = load_config(config_of(interval=written))
    interval = config.interval
    assert (interval.every_steps, interval.every_s) == (steps, seconds)
    assert interval.budget == (None if budget is None else pytest.approx(budget))
    assert load_config(config.model_dump()) == config
    assert load_config(json.loads(config.model_dump_json())) == config


def test_an_mtbf_is_a_time_or_one_for_each_loss() -> None:
    alone = load_config(config_of(interval={"mtbf": "4h"})).interval.mtbf
    assert alone is not None
    assert (alone.process_s, alone.node_s, alone.site_s) == (14400.0, None, None)
    times = {"process": "2h", "node": "12h", "site": "90d"}
    each = load_config(config_of(interval={"mtbf": times})).interval.mtbf
    assert each is not None
    assert (each.process_s, each.node_s, each.site_s) == (7200.0, 43200.0, 7776000.0)


def test_nulls_stand_for_defaults() -> None:
    members = {
        "shared": None,
        "capacity": None,
        "bandwidth": None,
        "retain": {"last": None, "best": None},
    }
    assert load_config(tier_of(**members)) == load_config(tier_of())
    assert load_config(config_of(interval=None)) == load_config(config_of())
    nulls = {"every": None, "overhead": None, "mtbf": None, "on_signal": None}
    assert load_config(config_of(interval=nulls)) == load_config(config_of())


def test_a_relative_path_in_a_file_starts_at_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run finds its checkpoints from wherever it is started; in a dict it starts at the working directory."""
    (tmp_path / "job").mkdir()
    (tmp_path / "tiers.yaml").write_text("{run: r, tiers: ../never}")
    file = tmp_path / "job" / "tiers.yaml"
    file.write_text(
        "run: r\nevents: e.jsonl\ntiers:\n"
        "  - {name: host, kind: host, folder: ../memory}\n"
        "  - {name: disk, kind: file, path: c}\n"
    )
    (tmp_path / "linked.yaml").symlink_to(file)
    for folder, written in (
        (tmp_path, "job/tiers.yaml"),
        (tmp_path / "job", "tiers.yaml"),
        (Path("/"), file),
    ):
        monkeypatch.chdir(folder)
        config = load_config(written)
        assert config.stored[0].path == tmp_path / "job" / "c"
        assert config.events is not None
        assert config.events.path == tmp_path / "job" / "e.jsonl"
        assert config.host.folder is not None
        assert config.host.folder.resolve() == tmp_path / "memory"
    assert load_config(tmp_path / "linked.yaml").stored[0].path == tmp_path / "c"


def test_an_address_alone_is_an_object_store() -> None:
    host, store = load_config(config_of(tiers="s3://bucket/prefix")).tiers
    assert (host.kind, store.kind) == ("host", "object")
    assert (
        store
        == load_config(
            config_of(
                tiers=[HOST, {"name": "store", "kind": "object", "url": "s3://bucket/prefix"}]
            )
        ).tiers[1]
    )


def test_a_tier_inside_another_ones_folder_is_refused(tmp_path: Path) -> None:
    tiers = [
        HOST,
        {"name": "a", "kind": "file", "path": "c"},
        {"name": "b", "kind": "file", "path": "c/d/"},
    ]
    for written in (tiers, [HOST, *reversed(tiers[1:])]):
        with pytest.raises(ConfigError, match=r"path: inside the folder of tiers\[[12]\]"):
            load_config(config_of(tiers=written))
    (tmp_path / "link").symlink_to(tmp_path)
    inside = [
        {"name": "a", "kind": "file", "path": tmp_path},
        {"name": "b", "kind": "file", "path": tmp_path / "link/x"},
    ]
    with pytest.raises(ConfigError, match="inside the folder"):
        load_config(config_of(tiers=[HOST, *inside]))
    beside = [
        {"name": "a", "kind": "file", "path": "c"},
        {"name": "b", "kind": "file", "path": "c2"},
    ]
    load_config(config_of(tiers=[HOST, *beside]))


def test_paths_are_absolute_and_the_home_folder_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    assert load_config(config_of(tiers="~/c")).stored[0].path == Path("/home/somebody/c")
    config = load_config(config_of(tiers="c"))
    monkeypatch.chdir("/")
    assert config.stored[0].path == tmp_path / "c"


def test_a_ready_config_is_taken_as_it_is() -> None:
    config = load_config(config_of())
    assert load_config(config) is config
    assert load_config(config, run="other").run == "other"
    assert config.run == "x"


def test_a_config_survives_being_dumped() -> None:
    config = load_config(yaml.safe_load(FULL))
    assert load_config(config.model_dump()) == config
    assert load_config(json.loads(config.model_dump_json())) == config


def test_a_config_is_frozen() -> None:
    config = load_config(config_of())
    with pytest.raises(ValueError, match="frozen"):
        config.run = "y"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.host.name = "y"  # type: ignore[misc]


def test_the_argument_run_stands_for_the_files(load: Load) -> None:
    assert load("run: a\ntiers: ./c", run="b").run == "b"
    assert load("tiers: ./c", run="b").run == "b"
    with pytest.raises(ConfigError, match=r"^run: '../b' is not a usable name"):
        load("tiers: ./c", run="../b")


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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"tiers": "./c"}, "run: missing; expected a value such as gpt-small"),
        ({"run": "x"}, "tiers: missing"),
        (config_of(run="../x"), "^run: '../x' is not a usable name"),
        (config_of(run=7), 'run: 7 is not a name; .*put it in quotes: "7"'),
        (config_of(run=None), "run: an empty value is not a name"),
        (config_of(tiers=[]), "tiers: the list is empty; expected at least a tier of kind host"),
        (config_of(tiers=7), "tiers: 7 does not fit; expected a list"),
        (config_of(tiers=[7]), r"tiers\[0\]: 7 does not fit; expected a mapping"),
        (
            config_of(tiers=[{"name": "a"}]),
            r"tiers\[0\].kind: missing; expected one of device, host, peer, file, object",
        ),
        (
            config_of(tiers=[{"name": "a", "kind": "fil"}]),
            r'tiers\[0\].kind: .*did you mean "file"\?',
        ),
        (
            config_of(interval=100),
            r"interval: 100 does not fit; expected a mapping: \{every: 100\}",
        ),
        (
            config_of(interval={"every": 100, "overhead": "3%"}),
            "interval: every and overhead cannot stand together; keep one: every",
        ),
        (config_of(interval={"overhead": "0%"}), "interval.overhead: 0 does not fit; .*3.5%"),
        (config_of(interval={"overhead": "100%"}), "interval.overhead: 100% leaves no time"),
        (config_of(interval={"mtbf": "0s"}), "interval.mtbf.process: 0 does not fit; .* 4h"),
        (config_of(interval={"mtbf": {}}), "interval.mtbf: has no time; expected 4h, or"),
        (
            config_of(interval={"mtbf": {"process": "2h", "node": "1h"}}),
            "interval.mtbf: a more severe loss occurs more often than a less severe one; expected process",
        ),
        (
            config_of(interval={"on_signal": ["SIGTRM"]}),
            r'interval.on_signal\[0\]: not a signal; .*did you mean "SIGTERM"\?',
        ),
        (
            config_of(interval={"on_signal": ["SIGKILL"]}),
            r"interval.on_signal\[0\]: a program cannot continue after SIGKILL",
        ),
        (
            config_of(interval={"on_signal": [["SIGTERM"]]}),
            r"interval.on_signal\[0\]: not a signal; expected the name of a signal",
        ),
        (
            config_of(drain={"on_signal": ["SIGUSR1", "SIGSTOP"]}),
            r"drain.on_signal\[1\]: a program cannot continue after SIGSTOP",
        ),
        (
            config_of(drain={"on_signal": []}),
            r"drain.on_signal: an empty list does not fit; .*\[SIGTERM\]",
        ),
        (config_of(interval={"every": "0s"}), 'interval.every: "0s" is not above 0; .*10m'),
        (
            config_of(interval={"every": 0}),
            "interval.every: 0 does not fit; expected a whole number of training",
        ),
        (config_of(interval={"every": True}), "interval.every: true does not fit"),
        (config_of(interval={"every": 1.5}), "interval.every: 1.5 does not fit"),
        (config_of(interval={"evry": 1}), r'interval.evry: unknown key; did you mean "every"\?'),
        (
            config_of(capture={"mode": "lzay"}),
            r'capture.mode: "lzay" does not fit; .*did you mean "lazy"\?',
        ),
        (
            config_of(capture={"mode": "auto"}),
            'capture.mode: "auto" does not fit; expected one of lazy, blocking; leave mode out for lazy, the default',
        ),
        (
            config_of(capture={"verify": 1}),
            "capture.verify: 1 does not fit; expected one of sample, full, off",
        ),
        (config_of(capture={"verify": "ful"}), r'expected one of .*did you mean "full"\?'),
        (
            config_of(on_error="ignore"),
            'on_error: "ignore" does not fit; expected one of warn, raise',
        ),
        (config_of(max_wait="1min"), r'max_wait: unknown unit "min" \(did you mean "m"\?\)'),
        (config_of(max_wait=-1), "max_wait: -1 is not above 0; expected a time above 0, such as"),
        (
            config_of(max_wait=-0.5),
            "max_wait: -0.5 is not above 0; expected a time above 0, such as",
        ),
        (config_of(max_wait=0), "max_wait: .*; expected a time above 0, such as 60s"),
        (config_of(max_wait="0ms"), "max_wait: .*; expected a time above 0, such as 60s"),
        (config_of(chunk="6KiB"), "chunk: .*expected a multiple of 4KiB from 4KiB to 1GiB"),
        (config_of(chunk="2GiB"), "chunk: .*expected a multiple of 4KiB from 4KiB to 1GiB"),
        (config_of(chunk=0), "chunk: 0 does not fit"),
        (config_of(chunk=None), "chunk: None is not usable here"),
        (config_of(Run="x"), r'Run: unknown key; did you mean "run"\?'),
        (config_of(zebra=1), "zebra: unknown key; expected one of run, plugins, interval"),
        (
            host_of(retain={"last": 3}),
            "retain: unknown key of a host tier; it is a key of a peer, a file or an object tier",
        ),
        (
            peer_of(copies=0),
            r"tiers\[1\].copies: 0 does not fit; expected a whole number, 1 or more",
        ),
        (peer_of(copies=-1), r"copies: -1 does not fit; expected a whole number, 1 or more"),
        (peer_of(copies="two"), 'copies: "two" does not fit; expected a whole number, 1 or more'),
        (peer_of(copies=1.5), "copies: 1.5 does not fit; expected a whole number, 1 or more"),
        (
            peer_of(parity={"group": 4, "losses": 1}),
            r"tiers\[1\].parity: unknown key of a peer tier; a peer tier keeps copies: write copies: N",
        ),
        (peer_of(spread=""), 'spread: "" is not a name|spread: .* is not a usable name'),
        (
            peer_of(spread="rack", domains="s3://b/racks"),
            r"domains: s3://... is an address; expected a file",
        ),
        (host_of(capacity="16GIB"), r'capacity: unknown unit "GIB" \(did you mean "GiB"\?\)'),
        (host_of(capacity=0), "capacity: 0 is 0 bytes, less than 1KiB; expected a size"),
        (
            host_of(when_full="drop"),
            'when_full: "drop" does not fit; expected one of wait, skip, supersede',
        ),
        (
            host_of(when_full="supercede"),
            r'tiers\[0\].when_full: "supercede" .*; did you mean "supersede"\?',
        ),
        (host_of(when_full=True), "when_full: true does not fit; expected one of wait, skip"),
        (
            host_of(when_full=None),
            "when_full: an empty value does not fit; expected one of wait, skip",
        ),
        (tier_of(path=""), 'path: "" is not a path; expected a folder such as ./checkpoints'),
        (tier_of(path="a\0b"), "path: .* is not a path of printable text"),
        (tier_of(path="\ud800"), "path: .* is not a path of printable text"),
        (tier_of(path="~nobody-of-that-name/c"), "path: '~nobody.*' is not a usable path"),
        (
            tier_of(path="$HOME/ck"),
            r'tiers\[1\].path: "\$HOME/ck" contains \$HOME, .*write \$\{env:HOME\}$',
        ),
        (
            tier_of(path="/x/${USER}/ck"),
            r"tiers\[1\].path: \$\{USER\} is not a reference; .*write \$\{env:USER\}$",
        ),
        (tier_of(path=Path("/x/${USER}")), r"tiers\[1\].path: .*write \$\{env:USER\}$"),
        (host_of(folder="/dev/shm/$USER"), r"tiers\[0\].folder: .*write \$\{env:USER\}$"),
        (config_of(tiers="$HOME/ck"), r"tiers\[1\].path: .*write \$\{env:HOME\}$"),
        (
            tier_of(path="${env:HOME}/$USER"),
            r"path: the value of \$\{env:HOME\}/\$USER does not fit; .*\$\{env:NAME\} for a var",
        ),
        (tier_of(shared="maybe"), 'shared: "maybe" does not fit; expected true or false'),
        (tier_of(bandwidth="500MB"), r'bandwidth: unknown unit "MB" \(did you mean "MB/s"\?\)'),
        (tier_of(bandwidth=0), "bandwidth: 0 bytes per second is not a rate"),
        (
            tier_of(flush=None),
            r"flush: an empty value does not fit; expected a mapping such as \{every: 1\}",
        ),
        (
            tier_of(retain={"last": "many"}),
            'retain.last: "many" does not fit; expected a whole number, 1 or more',
        ),
        (
            tier_of(compress={"codec": "zst"}),
            r'compress.codec: "zst" does not fit; .*did you mean "zstd"\?',
        ),
        (tier_of(name="a/b"), "name: .*is not a usable name"),
        # A key at the wrong level
        (config_of(retain={"last": 3}), "retain: unknown key; it is a key of a tier: write it in"),
        (config_of(every=10), "every: unknown key; it belongs under interval"),
        (config_of(deadline="5s"), "deadline: unknown key; it belongs under drain"),
        (tier_of(last=3), "last: unknown key of a file tier; it belongs under retain"),
        (tier_of(codec="zstd"), "codec: unknown key of a file tier; it belongs under compress"),
        (tier_of(every=3), "every: unknown key of a file tier; it belongs under flush or retain"),
        (tier_of(interval={"every": 3}), "interval: unknown key of .*; it belongs at the top"),
        (
            tier_of(url="s3://b"),
            "url: unknown key .* of an object tier: write kind: object, and no path",
        ),
        (
            tier_of(kind="object", url="s3://b", endpoint="http://x"),
            r"endpoint: unknown key .* under options: options: \{endpoint_url: ...\}",
        ),
        # What people call a tier
        (
            config_of(
                tiers=[{"name": "o", "kind": "object", "url": "gs://b", "driver": "obstore"}]
            ),
            "driver: obstore is not used any more; remove driver: gs:// and az:// are accessed by fsspec",
        ),
        (tier_of(kind="s3"), 'kind: "s3" does not fit; .*did you mean "object"'),
        (
            config_of(tiers="tiers://run/step-00000100"),
            r"tiers\[1\].url: tiers://...: a checkpoint is not saved or loaded by a path; .*TierWriter",
        ),
        (tier_of(kind="NVMe"), 'kind: "NVMe" does not fit; .*did you mean "file"'),
        (host_of(kind="ram"), 'kind: "ram" does not fit; .*did you mean "host"'),
        (config_of(tiers=["./c"]), r"tiers\[0\]: .* a mapping: \{name: disk, kind: file"),
        (tier_of(path="s3://key:secret@b/c"), r"path: s3://... is an address; .*kind: object, url"),
        (host_of(folder="s3://b/c"), "folder: s3://... is an address"),
        (config_of(events="s3://b/c"), "events.path: s3://... is an address; expected a file"),
        # Units
        (tier_of(bandwidth="100Mbit/s"), "'100Mbit/s' counts bits; .*: 12.5MB/s"),
        (tier_of(bandwidth="8 Gbps"), "'8 Gbps' counts bits; .*: 1GB/s"),
        (tier_of(bandwidth="1Gb/s"), "'1Gb/s' counts bits; .*: 0.125GB/s"),
        (tier_of(max_wait="1m30s"), "'1m30s' has two units; expected one: 90s"),
        (tier_of(capacity="3 gigabytes"), 'unknown unit "gigabytes" .did you mean "GB"'),
        (config_of(interval={"every": "100 steps"}), "a number of steps has no unit; expected 100"),
        (config_of(interval={"every": "1e3"}), '"1e3" does not fit; expected a whole number of'),
        (config_of(interval={"every": "1h30m"}), "'1h30m' has two units; expected one: 90m"),
        (config_of(interval={"overhead": 0.05}), "0.05 is not a share; expected .* such as 5%"),
    ],
)
def test_what_is_wrong_is_refused_with_what_was_expected(
    source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert any(re.search(message, line) for line in problems(caught)), str(caught.value)
    assert not isinstance(caught.value, NotSupportedError)


@pytest.mark.parametrize("run", [5, b"x", ["x"]])
def test_an_argument_run_that_is_no_name_is_refused(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"^run: .* is not a name; expected text$"):
        load_config(config_of(), run=run)


def test_an_unknown_key_of_an_object_tier_is_reported_in_good_english() -> None:
    tier = {"name": "o", "kind": "object", "url": "s3://b", "zebra": 1}
    with pytest.raises(ConfigError, match="unknown key of an object tier"):
        load_config(config_of(tiers=[HOST, tier]))


HOST = {"name": "host", "kind": "host"}
DEVICE = {"name": "device", "kind": "device", "capacity": "1GiB"}
FILE = {"name": "file", "kind": "file", "path": "./c"}


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([FILE], "tiers: there is no host tier"),
        ([FILE, HOST], r"tiers\[1\].kind: a host tier must come earlier"),
        ([HOST, DEVICE], r"tiers\[1\].kind: a device tier must come earlier"),
        (
            [HOST, {**HOST, "name": "b"}],
            r"tiers\[1\].kind: a second host tier; expected exactly one",
        ),
        (
            [DEVICE, {**DEVICE, "name": "b"}, HOST],
            r"tiers\[1\].kind: a second device tier; expected one at most",
        ),
        ([HOST, {**FILE, "name": "host"}], r"tiers\[1\].name: the same name as tiers\[0\]"),
        (
            [HOST, FILE, {**FILE, "name": "b", "path": "x/../c/"}],
            r"tiers\[2\].path: the same path as tiers\[1\]",
        ),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(
    tiers: list[dict[str, Any]], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for other_problem in ({}, {"max_wait": "soon"}):
        with pytest.raises(ConfigError) as caught:
            load_config({"run": "x", "tiers": tiers, **other_problem})
        assert any(re.match(message, line) for line in problems(caught)), str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tiers.yaml: the file is empty"),
        ("# nothing\n", "tiers.yaml: the file is empty"),
        ("- run\n", "tiers.yaml:1: expected a mapping with at least run and tiers"),
        ("run\n", "tiers.yaml:1: expected a mapping"),
        (
            "run: x\nrun: y\ntiers: ./c",
            "tiers.yaml:2: run: the key occurs twice here, first on line 1",
        ),
        ("{run: x, tiers: ./c, run: y}", "tiers.yaml:1: run: the key occurs twice here"),
        (
            "run: x\ntiers:\n- {name: h, kind: host, name: h}",
            r"tiers.yaml:3: tiers\[0\].name: the key occurs twice here",
        ),
        ("run: x\n---\nrun: y\n", "tiers.yaml:2:1: not valid YAML"),
        ("run: \a\n", "tiers.yaml:1: not valid YAML"),
        ("&a {run: *a}", "tiers.yaml:1:1: not valid YAML: a value that contains itself"),
        (
            "run: !!python/object/apply:os.system [x]",
            "tiers.yaml:1:6: not valid YAML: could not determine a constructor",
        ),
        ("run: !!int x", "tiers.yaml: cannot be read as YAML"),
        ("? [run]\n: x", "tiers.yaml:1:3: not valid YAML: a key that is a list or a mapping"),
        ("1: x\nrun: x\ntiers: ./c", r"tiers.yaml:1: \[1\]: unknown key"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(load: Load, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load(text)


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
        "run: r\ntiers: [" + "1, " * 20_000 + "1]",
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


def test_a_file_that_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no such file; expected the path of a YAML file"
    ):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder; expected a YAML file"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: \xff\n")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        load_config(tmp_path / "latin.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than 128 KiB"):
        load_config(tmp_path / "big.yaml")
    with pytest.raises(
        ConfigError, match=r"expected the path of a YAML file, a dict or a tierfall.Config, got int"
    ):
        load_config(7)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=300)
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


def test_variables_are_filled_in_anywhere_in_text(load: Load) -> None:
    environ = {
        "ROOT": "/data",
        "WHO": "me",
        "N": "10",
        "SIZE": "4GiB",
        "YES": "true",
        "MODE": "blocking",
    }
    config = load(
        "run: run-of-${env:WHO}-${env:N}\n"
        "capture: {mode: '${env:MODE}', verify: '${env:YES}'}\n"
        "tiers:\n- {name: host, kind: host, capacity: '${env:SIZE}'}\n"
        "- {name: disk, kind: file, path: '${env:ROOT}/${env:WHO}', flush: {every: '${env:N}'}}\n",
        environ=environ,
    )
    assert config.run == "run-of-me-10"
    assert (config.capture.mode, config.capture.verify) == (CaptureMode.BLOCKING, Verify.FULL)
    assert config.host.capacity_bytes == 4 << 30
    assert (config.stored[0].path, config.stored[0].flush.every) == (Path("/data/me"), 10)


def test_the_processes_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERFALL_TEST_ROOT", "/somewhere")
    assert load_config(config_of(tiers="${env:TIERFALL_TEST_ROOT}")).stored[0].path == Path(
        "/somewhere"
    )


def test_what_a_variable_holds_is_not_looked_at_again() -> None:
    config = load_config(config_of(tiers="${env:A}"), environ={"A": "/${env:B}/${"})
    assert config.stored[0].path == Path("/${env:B}/${")


@pytest.mark.parametrize(
    "text", ["${env:}", "${env:A", "${env: A}", "${A}", "${env:1}", "${ENV:A}", "x${"]
)
def test_a_reference_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^tiers: .* is not a reference; expected \$\{env:NAME\}"
    ):
        load_config(config_of(tiers=text), environ={"A": "x"})


@pytest.mark.parametrize("word", WhenFull)
def test_what_a_full_host_does_is_one_of_three_words(word: WhenFull) -> None:
    assert load_config(host_of(when_full=word.value)).host.when_full is word
    assert load_config(host_of()).host.when_full is WhenFull.WAIT
    assert load_config(tier_of(when_full=word.value)).stored[0].when_full is word
    assert load_config(tier_of()).stored[0].when_full is None


@pytest.mark.parametrize(
    ("written", "bytes_per_s", "share"),
    [("500MB/s", 500_000_000, None), (4096, 4096, None), ("50%", None, 0.5), ("100%", None, 1.0)],
)
def test_a_bandwidth_is_a_rate_or_a_share(
    written: object, bytes_per_s: int | None, share: float | None
) -> None:
    tier = load_config(tier_of(bandwidth=written)).stored[0]
    assert (tier.bandwidth_bytes_per_s, tier.bandwidth_share) == (bytes_per_s, share)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bandwidth": "0%"}, r"bandwidth: 0% is not a rate; expected a rate .*50%"),
        ({"bandwidth": "120%"}, "bandwidth: '120%' is more than the whole"),
        ({"bandwidth": "fast"}, "bandwidth: 'fast' is not a number"),
        ({"bandwidth": 0.5}, "bandwidth: 0.5 is not usable here"),
        ({"flush": {"within": 0}}, "flush.within: 0 is not above 0; expected a time above 0"),
        ({"retain": {"for": "0s"}}, 'retain.for: "0s" is not above 0; expected a time'),
        ({"retain": {"tags": []}}, "retain.tags: an empty list does not fit; expected true"),
        ({"evict": {"order": {"cheapest": 3}}}, "order.cheapest: 3 does not fit: it has no set"),
        ({"flush": {"yield": "maybe"}}, r"flush.yield: .*expected true or false"),
        (
            {"flush": {"order": "newest"}},
            r'flush.order.newest: unknown order; did you mean "newest_first"\?',
        ),
        ({"when_full": "drop"}, "when_full: .*expected one of wait, skip, supersede"),
        ({"max_wait": 0}, "max_wait: 0 is not above 0"),
    ],
)
def test_what_a_flush_is_reported_wrongly_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(tier_of(**settings))


SECRET = "hunter2-!/\\\"' ü"
PLACES: list[dict[str, Any]] = [
    config_of(run="${env:S}"),
    config_of(interval="${env:S}"),
    config_of(interval={"every": "${env:S}"}),
    config_of(capture={"mode": "${env:S}", "verify": "${env:S}"}),
    config_of(on_error="${env:S}"),
    config_of(max_wait="1${env:S}"),
    config_of(chunk="${env:S}"),
    config_of(tiers=["${env:S}"]),
    config_of(tiers="~${env:S}/x"),
    host_of(name="${env:S}", kind="${env:S}"),
    host_of(name="${env:S}", when_full="${env:S}", capacity="5${env:S}", folder="${env:S}\0"),
    host_of(zebra="${env:S}"),
    tier_of(
        name="${env:S}", shared="${env:S}", bandwidth="${env:S}", compress={"codec": "${env:S}"}
    ),
    tier_of(flush={"every": "${env:S}"}, retain={"last": "${env:S}", "for": "${env:S}"}),
    config_of(tiers=[HOST, {**FILE, "path": "${env:S}"}, {**FILE, "path": "${env:S}"}]),
    config_of(
        tiers=[
            HOST,
            {
                "name": "o",
                "kind": "object",
                "url": "${env:S}",
                "options": {"key": "${env:S}"},
                "x": 1,
            },
        ]
    ),
]


@pytest.mark.parametrize("source", PLACES)
def test_no_message_shows_what_a_variable_holds(source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source, environ={"S": SECRET})
    text = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in text
    chained = caught.value.__cause__ or caught.value.__context__
    assert "hunter2" not in repr(chained)


def test_a_value_that_does_not_fit_is_shown_as_the_file_has_it() -> None:
    with pytest.raises(
        ConfigError, match=r"^chunk: the value of \$\{env:S\} does not fit; expected a multiple of"
    ):
        load_config(config_of(chunk="${env:S}"), environ={"S": SECRET})


def test_the_example_of_the_design_is_understood_to_the_last_key() -> None:
    store = {
        **{"name": "store", "kind": "object", "url": "s3://bucket/checkpoints"},
        "options": {"endpoint_url": "${env:E}", "key": "${env:K}", "secret": "${env:S}"},
        "flush": {"every": 10, "order": "newest_first", "within": "10m"},
        "retain": {
            "last": 5,
            "every": 1000,
            "best": {"metric": "loss", "mode": "min", "count": 2},
            "for": "30d",
        },
        "compress": {"codec": "zstd", "level": 3},
        "bandwidth": "500MB/s",
    }
    config = load_config(
        config_of(tiers=[{**DEVICE, "capacity": "4GiB"}, HOST, store]),
        environ={"E": "", "K": "", "S": ""},
    )
    (found,) = config.stored
    assert found.flush.every == 10
    assert found.flush.within_s == 600
    assert found.bandwidth_bytes_per_s == 500_000_000


# The schema.


def sections() -> dict[str, dict[str, Any]]:
    """The schema's sections by the heading that the page gives them."""
    schema = Config.model_json_schema()
    headings = {
        **{
            "IntervalSection": "`interval`",
            "Mtbf": "`mtbf`",
            "CaptureSection": "`capture`",
            "DrainSection": "`drain`",
            "FlushSection": "`flush`",
            "RetainSection": "`retain`",
            "EvictSection": "`evict`",
        },
        **{
            "BestSection": "`best`",
            "CompressSection": "`compress`",
            "HostTierConfig": "A host tier",
            "PeerTierConfig": "A peer tier",
            "FileTierConfig": "A file tier",
        },
        **{"ObjectTierConfig": "An object tier", "DeviceTierConfig": "A device tier"},
        "EventsSection": "`events`",
        "MetricsSection": "`metrics`",
    }
    assert set(headings) == set(schema["$defs"])
    return {"The first level": schema} | {
        headings[name]: part for name, part in schema["$defs"].items()
    }


def placed(heading: str, key: str, value: Any) -> dict[str, Any]:
    """A configuration that is good but for one key, set where its section belongs."""
    stored = {"name": "o", "kind": "object", "url": "s3://b/c"}
    match heading:
        case "The first level":
            return config_of(**{key: value})
        case "`mtbf`":
            times = {"process": "1h", "node": "6h", "site": "100d"}
            return config_of(interval={"mtbf": {**times, key: value}})
        case "`interval`" | "`capture`" | "`drain`" | "`events`" | "`metrics`":
            needed = {"path": "./e.jsonl"} if heading == "`events`" else {}
            return config_of(**{heading.strip("`"): {**needed, key: value}})
        case "A host tier":
            return host_of(**{key: value})
        case "A file tier":
            return tier_of(**{key: value})
        case "A peer tier":
            return peer_of(**{key: value})
        case "An object tier":
            return config_of(tiers=[HOST, {**stored, key: value}])
        case "A device tier":
            return config_of(tiers=[{**DEVICE, key: value}, {**HOST, "name": "h"}])
    around = {
        "`compress`": {"codec": "zstd"},
        "`evict`": {"high": "90%"},
        "`best`": {"metric": "loss"},
    }
    section = heading.strip("`")
    members = {**around.get(heading, {}), key: value}
    if section == "best":
        section, members = "retain", {"best": members}
    return tier_of(capacity="1TiB", **{section: members})


@pytest.fixture
def my_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module that the examples of ``plugins`` name."""
    (tmp_path / "my_plugin.py").touch()
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_plugin", None)


def test_the_documentations_files_are_good_ones() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        load_config(yaml.safe_load(block))


def test_the_schema_serves_editors() -> None:
    for heading, section in sections().items():
        own = heading in ("`retain`", "`interval`")  # policies of a user's own
        of_its_own = {"type": "object"} if own else False
        assert section["additionalProperties"] == of_its_own, heading
        for key, member in section["properties"].items():
            described = "description" in member or "$ref" in member
            assert described, f"{heading}: {key} has no description"
    first = Config.model_json_schema()["properties"]
    assert first["on_error"]["enum"] == ["warn", "raise"]
    assert first["max_wait"]["default"] == "60s"
    assert {"type": "number", "exclusiveMinimum": 0} in first["max_wait"]["anyOf"]
    assert any("pattern" in way for way in first["chunk"]["anyOf"])
    json.dumps(Config.model_json_schema())


@pytest.mark.usefixtures("my_plugin")
def test_the_schemas_examples_are_good_ones() -> None:
    for heading, section in sections().items():
        for key, member in section["properties"].items():
            for example in member.get("examples", []):
                load_config(
                    placed(heading, key, example), environ=os.environ | {"S3_ENDPOINT": "x"}
                )
