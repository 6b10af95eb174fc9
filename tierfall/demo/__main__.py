"""``python -m tierfall.demo``: the same as ``tierfall demo``."""

import typer

from tierfall.demo.command import demo

if __name__ == "__main__":
    typer.run(demo)
