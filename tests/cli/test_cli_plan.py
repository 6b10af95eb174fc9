"""``tierfall plan``: its answers follow from its options by hand arithmetic, bad input is refused with the nearest that
works, and what else it reads and writes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from cli_kit import run

import tierfall
from tierfall.config import load_config

GIB = 1 << 30
NVME, S3 = ("--tier", "nvme"), ("--tier", "s3")


def planned(*words: str) -> dict[str, Any]:
    answer = run(["plan", *words, "--json"])
    assert answer.code == 0, answer.err
    return answer.document


def tier(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in found["tiers"] if each["name"] == name)


def test_a_7b_on_a_node_with_a_disk_and_a_bucket() -> None:
    """98 GB: 5 GB/s to the disk, 2.5 GB/s to the bucket, 25 GB/s from each of 8 GPUs."""
    found = planned("7B", *NVME, *S3, "--mtbf", "2d", "--step-time", "1s")
    assert found["checkpoint_bytes"] == 98_000_000_000
    assert found["bytes_by_rank"] == [{"bytes": 12_250_000_000, "ranks": 8}]
    assert [tier(found, name)["copy_s"] for name in ("host", "nvme", "s3")] == [0.49, 19.6, 39.2]
    assert tier(found, "host")["available_bytes_per_s"] == pytest.approx(8 * 25e9)
    assert tier(found, "host")["capacity_bytes"] == 2 * 98e9
    cost_s = 0.01 + 0.02 * 39.2
    assert found["blocking_s"] == pytest.approx(cost_s)
    assert found["intervals"]["young"] == pytest.approx(math.sqrt(2 * cost_s * 2 * 86400))
    assert found["every_s"] == pytest.approx(found["intervals"]["young"], rel=0.01)
    assert found["intervals"]["pccheck"] == 40
    needed = 98e9 / found["every_s"]
    assert tier(found, "s3")["required_bytes_per_s"] == pytest.approx(needed)
    assert tier(found, "s3")["available_bytes_per_s"] == pytest.approx(2.5e9)
    assert tier(found, "nvme")["capacity_bytes"] == 4 * 98e9
    assert found["restore_s"] == {"per_rank": 39.2, "read_once": 39.2, "hierarchical": 39.2}
    left = found["survives"]
    assert [left[lost]["tier"] for lost in ("process", "node", "site")] == ["host", "s3", "s3"]
    trained = 1 / (1 + cost_s / found["every_s"])
    lost = found["lost"]
    assert found["ettr"] == pytest.approx(1 - sum(lost.values()))
    assert lost["saving"] == pytest.approx(1 - trained)
    assert lost["restarts"] == pytest.approx(trained * 300 / (2 * 86400))


def test_the_overhead_sets_the_interval_and_the_slowest_tier_bounds_it() -> None:
    words = ("7B", *S3, "--step-time", "1s")
    cost_s = 0.01 + 0.02 * 39.2
    assert planned(*words, "--overhead", "1%")["every_s"] == math.ceil(cost_s / 0.01)
    found = planned(*words, "--overhead", "50%")
    assert found["every_s"] == 40
    assert "s3 limits the interval: a copy takes 39.2 s" in found["bottlenecks"][0]


def test_a_copy_in_few_saves_needs_less_and_costs_more_after_a_failure() -> None:
    words = ("7B", "--gpus", "16", "--tier", "peers", "--step-time", "1s", "--every", "100s")
    each = planned(*words, "--tier", "s3")
    tenth = planned(*words, "--tier", "s3:every=10,last=5")
    rates = [tier(found, "s3")["required_bytes_per_s"] for found in (each, tenth)]
    assert rates == [98e9 / 100, 98e9 / 1000]
    assert tier(tenth, "s3")["capacity_bytes"] == 6 * 98e9
    assert tenth["survives"]["node"]["tier"] == "peers"
    assert tenth["survives"]["site"]["saves"] == 10
    assert tier(each, "peers")["copy_s"] == pytest.approx(49e9 / 50e9)


def test_what_is_not_given_has_a_source() -> None:
    found = planned("7B")
    assert all(each["source"] for each in found["assumed"])
    named = {each["what"] for each in found["assumed"]}
    assert named >= {"GPUs", "failure", "loss of a node", "restart", "link of a node", "step"}
    given = planned(
        *("7B", "--gpus", "8", "--gpus-per-node", "4", "--host-memory", "1TB", "--step-time", "2s"),
        *("--copy-rate", "10GB/s", "--link", "10GB/s", "--restart", "1m"),
        *("--mtbf", "process=4h,node=12h,site=90d", "--tier", "store:write=1GB/s"),
    )
    assert [each["what"] for each in given["assumed"]] == ["a save costs"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("llama3-405b --tp 7", "tp 7 does not divide 128 attention heads; the nearest .* --tp 8"),
        (
            "llama3-8b --gpus 1000 --tp 32",
            "does not divide 1000 GPUs into equal replicas; .* --gpus 992",
        ),
        ("llama3-8b --ep 2", "ep 2: llama3-8b has no experts; leave --ep out"),
        ("7B --gpus 10 --dp 4", "10 GPUs into 4 replicas; the nearest that works: --gpus 4"),
        ("70B --host-memory 512GiB", "too small for one image of 114 GiB .* --host-memory 1217GiB"),
        ("7B --mtbf process=4h,node=2h", "node every 2h: impossible: a more severe loss"),
        ("7B --mtbf nod=2h", "'nod' is no loss class; .* did you mean \"node\""),
        ("7B --tier s3:write=0GB/s", "tier s3: write: 0 bytes per second is not a rate"),
        (
            "7B --tier s3:wrte=1GB/s",
            "tier s3: 'wrte=1GB/s'; expected s3:write=2TB/s, .* did you mean \"write\"",
        ),
        ("7B --tier lustr", "tier 'lustr' is not known; .* did you mean \"lustre\""),
        ("7B --tier s3 --tier s3", "--tier s3, s3: a name is there twice"),
        ("7B --gpus 16 --tier peers:copies=2", "nodes in all: 2; the nearest that works: copies=1"),
        ("7B --every 10m --overhead 1%", "exclude each other"),
        ("7B --trace x.csv", "expected --failures N"),
        ("llama4-8b", "'llama4-8b' is no model; .* did you mean \"llama3-8b\""),
        ("none.json", "none.json: No such file or directory; expected a config.json"),
        ("", "expected a MODEL"),
    ],
)
def test_bad_input_is_refused_with_what_works(words: str, output: str) -> None:
    answer = run(["plan", *words.split()])
    assert (answer.code, answer.out) == (2, "")
    assert re.search(output, answer.err), answer.err


def test_a_chain_that_cannot_keep_up_is_a_problem_and_what_is_proposed_works() -> None:
    words = ("7B", "--gpus", "8", "--step-time", "1s", "--every", "10s")
    answer = run(["plan", *words, *S3, "--json"])
    assert answer.code == 1
    (problem,) = answer.document["problems"]
    assert "s3 cannot keep up with a save every 10 s: a copy takes 39.2 s" in problem
    assert "--every 40s, or --tier s3:every=4, or --tier s3:write=9800MB/s" in problem
    planned(*words[:-1], "40s", *S3)
    planned(*words, "--tier", "s3:every=4")
    planned(*words, "--tier", "s3:write=9800MB/s")


def test_a_loss_that_leaves_nothing_is_named() -> None:
    found = planned("7B", *NVME, "--mtbf", "process=4h,node=4h")
    assert found["survives"]["node"] is None
    assert found["bottlenecks"][0].startswith("nothing survives the loss of a node, and no ETTR")


QWEN = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 100}
QWEN |= {"num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 8}
HUGE = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 10**9}


def test_an_architecture_that_is_unknown_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, output in (
        ('{"model_type": "qwen4"}', 'not an architecture .* did you mean "qwen'),
        ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size: 'x'; expected a whole"),
        (
            json.dumps({"model_type": "llama", **HUGE}),
            "layers, experts: .* expected 1 to 1,000,000",
        ),
        (json.dumps({**QWEN, "mlp_only_layers": 5}), "mlp_only_layers, decoder_sparse_step: 5, 1"),
        ("[1]", "is no JSON object"),
    ):
        path.write_text(text)
        answer = run(["plan", str(tmp_path)])
        assert answer.code == 2
        assert re.search(output, answer.err), answer.err


# The simulation --------------------------------------------------------------------------------------


def test_a_simulation_agrees_with_the_formula_within_a_percent() -> None:
    words = ("llama3-405b", "--gpus", "16384", "--every", "5m", "--failures", "20")
    found = planned(*words)
    out = found["simulation"]
    assert out["goodput"] == pytest.approx(found["ettr"], rel=0.01)
    assert sum(out["failures"].values()) == pytest.approx(20 * 7 * 24 / 3.093, rel=0.1)
    assert out["restores"].keys() == {"host", "peers"}
    assert planned(*words)["simulation"] == out


def test_a_simulated_loss_of_the_site_is_restored_by_all_nodes(tmp_path: Path) -> None:
    """After the loss of a node the others have their memory; after that of the site all read the bucket: 98 GB."""
    path = tmp_path / "trace.csv"
    words = ("7B", "--gpus", "16", *S3, "--step-time", "1s", "--every", "300s", "--failures", "1")
    for lost, restore_s in (("node", 19.6), ("site", 39.2)):
        path.write_text(f"1d,{lost}")
        out = planned(*words, "--trace", str(path))["simulation"]
        assert out["lost_s"]["restores"] == pytest.approx(restore_s)


def test_a_trace_is_lived_through(tmp_path: Path) -> None:
    """A save each 300 s costs 0.794 s. A process fails 1000 s after the start; a node 2000 s, of which the bucket has
    all but the last 297.9 s; and a process again."""
    path = tmp_path / "trace.csv"
    path.write_text("time,class\n1000s,process\n\n2000,node\n5000\n")
    words = ("7B", *S3, "--step-time", "1s", "--every", "300s", "--restart", "100s")
    out = planned(*words, "--failures", "1", "--trace", str(path))["simulation"]
    assert out["failures"] == {"process": 2, "node": 1}
    assert out["restores"] == {"host": 2, "s3": 1}
    cycle_s, of_host_s, of_store_s = 300.794, 100.49, 139.2
    first = 1000 - 3 * cycle_s
    second = 2000 - 1000 - of_host_s - 2 * cycle_s
    third = 5000 - 2000 - of_store_s - 9 * cycle_s
    assert out["lost_s"]["work lost to a process"] == pytest.approx(first + third)
    assert out["lost_s"]["work lost to a node"] == pytest.approx(second)
    assert (out["lost_s"]["restarts"], round(out["lost_s"]["restores"], 2)) == (300, 40.18)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("1h\n3h,node\n2h\n", ":3: 2h is before the line above, 3 h 00 min"),
        (
            "1h,rack\n",
            ":1: '1h,rack' is no failure; expected a time since the start, and process, node or",
        ),
        ("1h\nsoon\n", ":2: 'soon' is no failure"),
        ("time\n", "there is no failure"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(tmp_path: Path, text: str, output: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    answer = run(["plan", "7B", "--failures", "1", "--trace", str(path)])
    assert (answer.code, answer.out) == (2, "")
    assert output in answer.err


# Files -----------------------------------------------------------------------------------------------

CHAIN: dict[str, Any] = {
    "run": "x",
    "interval": {"every": 60},
    "tiers": [
        {"name": "host", "kind": "host", "capacity": "40GiB"},
        {"name": "disk", "kind": "file", "path": "/local/x", "retain": {"last": 2}},
        {"name": "far", "kind": "file", "path": "/far/x", "shared": True, "bandwidth": "50MB/s"},
    ],
}
CHAIN["tiers"][2] |= {"flush": {"every": 10}, "retain": {"last": 5}}


def test_policies_of_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "tiers.yaml"
    path.write_text(json.dumps(CHAIN))
    words = ("7B", "--gpus", "16", "--step-time", "1s", "--config", str(path))
    found = planned(*words, "--tier", "disk:write=7GB/s")
    assert found["every_s"] == 60
    assert tier(found, "disk")["copy_s"] == pytest.approx(49e9 / 7e9)
    assert tier(found, "disk")["capacity_bytes"] == 3 * 98e9
    assert (tier(found, "far")["survives"], tier(found, "far")["flush_every"]) == ("node", 10)
    assert tier(found, "far")["available_bytes_per_s"] == pytest.approx(16 * 50e6)
    copies_s = 0.02 * 98e9 / 16 / 50e6 / 10
    assert found["blocking_s"] == pytest.approx(0.01 + copies_s)
    path.write_text(json.dumps({**CHAIN, "capture": {"mode": "blocking"}}))
    assert planned(*words)["blocking_s"] == pytest.approx(0.01 + 98e9 / 16 / 25e9 + copies_s)
    path.write_text(json.dumps(CHAIN).replace("40GiB", "4GiB"))
    assert "too small for one image of 5.7 GiB; the nearest" in run(["plan", *words]).err
    path.write_text(json.dumps({**CHAIN, "tiers": CHAIN["tiers"][:1]}))
    assert "no tier below host memory" in run(["plan", *words]).err
    path.write_text(json.dumps(CHAIN))
    answer = run(["plan", *words, "--tier", "dsk:write=1GB/s"])
    assert "tier 'dsk' is not known; expected one of disk, far; did you mean \"disk\"" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("7B", *NVME, *S3),
        ("70B", "--gpus", "64", "--tier", "peers:copies=2", "--tier", "lustre:every=4"),
    ],
)
def test_the_file_that_is_written_loads_and_plans_alike(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = tmp_path / "new.yaml"
    found = planned(*words, "--write", str(path), "--every", "600s")
    config = load_config(path)
    assert [each.name for each in config.stored] == [each["name"] for each in found["tiers"][1:]]
    assert [each.flush.every for each in config.stored] == [
        t["flush_every"] for t in found["tiers"][1:]
    ]
    images = found["bytes_by_rank"][0]["bytes"] * (3 if config.peers else 2)
    assert config.host.capacity_bytes is not None
    assert images < config.host.capacity_bytes < 1.11 * images + GIB
    assert all(each["source"] in path.read_text() for each in found["assumed"])
    again = planned(*words[:3], "--config", str(path))
    assert again["every_s"] == pytest.approx(found["every_s"])
    answer = run(["plan", *words, "--write", str(path)])
    assert (answer.code, f"{path} exists" in answer.err) == (2, True)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    answer = run(["plan", "7B", "--gpus", "16", "--plot", str(path)])
    assert answer.out.endswith(f"drew {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    refused = run(["plan", "7B", "--plot", str(tmp_path / "no" / "plan.png")])
    assert (refused.code, "cannot be drawn" in refused.err) == (2, True)


def test_what_a_run_has_measured_replaces_what_is_assumed(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "run": "r",
        "interval": {"every": 2},
        "events": "./events.jsonl",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(tmp_path / "memory")},
            {"name": "disk", "kind": "file", "path": str(tmp_path / "disk"), "retain": {"last": 2}},
        ],
    }
    path = tmp_path / "tiers.yaml"
    answer = run(["plan", "--from-run", str(tmp_path)])
    assert (answer.code, "no event log (*.jsonl)" in answer.err) == (2, True)
    path.write_text(json.dumps(config))
    state = {"model": torch.nn.Linear(512, 512)}
    for attempt in range(2):
        with tierfall.open(path) as ckpt:
            ckpt.restore(state)
            for step in range(10 * attempt + 1, 10 * attempt + 10):
                ckpt.maybe_save(step, state)
    log = tmp_path / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    hour_s = 3600 + events[-1]["wall_time_s"] - events[0]["wall_time_s"]
    killed = [{**line, "wall_time_s": line["wall_time_s"] - hour_s} for line in events[:-1]]
    log.rename(tmp_path / "events.jsonl.1")
    foreign = {**killed[0], "wall_time_s": None}  # of another program
    log.write_text("".join(json.dumps(line) + "\n" for line in [*killed, foreign]) + '{"cut off')
    found = run(["plan", "--from-run", str(tmp_path), "--json"]).document
    assert found["parameters"] is None
    assert 1 << 20 < found["checkpoint_bytes"] < 1.2 * (1 << 20)
    assert [each["name"] for each in found["tiers"]] == ["host", "disk"]
    assert "step" not in {each["what"] for each in found["assumed"]}
    sources = {each["what"]: each["source"] for each in found["assumed"]}
    assert sources["tier disk"] == "copies of the run"
    assert "failure" not in sources  # of the log's three starts one was killed, in an hour
    restarts = found["lost"]["restarts"] / (1 - found["lost"]["saving"])
    assert restarts == pytest.approx((1 - 0.78) * 300 / 3600, rel=0.1)
    copied = [each["seconds"] for each in events if each["kind"] == "flush_done"]
    assert found["tiers"][1]["copy_s"] == pytest.approx(median(copied))
    assert found["changes"][0].startswith("a save comes every ")
    assert "interval: {every: " in found["changes"][0]
    assert not any("counts as alive" in change for change in found["changes"])
    opened = next(each for each in events if each["kind"] == "opened")
    with log.open("a") as file:
        file.write("\n" + json.dumps({**opened, "wall_time_s": events[-1]["wall_time_s"] + 1}))
    found = run(["plan", "--from-run", str(tmp_path), "--json"]).document
    assert "the last start has not closed: it counts as alive" in found["changes"][-1]
