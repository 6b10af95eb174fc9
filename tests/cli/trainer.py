"""A trainer for tests of the command line: opens the run that a file describes, and obeys lines on stdin.

save N       saves step N on every tier, and answers
capture N    saves step N into memory only, and answers
loop         saves one step after another until it is killed, and answers before it begins
pinned       answers with the steps that it knows to be pinned
steps        answers with the steps that it knows
pin N        pins step N
close        closes and ends
"""

from __future__ import annotations

import json
import sys
from itertools import count
from typing import Any

import tierfall
from tests.steps import blank, state_of


def answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    with tierfall.open(sys.argv[1]) as ckpt:
        report = ckpt.restore(blank())
        answer(report.step if report else None)
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "close":
                return
            obey(ckpt, word, [int(text) for text in rest])


def obey(ckpt: tierfall.Checkpointer, word: str, numbers: list[int]) -> None:
    match word:
        case "save":
            ckpt.save(numbers[0], state_of(numbers[0]), metrics={"loss": 0.5}, block=True)
            ckpt.drain()
        case "capture":
            ckpt.save(numbers[0], state_of(numbers[0])).captured(30)
        case "pin":
            ckpt.pin(numbers[0])
        case "loop":
            answer("looping")
            newest = max((c.step for c in ckpt.checkpoints()), default=0)
            for step in count(newest + 1):
                ckpt.save(step, state_of(step), block=True)
        case "pinned":
            answer(sorted(c.step for c in ckpt.checkpoints() if c.pinned))
            return
        case "steps":
            answer(sorted(c.step for c in ckpt.checkpoints()))
            return
    answer("done")


if __name__ == "__main__":
    main()
