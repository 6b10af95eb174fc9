"""Every key of the YAML file has its effect or its default, and each wrong value an error with file, line, key, what
was expected and the nearest word."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tierfall
from tests.contract.kit import ROOT, Place, blank, state_of, wait_until
from tierfall.errors import ConfigError

SOON_S = 20.0
DOCUMENT = (ROOT / "docs/configuration.md").read_text()
HOST = {"name": "host", "kind": "host"}
DISK = {"name": "disk", "kind": "file", "path": "./c"}
STORE = {"name": "store", "kind": "object", "url": "s3://bucket/x"}
DEVICE = {"name": "device", "kind": "device", "capacity": "1GiB"}
PEERS = {"name": "peers", "kind": "peer"}


def run_of(**members: Any) -> dict[str, Any]:
    return {"run": "x", "tiers": "./c", **members}


def disk_of(**members: Any) -> dict[str, Any]:
    return {"run": "x", "tiers": [HOST, {**DISK, **members}]}


def host_of(**members: Any) -> dict[str, Any]:
    return {"run": "x", "tiers": [{**HOST, **members}, DISK]}


def store_of(**members: Any) -> dict[str, Any]:
    return {"run": "x", "tiers": [HOST, {**STORE, **members}]}


def peers_of(**members: Any) -> dict[str, Any]:
    return {"run": "x", "tiers": [HOST, {**PEERS, **members}, DISK]}


def problems(source: Any) -> list[str]:
    """What is wrong with a configuration, a line each; none if it is accepted."""
    try:
        tierfall.load(source)
    except ConfigError as error:
        first, *others = str(error).splitlines()
        return [line.strip() for line in others] if others else [first]
    except (tierfall.errors.TierfallError, ValueError):
        return []
    return []


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """``wrong(text)``: the problems of a file with this text, named ``tiers.yaml``."""
    monkeypatch.chdir(tmp_path)

    def found(text: str) -> list[str]:
        Path("tiers.yaml").write_text(text)
        return problems("tiers.yaml")

    return found


# The document ----------------------------------------------------------------------------------------


def documented() -> list[tuple[str, str, str]]:
    """Heading, key and example of each row of a table of keys."""
    found, heading = [], ""
    for line in DOCUMENT.splitlines():
        if line.startswith("#"):
            heading = line.strip("# `")
        row = re.match(r"\| `(\w+)` \|.*\| (?:`(.*)` )?\|$", line)
        if row:
            found.append((heading, row[1], row[2] or ""))
    return found


def with_key(heading: str, key: str, value: Any) -> dict[str, Any]:
    """A good configuration with this key of a table of the document."""
    tiers = {
        "A host tier": HOST,
        "A file tier": DISK,
        "A peer tier": PEERS,
        "An object tier": STORE,
        "A device tier": DEVICE,
    }
    if heading in tiers:
        tier = {**tiers[heading], key: value}
        chains = {"device": [tier, HOST, DISK], "host": [tier, DISK], "peer": [HOST, tier, DISK]}
        return {"run": "x", "tiers": chains.get(tier["kind"], [HOST, tier])}
    if heading == "The first level":
        return run_of(**{key: value})
    if heading == "mtbf":
        return run_of(interval={"mtbf": {key: value}})
    if heading in ("flush", "retain", "evict", "compress"):
        section = {key: value}
        if heading == "evict":
            section.update({"high": "90%"} if key == "low" else {})
            return disk_of(evict=section, capacity="1GiB")
        if key == "level":
            section["codec"] = "zstd"
        return disk_of(**{heading: section})
    if heading == "best":
        return disk_of(retain={"best": {"metric": "loss", key: value}})
    section = {"path": "./e", key: value} if heading == "events" else {key: value}
    return run_of(**{heading: section})


def test_every_key_of_the_document_is_accepted_with_its_example(tmp_path: Path) -> None:
    rows = [row for row in documented() if row[2]]
    assert len(rows) > 80
    refused = {}
    for heading, key, example in rows:
        if (heading, key) == ("The first level", "plugins"):
            continue
        try:
            tierfall.Config.model_validate(with_key(heading, key, yaml.safe_load(example)))
        except ValueError as error:
            refused[heading, key] = str(error)
    assert refused == {}


def test_the_document_has_every_key_of_the_schema_and_no_other() -> None:
    schema = tierfall.Config.model_json_schema()
    keys = set(schema["properties"])
    for part in schema["$defs"].values():
        keys |= set(part.get("properties", ()))
    assert {key for _, key, _ in documented()} == keys


def test_nulls_stand_for_defaults_and_a_model_is_accepted_as_it_is(place: Place) -> None:
    config = place.config()
    config["tiers"][1].update(shared=None, capacity=None, retain={"last": None, "best": None})
    config["interval"] = None
    made = tierfall.Config.model_validate(config)
    with tierfall.open(made) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    assert place.steps() == [1]
    assert tierfall.Config.model_validate(json.loads(made.model_dump_json())) == made


# Where the file is, and which run --------------------------------------------------------------------


def test_the_file_is_named_by_option_variable_or_place(place: Place) -> None:
    place.config()
    place.save(1)
    from tests.contract.kit import tierfall_command

    def latest(*words: str, **environment: str) -> str:
        return tierfall_command("latest", *words, cwd=place.root, **environment).out

    assert latest("--config", "tiers.yaml") == latest("-c", str(place.yaml)) == latest() == "1@1\n"
    place.yaml = place.yaml.rename(place.root / "other.yaml")
    answer = tierfall_command("latest", cwd=place.root)
    assert (answer.code, answer.out) == (2, "")
    assert re.search("--config.*TIERFALL_CONFIG|TIERFALL_CONFIG.*--config", answer.err)
    assert latest(TIERFALL_CONFIG=str(place.yaml)) == "1@1\n"
    (place.root / "tiers.yaml").write_text("{run: none, tiers: ./none}")
    assert latest(TIERFALL_CONFIG=str(place.yaml)) == "1@1\n", "the variable first"
    assert latest("-c", "tiers.yaml", TIERFALL_CONFIG=str(place.yaml)) == ""


def test_the_run_may_be_named_outside_of_the_file(place: Place) -> None:
    config = place.config()
    del config["run"]
    place.write(config)
    with pytest.raises(ConfigError, match="run: missing"):
        place.open()
    with place.open(run="outside") as ckpt:
        ckpt.save(1, state_of(1), block=True)
    assert (place.root / "disk/outside/latest").exists()
    assert place.cli("latest", "--run", "outside").out == "1@1\n"
    for name in ("../x", "a b", "", ".hidden", "x" * 201):
        with pytest.raises(ConfigError, match="run"):
            place.open(run=name)


def test_variables_are_filled_in_anywhere_in_text(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WHERE": str(place.root / "disk"), "WHO": "me", "N": "2"}.items():
        monkeypatch.setenv(f"TIERFALL_TEST_{name}", value)
    place.config(
        disk={"path": "${env:TIERFALL_TEST_WHERE}", "retain": {"last": "${env:TIERFALL_TEST_N}"}},
        run="of-${env:TIERFALL_TEST_WHO}",
    )
    place.save(1, 2, 3)
    found = (place.root / "disk/of-me").glob("step-*/commit.json")
    wait_until(lambda: len(list((place.root / "disk/of-me").glob("step-*/commit.json"))) == 2, "2")
    assert found


def test_a_variable_that_is_not_set_or_no_reference_is_named_with_its_place(
    wrong: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    text = "run: x\ntiers:\n- {name: host, kind: host}\n- {name: d, kind: file, path: '%s/c'}\n"
    for reference, words in {
        "${env:NOPE}": "NOPE is not set",
        "${NOPE}": r"\$\{env:NOPE\}",
        "$NOPE": r"\$\{env:NOPE\}",
        "${env:}": "is not a reference",
        "${env:A": "is not a reference",
    }.items():
        (line,) = wrong(text % reference)
        assert re.match(rf"tiers\.yaml:4: tiers\[1\]\.path: .*{words}", line), line


def test_no_message_shows_what_a_variable_holds(
    wrong: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERFALL_TEST_SECRET", "hunter2")
    for source in (
        run_of(max_wait="${env:TIERFALL_TEST_SECRET}"),
        run_of(interval={"every": "${env:TIERFALL_TEST_SECRET}"}),
        disk_of(capacity="${env:TIERFALL_TEST_SECRET}"),
        disk_of(compress={"codec": "${env:TIERFALL_TEST_SECRET}"}),
        store_of(zebra="${env:TIERFALL_TEST_SECRET}"),
        store_of(options="${env:TIERFALL_TEST_SECRET}"),
    ):
        found = wrong(yaml.safe_dump(source))
        assert found, source
        assert "hunter2" not in "\n".join(found)


# Wrong values ----------------------------------------------------------------------------------------


OF_PEERS = {
    "retain": {"last": 2},
    "evict": {"order": "oldest"},
    "compress": {"codec": "zstd"},
    "capacity": "4GiB",
    "read_bandwidth": "1GB/s",
    "when_full": "skip",
    "shared": False,
    "read_only": True,
}
"""Keys that peer memory had once, or that other tiers have."""
GONE = "remove it|leave|write it there"

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tiers": "./c"}, "run", "missing"),
    ({"run": "x"}, "tiers", "missing"),
    (run_of(run="../x"), "run", "not a usable name"),
    (run_of(run=7), "run", 'quotes: "7"'),
    (run_of(run=None), "run", "empty"),
    (run_of(tiers=[]), "tiers", "empty"),
    (run_of(tiers=7), "tiers", "expected a list"),
    (run_of(tiers=[7]), "tiers[0]", "expected a mapping"),
    (run_of(tiers=["./c"]), "tiers[0]", "kind: file"),
    (
        run_of(tiers=[{"name": "a"}]),
        "tiers[0].kind",
        "expected one of device, host, peer, file, object",
    ),
    (run_of(interval=100), "interval", r"\{every: 100\}"),
    (run_of(interval={"every": 100, "overhead": "3%"}), "interval", "every and overhead"),
    (run_of(interval={"overhead": "0%"}), "interval.overhead", "3.5%"),
    (run_of(interval={"overhead": "100%"}), "interval.overhead", "leaves no time"),
    (run_of(interval={"overhead": 0.05}), "interval.overhead", "such as 5%"),
    (run_of(interval={"mtbf": "0s"}), "interval.mtbf.process", "4h"),
    (run_of(interval={"mtbf": {"process": "2h", "node": "1h"}}), "interval.mtbf", "more severe"),
    (run_of(interval={"mtbf": {"rack": "2h"}}), "interval.mtbf.rack", "process"),
    (run_of(interval={"every": 0}), "interval.every", "whole number"),
    (run_of(interval={"every": True}), "interval.every", "does not fit"),
    (run_of(interval={"every": 1.5}), "interval.every", "does not fit"),
    (run_of(interval={"every": "0s"}), "interval.every", "above 0"),
    (run_of(interval={"every": "100 steps"}), "interval.every", "expected 100"),
    (run_of(interval={"every": "1h30m"}), "interval.every", "90m"),
    (
        run_of(interval={"on_signal": ["SIGKILL"]}),
        "interval.on_signal[0]",
        "continue after SIGKILL",
    ),
    (run_of(interval={"on_signal": "SIGUSR1"}), "interval.on_signal", r"\[SIGUSR1\]"),
    (run_of(drain={"on_signal": ["SIGUSR1", "SIGSTOP"]}), "drain.on_signal[1]", "SIGSTOP"),
    (run_of(drain={"on_signal": []}), "drain.on_signal", r"\[SIGTERM\]"),
    (run_of(drain=True), "drain", "expected a mapping"),
    (run_of(drain={"deadline": "soon"}), "drain.deadline", "25s|such as"),
    (run_of(capture={"verify": 1}), "capture.verify", "sample, full, off"),
    (run_of(capture={"threads": 0}), "capture.threads", "1 or more"),
    (run_of(capture={"bandwidth": "10GB"}), "capture.bandwidth", "GB/s"),
    (run_of(on_error="ignore"), "on_error", "warn, raise"),
    (run_of(max_wait=-1), "max_wait", "above 0"),
    (run_of(max_wait=0), "max_wait", "above 0"),
    (run_of(max_wait="forever"), "max_wait", "such as"),
    (run_of(chunk="6KiB"), "chunk", "multiple of 4KiB from 4KiB to 1GiB"),
    (run_of(chunk="2GiB"), "chunk", "multiple of 4KiB"),
    (run_of(chunk=0), "chunk", "does not fit"),
    (run_of(verify_bandwidth="64MiB"), "verify_bandwidth", "MiB/s"),
    (run_of(events="s3://b/c"), "events.path", "expected a file"),
    (run_of(events={"path": "./e", "max": "1KiB"}), "events.max", "64 ?KiB"),
    (run_of(events={"path": "./e-{host}"}), "events.path", r"\{host\}"),
    (run_of(events={"max": "1MiB"}), "events.path", "missing"),
    (run_of(events={"path": "./e", "maximum": 1}), "events.maximum", "max"),
    (run_of(metrics={"prometheus": 99999}), "metrics.prometheus", "65535|port"),
    (run_of(metrics={}), "metrics.prometheus", "missing"),
    (run_of(plugins=["no_such_module_of_ours"]), "plugins[0]", "no_such_module_of_ours"),
    (host_of(retain={"last": 3}), "tiers[0].retain", "key of a"),
    (host_of(path="/dev/shm"), "tiers[0].path", "folder"),
    (host_of(capacity=0), "tiers[0].capacity", "less than 1KiB"),
    (host_of(when_full=None), "tiers[0].when_full", "wait, skip"),
    (host_of(on_close="free"), "tiers[0].on_close", "release"),
    (host_of(folder="s3://b/c"), "tiers[0].folder", "address"),
    (disk_of(path=""), "tiers[1].path", r"\./checkpoints"),
    (disk_of(path="s3://key:secret@b/c"), "tiers[1].path", "kind: object"),
    (disk_of(shared="maybe"), "tiers[1].shared", "true or false"),
    (disk_of(capacity="10%"), "tiers[1].capacity", "16GiB"),
    (disk_of(capacity="-1GiB"), "tiers[1].capacity", "16GiB"),
    (disk_of(bandwidth=0), "tiers[1].bandwidth", "not a rate"),
    (disk_of(bandwidth="120%"), "tiers[1].bandwidth", "more than the whole"),
    (disk_of(bandwidth="100Mbit/s"), "tiers[1].bandwidth", "12.5MB/s"),
    (disk_of(bandwidth="8 Gbps"), "tiers[1].bandwidth", "1GB/s"),
    (disk_of(read_bandwidth="50%"), "tiers[1].read_bandwidth", "500MB/s"),
    (disk_of(max_wait="1m30s"), "tiers[1].max_wait", "90s"),
    (disk_of(flush=10), "tiers[1].flush", r"\{every: 1"),
    (disk_of(flush={"every": 0}), "tiers[1].flush.every", "1 or more"),
    (disk_of(flush={"every": "10m"}), "tiers[1].flush.every", "whole number"),
    (disk_of(flush={"within": 0}), "tiers[1].flush.within", "above 0"),
    (disk_of(flush={"yield": "maybe"}), "tiers[1].flush.yield", "true or false"),
    (disk_of(retain=3), "tiers[1].retain", r"\{last: 3\}"),
    (disk_of(retain={"last": 0}), "tiers[1].retain.last", "1 or more"),
    (disk_of(retain={"last": "three"}), "tiers[1].retain.last", "whole number"),
    (disk_of(retain={"best": "loss"}), "tiers[1].retain.best", "metric: loss"),
    (disk_of(retain={"best": {}}), "tiers[1].retain.best.metric", "missing"),
    (disk_of(retain={"for": "forever"}), "tiers[1].retain.for", "such as"),
    (disk_of(retain={"tags": []}), "tiers[1].retain.tags", "true"),
    (disk_of(evict={"high": 0.9}), "tiers[1].evict.high", "90%"),
    (disk_of(evict={"high": "50%", "low": "60%"}), "tiers[1].evict", "high"),
    (disk_of(compress="zstd"), "tiers[1].compress", "codec: zstd"),
    (disk_of(compress={"codec": "zstd", "level": 99}), "tiers[1].compress.level", "19"),
    (disk_of(name="a/b"), "tiers[1].name", "usable name"),
    (disk_of(name="host"), "tiers[1].name", r"tiers\[0\]"),
    (store_of(url="b/c"), "tiers[1].url", "s3://"),
    (store_of(url="s3://"), "tiers[1].url", "bucket"),
    (store_of(options=7), "tiers[1].options", "mapping"),
    ({"run": "x", "tiers": [DISK]}, "tiers", "no host tier"),
    ({"run": "x", "tiers": [DISK, HOST]}, "tiers[1].kind", "earlier"),
    ({"run": "x", "tiers": [HOST, DEVICE]}, "tiers[1].kind", "earlier"),
    ({"run": "x", "tiers": [HOST, {**HOST, "name": "b"}]}, "tiers[1].kind", "second host tier"),
    ({"run": "x", "tiers": [HOST, {**PEERS, "copies": 0}]}, "tiers[1].copies", "1 or more"),
    (run_of(tiers=["./c", "s3://b"]), "tiers[1]", "kind: object"),
    (run_of(tiers=None), "tiers", "empty value"),
    (run_of(tiers={"host": {}, "disk": "./c"}), "tiers", "expected a list"),
    (run_of(tiers=[{"kind": "host"}, {"kind": "file", "path": "c"}]), "tiers[1].name", "missing"),
    (run_of(interval="10m"), "interval", r"\{every: 10m\}"),
    (run_of(interval={"every": "1e3"}), "interval.every", "whole number"),
    (run_of(interval={"steps": 100}), "interval.steps", "one of every, overhead"),
    (run_of(interval={"overhead": 5}), "interval.overhead", "not a share"),
    (run_of(capture="lazy"), "capture", r"\{mode: lazy\}"),
    (run_of(capture={"mode": "async"}), "capture.mode", "lazy, blocking"),
    (run_of(drain="30s"), "drain", r"\{deadline: 30s\}"),
    (run_of(chunk="5MB"), "chunk", "multiple of 4KiB"),
    (run_of(chunk=16), "chunk", "multiple of 4KiB"),
    (run_of(events=True), "events", r"\{path: \./events\.jsonl\}"),
    (host_of(size="3GB"), "tiers[0].size", "one of name, kind, capacity"),
    (disk_of(bandwidth="1Gb/s"), "tiers[1].bandwidth", "0.125GB/s"),
    (disk_of(capacity=16), "tiers[1].capacity", "less than 1KiB"),
    (disk_of(when_full="drop"), "tiers[1].when_full", "wait, skip"),
    (disk_of(flush="always"), "tiers[1].flush", r"\{every: 1\}"),
    (disk_of(flush={"each": 10}), "tiers[1].flush.each", "one of every, order"),
    (disk_of(flush={"order": "lifo"}), "tiers[1].flush.order", "in_order, newest_first"),
    (disk_of(retain={"keep": 3}), "tiers[1].retain.keep", "one of last, every"),
    (disk_of(evict="oldest"), "tiers[1].evict", r"\{order: oldest\}"),
    (disk_of(compress={"codec": "lz4"}), "tiers[1].compress.codec", "none, zstd, planes"),
    (store_of(path="s3://b"), "tiers[1].path", "write an address as url"),
    (store_of(keep_free="10%"), "tiers[1].keep_free", "set capacity"),
    (disk_of(keep_free="110%"), "tiers[1].keep_free", "more than the whole"),
    (disk_of(keep_free="10"), "tiers[1].keep_free", "such as 16GiB"),
    # at the wrong level, or by the name of another program
    (run_of(verify="full"), "verify", "under capture"),
    (run_of(retain={"last": 3}), "retain", "key of a tier"),
    (run_of(every=10), "every", "under interval"),
    (run_of(deadline="5s"), "deadline", "under drain"),
    (disk_of(last=3), "tiers[1].last", "under retain"),
    (disk_of(codec="zstd"), "tiers[1].codec", "under compress"),
    (disk_of(every=3), "tiers[1].every", "under flush or retain"),
    (disk_of(interval={"every": 3}), "tiers[1].interval", "at the top"),
    (disk_of(url="s3://b"), "tiers[1].url", "kind: object"),
    (store_of(endpoint="http://x"), "tiers[1].endpoint", "endpoint_url"),
    (run_of(zebra=1), "zebra", "expected one of run, plugins, interval"),
    # what there was once: it is answered by what is there instead
    (run_of(capture={"mode": "auto"}), "capture.mode", "one of lazy, blocking; leave mode out"),
    (peers_of(parity={"group": 4}), "tiers[1].parity", "write copies: N"),
    *((peers_of(**{key: value}), f"tiers[1].{key}", GONE) for key, value in OF_PEERS.items()),
    (peers_of(flush={"yield": False}), "tiers[1].flush", "flush.every only"),
    ({"run": "x", "tiers": [HOST, PEERS]}, "tiers[1].kind", "no tier of kind file or object"),
    (store_of(url="gs://bucket", driver="obstore"), "tiers[1].driver", "remove driver"),
    (run_of(tiers="tiers://run/step-1"), "tiers", "not saved or loaded by a path; .*TierWriter"),
]

MISSPELT: list[tuple[dict[str, Any], str, str]] = [
    (run_of(on_error="Raise"), "on_error", "raise"),
    (run_of(drain={"on_signal": ["TERM"]}), "drain.on_signal[0]", "SIGTERM"),
    (host_of(kind="memory"), "tiers[0].kind", "host"),
    (disk_of(bandwidth_read="1GB/s"), "tiers[1].bandwidth_read", "bandwidth"),
    (disk_of(max_wait="90 seconds"), "tiers[1].max_wait", "s"),
    (disk_of(capacity="16G"), "tiers[1].capacity", "GiB"),
    (disk_of(compression="zstd"), "tiers[1].compression", "compress"),
    (run_of(Run="x"), "Run", "run"),
    ({"run": "x", "tier": "./c"}, "tier", "tiers"),
    (run_of(interval={"evry": 1}), "interval.evry", "every"),
    (run_of(capture={"mode": "lzay"}), "capture.mode", "lazy"),
    (run_of(capture={"verify": "ful"}), "capture.verify", "full"),
    (run_of(interval={"on_signal": ["SIGTRM"]}), "interval.on_signal[0]", "SIGTERM"),
    (run_of(max_wait="1min"), "max_wait", "m"),
    (host_of(capacity="16GIB"), "tiers[0].capacity", "GiB"),
    (host_of(when_full="supercede"), "tiers[0].when_full", "supersede"),
    (host_of(kind="ram"), "tiers[0].kind", "host"),
    (disk_of(kind="fil"), "tiers[1].kind", "file"),
    (disk_of(kind="NVMe"), "tiers[1].kind", "file"),
    (disk_of(kind="s3"), "tiers[1].kind", "object"),
    (disk_of(bandwidth="500MB"), "tiers[1].bandwidth", "MB/s"),
    (disk_of(capacity="3 gigabytes"), "tiers[1].capacity", "GB"),
    (disk_of(flush={"evry": 10}), "tiers[1].flush.evry", "every"),
    (disk_of(flush={"order": "newest"}), "tiers[1].flush.order", "newest_first"),
    (disk_of(retain={"lst": 10}), "tiers[1].retain.lst", "last"),
    (disk_of(evict={"ordr": "oldest"}), "tiers[1].evict.ordr", "order"),
    (disk_of(compress={"codec": "zst"}), "tiers[1].compress.codec", "zstd"),
    (disk_of(retention={"last": 3}), "tiers[1].retention", "retain"),
    (store_of(option={}), "tiers[1].option", "options"),
    (disk_of(keep_last=3), "tiers[1].keep_last", "retain: {last: N}"),
    (disk_of(retain={"max_to_keep": 3}), "tiers[1].retain.max_to_keep", "retain: {last: N}"),
    (run_of(save_total_limit=3), "save_total_limit", "retain: {last: N}"),
]


def faults_of(
    wrong: Callable[[str], list[str]], source: dict[str, Any], key: str, words: str
) -> str | None:
    """What the answer to a wrong file lacks; None if it names the line, the key and these words."""
    text = yaml.safe_dump(source, sort_keys=False)
    found = wrong(text)
    pattern = rf"tiers\.yaml:(\d+): {re.escape(key)}(?:[.\[][^:]*)?: .*(?:{words})"
    for line in found:
        if match := re.match(pattern, line):
            break
    else:
        return f"{found}, expected {pattern}"
    last = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
    shown = text.splitlines()[int(match[1]) - 1]
    if f"{last}:" in text and f"{last}:" not in shown and "[" not in key[-3:]:
        return f"line {match[1]} is {shown!r}, not that of {key}"
    return None


@pytest.mark.parametrize("part", range(4))
def test_a_wrong_value_is_named_by_line_and_key_with_what_was_expected(
    wrong: Callable[[str], list[str]], part: int
) -> None:
    found = [faults_of(wrong, *row) for row in WRONG[part::4]]
    assert not any(found), "\n".join(filter(None, found))


def test_a_misspelt_word_is_answered_by_the_nearest_one(
    wrong: Callable[[str], list[str]],
) -> None:
    found = {}
    for source, key, nearest in MISSPELT:
        found[key, nearest] = faults_of(wrong, source, key, f'did you mean "{nearest}"')
        assert str(problems("tiers.yaml")).count("did you mean") == 1, key
    assert not any(found.values()), "\n".join(filter(None, found.values()))


def test_a_path_is_no_longer_an_address_of_tiers() -> None:
    with pytest.raises(ConfigError, match=r"not saved or loaded by a path; .*TierReader"):
        tierfall.load("tiers://run/step-00000003")


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(
    wrong: Callable[[str], list[str]],
) -> None:
    found = wrong(
        "run: a b\nmax-wait: 3s\nchunk: 5KiB\n"
        "tiers:\n"
        "- {name: host, kind: hst}\n"
        "- name: d\n  kind: file\n  capacity: 3Gb\n"
        "- {name: d, kind: file, path: ./c, retain: 3}\n"
    )
    assert [line.split(": ")[0] for line in found] == [
        f"tiers.yaml:{number}" for number in (1, 2, 3, 5, 6, 8, 9, 9)
    ]


def test_a_file_that_is_no_configuration_is_refused_with_its_place(
    wrong: Callable[[str], list[str]],
) -> None:
    for text, message in {
        "": r"tiers\.yaml: the file is empty",
        "- run\n": r"tiers\.yaml:1: expected a mapping",
        "run x\n": r"tiers\.yaml:1: expected a mapping",
        "run: x\ntiers:\n  - {a: b]\n": r"tiers\.yaml:3:10: not valid YAML",
        "run: r\ntiers:\n\t- name: host\n": r"tiers\.yaml:3:1: a tab",
        "run: x\nrun: y\ntiers: ./c": r"tiers\.yaml:2: run: the key occurs twice",
        "run: x\ntiers: ./c\n---\nrun: y\n": r"tiers\.yaml:3:1: not valid YAML",
        "&a {run: *a}": r"tiers\.yaml:1:1: not valid YAML",
        "run: !!python/object/apply:os.system [x]": r"tiers\.yaml:1:6: not valid YAML",
        "run: r\ntiers: ["
        + "1, " * 20_000
        + "1]": r"tiers\.yaml:\d+:\d+: not valid YAML: more than",
        "#" * (1 << 18): r".*128 KiB",
    }.items():
        found = wrong(text)
        assert found, text
        assert re.match(message, found[0]), found


def test_a_file_that_cannot_be_read_is_refused_with_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"run: \xff\n")
    for source, message in {
        tmp_path / "none.yaml": "no such file",
        tmp_path / "latin.yaml": "UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=message):
            tierfall.open(source)
    with pytest.raises(ConfigError, match="got int"):
        tierfall.open(7)  # type: ignore[arg-type]


def test_a_dict_has_places_and_no_lines() -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.flush\.every: 0 does not fit"):
        tierfall.open(disk_of(flush={"every": 0}))


# What keys do: the first level -----------------------------------------------------------------------


def test_interval_every_may_be_a_time(place: Place) -> None:
    place.config(interval={"every": "200ms"})
    began, saved = time.monotonic(), 0
    with place.open() as ckpt:
        for step in range(1, 51):
            saved += ckpt.maybe_save(step, state_of(step)) is not None
            time.sleep(0.01)
    assert 1 <= saved <= (time.monotonic() - began) / 0.2


@pytest.mark.parametrize(
    ("interval", "bound"),
    [(None, "overhead"), ({"overhead": "10%"}, "overhead"), ({"mtbf": "4h"}, "failures")],
    ids=["default", "overhead", "mtbf"],
)
def test_a_measured_interval_follows_from_the_cost_of_a_save(
    place: Place, interval: dict[str, Any] | None, bound: str
) -> None:
    place.config(**({"interval": interval} if interval else {}), host={"capacity": "16MiB"})
    with place.open() as ckpt:
        assert ckpt.statistics().cadence.bound == "measuring"
        found = [step for step in range(1, 200) if ckpt.maybe_save(step, state_of(step))]
        cadence = ckpt.statistics().cadence
        assert found[0] == 13, "after two steps that compile and allocate, and ten that are counted"
        assert cadence.step_s > 0
        assert cadence.bound in (bound, "durable", "measuring")
        assert cadence.reason


def test_chunk_is_the_unit_of_digests(place: Place) -> None:
    for chunk, size in (("4KiB", 4096), ("1MiB", 1 << 20)):
        place.config(chunk=chunk, run=f"of-{chunk}")
        place.save(1)
        (path,) = (place.root / f"disk/of-{chunk}").glob("step-*/rank-00000-of-00001.json")
        manifest = json.loads(path.read_text())
        assert manifest["chunk_bytes"] == size
        data = manifest["image_bytes"] - manifest["data_start"]
        assert len(manifest["chunks"]) == 1 + -(-data // size)


def test_verify_bandwidth_limits_what_is_read_before_a_deletion(place: Place) -> None:
    """The restore reads memory. At 1 kB/s no copy on the disk is verified in this test: nothing is deleted there."""
    host = {"capacity": "16MiB", "on_close": "keep"}
    place.config(host=host)
    with place.open() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step, elements=200_000), block=True)
    for rate, wanted in (("1kB/s", 3), ("1GB/s", 2)):
        place.config(host=host, disk={"retain": {"last": 2}}, verify_bandwidth=rate)
        with place.open() as ckpt:
            ckpt.restore(blank(elements=200_000))
            if wanted == 3:
                time.sleep(0.3)
                assert len(place.folders()) == 3
            else:
                wait_until(lambda: len(place.folders()) == 2, "step 1 goes")


def test_plugins_are_imported_beside_the_file_for_training_and_commands(place: Place) -> None:
    (place.root / "tierfall_contract_rules.py").write_text(
        "from tierfall.policies import register\nprint('imported', __name__)\n"
    )
    place.config(plugins=["tierfall_contract_rules"])
    answer = place.run("tierfall.open('tiers.yaml').close()")
    assert (answer.code, answer.out.count("imported")) == (0, 1), answer.err
    assert "imported" in place.cli("ls").out + place.cli("ls").err
    (place.root / "tierfall_contract_broken.py").write_text("import no_such_thing\n")
    place.config(plugins=["tierfall_contract_broken"])
    with pytest.raises(ConfigError, match=r"(?s)tiers\.yaml:1: plugins\[0\].*no_such_thing"):
        place.open()


def test_a_drain_is_for_the_main_thread_and_ends_the_process_by_its_signal(place: Place) -> None:
    place.config(disk={"bandwidth": "300kB/s"}, drain={"on_signal": ["SIGUSR2"], "deadline": "20s"})
    program = place.start_with_a_step_in_memory()
    program.signal(signal.SIGUSR2)
    answer = program.end()
    assert answer.code == -signal.SIGUSR2
    assert place.steps() == [1]
    assert place.restored().step == 1
