"""The command line. ``app`` lists the commands, a module each or a few of one kind; ``common`` is what they share.

The modules here parse options and print. The work is in modules that print nothing: ``tierfall.ops`` and
``tierfall.export``.
"""

from tierfall.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line with the arguments of this process."""
    app(prog_name="tierfall")
