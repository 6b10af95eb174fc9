"""``check`` forecasts the tiers from options or from the run's own checkpoints, or names what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.steps import state_of
from tierfall.ops import measure as measuring
from tierfall.ops.measure import TierMeasurement

MakeCli = Callable[..., Cli]
SMALL = ("--size", "64KiB")
GIB = 1 << 30


RATES = {"disk": 1e9, "far": 1e6}
FREE: dict[str, int] = {}


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured tiers of a fixed speed and free space, in place of the machine's."""

    def measure(*args: Any) -> tuple[TierMeasurement, ...]:
        found = measuring.measure(*args)
        return tuple(
            replace(
                tier, write_bytes_per_second=RATES.get(tier.name), free_bytes=FREE.get(tier.name)
            )
            for tier in found
        )

    monkeypatch.setattr("tierfall.cli.check.measure", measure)


@pytest.fixture
def cli(make_cli: MakeCli, tmp_path: Path) -> Cli:
    for name in ("disk", "far"):
        (tmp_path / name).mkdir()
    return make_cli(
        disk={"retain": {"last": 3}},
        far={"flush": {"every": 10}, "bandwidth": "1MB/s", "capacity": "100GiB"},
        host={"capacity": "30GiB"},
    )


def test_tiers_are_forecast_by_the_options(cli: Cli) -> None:
    words = ("check", *SMALL, "--image", "9GiB", "--save-every", "10m")
    found = cli.json(*words)["forecast"]
    assert (found["image_bytes"], found["save_every_s"]) == (9 * GIB, 600)
    host, disk, far = found["tiers"]
    assert (host["kept"], host["lost_s"]) == (3, 600)
    assert (disk["every_s"], disk["kept"], disk["bytes_max"]) == (600, 3, 36 * GIB)
    assert disk["lost_s"] == pytest.approx(600 + 9 * GIB / 1e9)
    assert (far["every_s"], far["lost_s"]) == (6000, None)
    assert far["copy_s"] == 9 * GIB / 1e6
    output = (
        "falls behind by 0.23 checkpoints an hour: images come at 1.6 MB/s, and it takes 1 MB/s"
    )
    assert far["reasons"][0].startswith(output)
    text = cli(*words).out
    assert "with a save every 10 min 00 s of 9 GiB (by the options):" in text
    assert f"far: {output}" in text


def test_memory_is_forecast_with_as_many_images_as_it_may_have(cli: Cli) -> None:
    """30 GiB have room for 15,360 images of 2 MiB; memory takes 63."""
    words = ("check", *SMALL, "--image", "2MiB", "--save-every", "10m")
    host = cli.json(*words)["forecast"]["tiers"][0]
    assert (host["kept"], host["bytes_max"]) == (63, 63 * 2 << 20)


def test_a_share_and_a_bound_on_how_far_a_tier_is_behind_count(cli: Cli) -> None:
    """Half of 1 MB/s takes 2000 s for what comes every 500 s."""
    host, disk, far = cli.config["tiers"]
    far = {**far, "bandwidth": "50%", "flush": {"every": 1, "within": "1h"}}
    cli.configure({**cli.config, "tiers": [host, disk, far]})
    words = ("--image", "1GB", "--save-every", "500s")
    found = cli.json("check", *SMALL, *words)["forecast"]["tiers"][2]
    assert found["copy_s"] == 2000
    late = "copies arrive later than 1 h 00 min after their save (flush.within)"
    assert late in found["reasons"]


def test_a_run_that_has_saved_tells_the_rest(cli: Cli) -> None:
    host, disk, _ = cli.config["tiers"]
    with tierfall.open({**cli.config, "tiers": [host | {"capacity": "4MiB"}, disk]}) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, state_of(step), block=True)
    found = cli.json("check", *SMALL, "--save-every", "10m")["forecast"]
    assert 80_000 < found["image_bytes"] < 200_000
    assert found["save_every_s"] == 600
    assert "(by the options and the run)" in cli("check", *SMALL, "--save-every", "10m").out
    out = cli("check", *SMALL).out
    assert "(by the run's own checkpoints)" in out
    assert "if the process dies: 30@1 is left, on disk, read back in " in out
    cost = cli.json("check", *SMALL)
    read = next(tier["read_bytes_per_second"] for tier in cost["tiers"] if tier["name"] == "disk")
    assert 80_000 < cost["loss_bound"]["process"]["restore_seconds"] * read < 200_000


def test_what_is_missing_is_named(cli: Cli) -> None:
    found = cli.json("check", *SMALL)
    assert (found["forecast"], found["loss_bound"]) == (None, None)
    assert "no forecast: it needs the size" in cli("check", *SMALL).out
    assert "no forecast" in cli("check", *SMALL, "--image", "9GiB", "--step-time", "2s").out


def test_options_that_make_no_sense_are_refused(cli: Cli) -> None:
    for words, output in (
        (("--image", "9Gib"), "'--image': unknown unit"),
        (
            ("--image", "9"),
            "'--image': '9' is 9 bytes, less than 1KiB; expected a size such as 16GiB",
        ),
        (("--steps-per-hour", "nan"), "'--steps-per-hour': 'nan' is invalid"),
        (("--step-time", "1s", "--steps-per-hour", "9"), "exclude each other"),
        (("--ranks", "2", "--nodes", "3"), "--nodes: 3 nodes are more than 2 ranks"),
    ):
        answer = cli("check", *words, code=2)
        assert output in answer.err
        assert answer.out == ""


# Room ------------------------------------------------------------------------------------------------


def reasons(cli: Cli, *words: str) -> str:
    found = cli.json("check", *SMALL, "--save-every", "10m", *words)["forecast"]
    return "\n".join(found["tiers"][1]["reasons"])
