"""The command line: what a person asks of a run without writing a program.

``app`` lists the commands; ``looking``, ``measuring``, ``checking``, ``exporting``, ``copying``, ``changing`` and
``draining`` hold them; ``common`` holds what they share: options, exit codes, the two ways of answering (tables for
people, JSON for programs). What the commands do stands in modules that print nothing (``tierfall.ops.commands``,
``tierfall.ops.verify``, ``tierfall.export.export`` and so on).
"""

from tierfall.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line with the arguments of this process."""
    app(prog_name="tierfall")
