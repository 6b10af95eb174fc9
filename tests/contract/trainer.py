"""A trainer in a process of its own that does what a test tells it, and what tests do to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.contract.kit import Place, Program, state_of, wait_until


def save(place: Place, *steps: int, elements: int = 20_000) -> None:
    """Continue the run, and save these steps through to the last tier."""
    with place.open() as ckpt:
        ckpt.restore(state_of(-1, elements=elements), unreachable="ignore")
        for step in steps:
            state = state_of(step, elements=elements)
            ckpt.save(step, state, metrics={"loss": 1 / step}, block=True)


class Trainer:
    """Opens the run of ``tiers.yaml``, restores, and obeys.

    | order | it |
    |---|---|
    | ``save N`` | saves step N, and waits until every tier has what it is owed; answers with an error that comes |
    | ``capture N`` | saves step N, and waits until memory has it |
    | ``pin N`` | pins it |
    | ``loop`` | answers, and saves one step after another until it is killed |
    | ``steps``, ``pinned`` | answers with the steps that it knows |
    | ``close`` | closes the run, and ends |
    """

    def __init__(self, place: Place, **environment: str) -> None:
        self.program: Program = place.start(_TRAINER, **environment)
        self.pid = self.program.pid
        self.restored = self.read()

    def tell(self, order: str) -> Any:
        """Give an order, and return what came of it."""
        self.program.tell(order)
        return self.read()

    def read(self) -> Any:
        """What came of the last order."""
        line = self.program.line()
        assert line, self.program.errors()
        return json.loads(line)

    def close(self) -> None:
        self.program.tell("close")
        wait_until(self.program.ended, "the trainer ends")
        assert self.program.end().code == 0

    def kill(self) -> None:
        self.program.kill()


_TRAINER = """
import json

def answer(value):
    print(json.dumps(value), flush=True)

with tierfall.open("tiers.yaml") as ckpt:
    report = ckpt.restore(blank())
    answer(report.step if report else None)
    for line in sys.stdin:
        word, *rest = line.split()
        numbers = [int(text) for text in rest]
        if word == "close":
            break
        if word == "save":
            try:
                ckpt.save(numbers[0], state_of(numbers[0]), metrics={"loss": 0.5}, block=True)
                ckpt.drain()
            except tierfall.errors.TierfallError as error:
                answer(f"{type(error).__name__}: {error}")
                continue
        if word == "capture":
            ckpt.save(numbers[0], state_of(numbers[0])).captured(30)
        if word == "pin":
            ckpt.pin(numbers[0])
        if word == "loop":
            answer("looping")
            step = max(c.step for c in ckpt.checkpoints())
            while True:
                step += 1
                ckpt.save(step, state_of(step), block=True)
        known = ckpt.checkpoints()
        answer(sorted(c.step for c in known if c.pinned or word != "pinned"))
"""


@contextmanager
def trainers(place: Place) -> Iterator[Callable[..., Trainer]]:
    """``train(**environment)`` starts trainers, which are killed at the end if they live."""
    started: list[Trainer] = []

    def train(**environment: str) -> Trainer:
        started.append(Trainer(place, **environment))
        return started[-1]

    try:
        yield train
    finally:
        for trainer in started:
            trainer.kill()
