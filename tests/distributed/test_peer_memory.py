"""Jobs with peer memory: a node is lost with all that was in its memory, and the next start has everything."""

from __future__ import annotations

from tests import forked
from tests.distributed.job import ROOT

EXAMPLE = """
import os, runpy, subprocess, sys

class Process:
    __class_getitem__ = classmethod(lambda kind, item: kind)

    def __init__(self, command, env):
        self.pid, self.code = os.fork(), None
        if not self.pid:
            os.environ.update(env)
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
            os._exit(0)

    def poll(self, how=os.WNOHANG):
        if self.code is None and (ended := os.waitpid(self.pid, how))[0]:
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code

    def wait(self):
        return self.poll(0)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(9)


subprocess.Popen = Process
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The example, whose processes are forks of one that has imported torch already."""


def test_the_example_loses_a_node_and_reads_nothing_from_storage() -> None:
    done = forked.run(["-c", EXAMPLE, str(ROOT / "examples/lose_a_node.py")], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == [f"node {node}: peer memory has step 5" for node in (0, 1)]
    assert lines[2] == "node 1 is lost, with all that was in its memory"
    assert all(": step 5 from " in line and "disk" not in line for line in lines[3:5]), (
        done.stdout + done.stderr
    )
    assert sorted(lines[5:]) == [f"node {node}: peer memory has step 10" for node in (0, 1)]
