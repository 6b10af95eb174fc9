"""The command line. ``app`` lists the commands, which ``usage`` parses; each is in a module of its subject;
``output`` prints for all of them, and ``common`` is what those on a run share.

The modules here parse options and print. The work is in modules that print nothing: ``tierfall.ops`` and
``tierfall.export``.
"""

import io
import os
import sys

from tierfall.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line with the arguments of this process."""
    # A closed stream (>&-) is None; what a command prints there is lost, and its exit code is not.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may have what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="tierfall")
