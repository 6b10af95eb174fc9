"""Models that several ranks hold together are saved as they lie, and come back in any layout, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import Job

PROGRAM = Path(__file__).with_name("sharded_program.py")


LONG = pytest.mark.torture
LAYOUTS = [
    ("plain", 1),
    ("ddp", 2),
    ("fsdp", 2),
    ("fsdp", 3),
    ("tp", 2),
    ("hsdp", 4),
    ("tp-fsdp", 4),
]
DEFAULT = [
    (("fsdp", 4), ("fsdp", 3)),
    (("tp-fsdp", 4), ("plain", 1)),
    (("fsdp", 2), ("tp", 2)),
    (("ddp", 2), ("hsdp", 4)),
]
"""The pairs of the default run; the others are in make torture."""


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("fsdp", 2),
        pytest.param("hsdp", 4, marks=LONG),
        pytest.param("tp", 2, marks=LONG),
        ("tp-fsdp", 4),
        pytest.param("ddp", 2, marks=LONG),
    ],
)
def test_training_goes_on_to_the_same_bits(
    make_job: Callable[..., Job], tmp_path: Path, layout: str, ranks: int
) -> None:
    def run(**arguments: object) -> list[dict[str, object]]:
        return make_job(ranks, program=PROGRAM).run("train", layout=layout, **arguments)

    straight = run(until=6, save=False)
    assert len({answer["digest"] for answer in straight}) == 1
    halfway = run(until=3)
    assert all(answer["first"] == 1 and answer["lazy"] == 2 for answer in halfway), halfway
    resumed = run(until=6)
    assert [answer["first"] for answer in resumed] == [4] * ranks
    assert [answer["digest"] for answer in resumed] == [answer["digest"] for answer in straight]
    assert [answer["next"] for answer in resumed] == [answer["next"] for answer in straight]


def test_a_dict_has_whole_tensors_and_the_values_of_each_rank(
    make_job: Callable[..., Job],
) -> None:
    first, *_ = make_job(2, program=PROGRAM).run("train", layout="fsdp", until=2)
    answers = make_job(2, program=PROGRAM).run("load_into_run", layout="fsdp")
    assert [answer["digest"] for answer in answers] == [first["digest"]] * 2, answers
    assert [answer["own"] for answer in answers] == [0, 1]
    assert [answer["step"] for answer in answers] == [2, 2]


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        *DEFAULT,
        *(
            pytest.param(saved, restored, marks=LONG)
            for saved in [*LAYOUTS, ("fsdp", 4)]
            for restored in [*LAYOUTS, ("fsdp", 4), ("fsdp", 8)]
            if saved != restored and (saved, restored) not in DEFAULT
        ),
    ],
)
def test_another_layout_takes_what_was_saved(
    make_job: Callable[..., Job], saved: tuple[str, int], restored: tuple[str, int]
) -> None:
    first, *_ = make_job(saved[1], program=PROGRAM).run("train", layout=saved[0], until=2)
    answers = make_job(restored[1], program=PROGRAM).run("train", layout=restored[0], until=2)
    assert [answer["first"] for answer in answers] == [3] * restored[1], answers
    assert {answer["digest"] for answer in answers} == {first["digest"]}
    # Ranks add up gradients in another order, so that the next step is the same but for rounding.
    assert all(answer["next"] == pytest.approx(first["next"], rel=1e-5) for answer in answers)
