"""``python -m tests.contract.program CODE``: a program that ends as a command does, without the taking down of all
modules, which takes most of its time."""

import sys

_, _code, *_arguments = sys.argv
sys.argv = ["-c", *_arguments]
exec(compile(_code, "<string>", "exec"), {"__name__": "__main__"})
