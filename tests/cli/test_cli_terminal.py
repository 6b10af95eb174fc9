"""What a person at a terminal sees, and what a pipe, a full disk or a closed stream gets."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import ROOT, Cli

import tierfall
from tests import forked
from tests.contract.kit import flip
from tests.steps import state_of, wait_until

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
Start = Callable[..., "Screen"]
Printed = Callable[..., str]
WAIT_S = 120.0
HOME, RED = "\x1b[H", "\x1b[1;31m"


_OF_A_TERMINAL = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")


def environment(**more: str) -> dict[str, str]:
    without = {n: v for n, v in os.environ.items() if n not in _OF_A_TERMINAL}
    return {**without, "TERM": "xterm-256color", **more}


AT = """
import os, sys
os.setsid()
handle = os.open(sys.argv[1], os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(handle, number)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
"""
RUN = """
sys.argv[:] = ["tierfall", *sys.argv[2:]]
import tierfall.cli
tierfall.cli.main()
"""


class Screen:
    """A command at a terminal of its own."""

    def __init__(self, *words: str, columns: int = 80, lines: int = 24, **more: str) -> None:
        self._end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = forked.Forked(
            forked.server_of(),
            ["-c", AT + RUN, os.ttyname(other), *words],
            environment(**more),
            None,
            cwd=ROOT,
        )
        self.process.stdout.read(1)  # its end: the command is at its terminal
        os.close(other)
        self.text = ""

    def read(self, until: str = "") -> str:
        """Read until the text appears, or to the end."""
        last_s = time.monotonic() + WAIT_S
        while not (until and until in self.text):
            assert time.monotonic() < last_s, self.text
            if not select.select([self._end], [], [], 1)[0]:
                continue
            try:
                data = os.read(self._end, 1 << 16)
            except OSError:  # the command has ended
                break
            self.text += data.decode()
        return self.text

    def end(self) -> int:
        self.read()
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End the command, however a test went."""
        self.process.kill()
        self.process.wait()
        self.process.close()
        os.close(self._end)


@pytest.fixture
def at_terminal() -> Iterator[Callable[..., Screen]]:
    """Start commands at terminals of their own."""
    screens: list[Screen] = []

    def start(*words: str, **more: Any) -> Screen:
        screens.append(Screen(*words, **more))
        return screens[-1]

    yield start
    for screen in screens:
        screen.close()


@pytest.fixture
def printed(at_terminal: Start) -> Callable[..., str]:
    """What a command prints at a terminal, to its end."""

    def run(*words: str, code: int = 0, **more: Any) -> str:
        screen = at_terminal(*words, **more)
        assert screen.end() == code, screen.text
        return screen.text.replace("\r\n", "\n")

    return run


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> Cli:
    """A run on four tiers, of which one copy is damaged and one is unfinished."""
    cli = make_cli(disk={}, shared={}, archive={}, colder={})
    saved(cli, [100, 200])
    flip(tmp_path / "shared" / "run" / "step-00000100-a0001" / "commit.json", 40)
    (tmp_path / "archive" / "run" / "step-00000200-a0001" / "commit.json").unlink()
    return cli


def test_ls_fits_the_terminal_and_colours_what_needs_attention(cli: Cli, printed: Printed) -> None:
    config = {"TIERFALL_CONFIG": str(cli.path)}
    text = printed("ls", code=1, **config)
    listed = [line for line in text.splitlines() if not line.startswith("tierfall:")]
    assert max(len(plain(line)) for line in listed) <= 80
    assert f"{RED}damaged" in text
    assert plain(listed[0]).split() == [
        *("STEP", "AGE", "SIZE", "host", "disk", "shared", "archive", "colder")
    ]
    narrow = printed("ls", code=1, columns=50, **config)
    lines = [line for line in narrow.splitlines() if not line.startswith("tierfall:")]
    assert max(len(plain(line)) for line in lines) <= 50
    assert plain(lines[0]).split() == ["STEP", "AGE", "SIZE", "COPIES"]
    assert " ".join(plain(narrow).split()).count("100@1 ") >= 1
    assert f"{RED}damaged" in narrow
    assert "disk" in plain(lines[1])


def test_watch_paints_each_frame_over_the_last_one_until_ctrl_c(
    cli: Cli, at_terminal: Start
) -> None:
    screen = at_terminal("watch", "--every", "100ms", TIERFALL_CONFIG=str(cli.path))
    stat, seen = Path(f"/proc/{screen.process.pid}/stat"), ""
    for _ in range(3):  # a stop at any moment needs no care
        screen.text = ""
        seen += screen.read(until="if the site is lost")
        screen.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops")
        screen.process.send_signal(signal.SIGCONT)
    screen.process.send_signal(signal.SIGINT)
    assert screen.end() == 0
    assert RED in seen
    frames = [plain(text) for text in seen.split(HOME)[1:]]
    whole = [text.partition(" STEP ")[2] for text in frames if "if the site is lost" in text]
    assert len(whole) == 3
    assert all(text.index("200@1") < text.index("100@1") for text in whole), "the newest step first"
    assert max(text.count("\n") for text in frames) < 24


OUTPUTS = {
    "gone": "handle, out = os.pipe(); os.close(handle); os.dup2(out, 1)",
    "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "closed": "os.close(1); sys.stdout = None",
}


def run_onto(output: str, *words: str, **more: str) -> tuple[int, str]:
    """Run a command onto such an output; return its exit code and what it has written to stderr."""
    code = f"import os, sys; {OUTPUTS[output]}\n{RUN}"
    done = forked.run(["-c", code, "", *words], cwd=ROOT, env=environment(**more), timeout=WAIT_S)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_reader_that_has_gone_ends_a_command_silently(cli: Cli) -> None:
    for words in ("ls", "ls --json", "watch --every 100ms"):
        code, err = run_onto("gone", *words.split(), TIERFALL_CONFIG=str(cli.path))
        assert "Errno" not in err
        assert code


def test_output_that_cannot_be_written_is_a_problem(cli: Cli) -> None:
    own = ("ls --last 1", "ls --json", "latest", "watch --json", "schema")
    for words in (*own, "--help", "ls --help", "--version"):
        code, err = run_onto("full", *words.split(), TIERFALL_CONFIG=str(cli.path))
        assert err.endswith("tierfall: the output could not be written: No space left on device\n")
        assert code == 1


def test_with_a_closed_stdout_a_command_still_does_its_work(cli: Cli) -> None:
    run_onto("closed", "pin", "200", TIERFALL_CONFIG=str(cli.path))
    assert cli.json("ls", code=1)["checkpoints"][1]["pinned"]


def test_a_name_that_the_terminal_cannot_show_is_no_error(make_cli: MakeCli) -> None:
    cli = make_cli()
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), metrics={"损失": 0.5}, block=True)
    code = f"import sys; sys.stdout.reconfigure(encoding='ascii')\n{RUN}"
    words = {"cwd": ROOT, "env": environment(TIERFALL_CONFIG=str(cli.path))}
    done = forked.run(["-c", code, "", "ls", "--metrics"], **words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].endswith(" 0.5")
