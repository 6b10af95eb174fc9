"""``bandwidth`` limits what is written to a tier, ``read_bandwidth`` what is read from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cli_kit import Cli

import tierfall
from tests.steps import blank, state_of, step_in

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


@contextmanager
def no_longer_than(limit_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


def test_a_limit_of_writes_slows_no_reader(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> None:
    """At that rate an image takes 79 s."""
    cli = make_cli()
    saved(cli, [1])
    cli = make_cli(disk={"bandwidth": "2kB/s"})
    with no_longer_than(60):
        with tierfall.open(cli.config) as ckpt:
            state = blank()
            assert ckpt.restore(state) is not None
        assert step_in(state) == step_in(tierfall.load(cli.config)) == 1
        cli("verify")
        cli("export", "1", "--to", str(tmp_path / "exported"))


def test_a_limit_of_reads_slows_readers_and_no_writer(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli(disk={"read_bandwidth": "20kB/s"})
    with no_longer_than(60), tierfall.open(cli.config) as ckpt:
        for step in range(1, 9):
            ckpt.save(step, state_of(step), block=True)
    began = time.monotonic()
    assert step_in(tierfall.load(cli.config)) == 8
    assert time.monotonic() - began > 7, "the image has 155 kB"


def test_a_tier_that_is_only_read_may_limit_reads(make_cli: MakeCli, saved: Saved) -> None:
    saved(make_cli(), [1])
    cli = make_cli(disk={"read_only": True, "read_bandwidth": "1GB/s"})
    assert step_in(tierfall.load(cli.config)) == 1
