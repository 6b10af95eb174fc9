"""A tier in a table of an SQLite file, for addresses such as table:///data/checkpoints.db."""

import sqlite3
from contextlib import closing
from urllib.parse import quote

from tierfall.backends import toolkit


@toolkit.register("table")
class Table(toolkit.ObjectStore):
    durable = conditional_create = True

    def __init__(self, url, *, options, read_only):
        mode = "ro" if read_only else "rwc"
        self.address = f"file:{quote(url.removeprefix('table://'))}?mode={mode}"
        if not read_only:
            self.run("CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB)")

    def run(self, statement, *values):
        with closing(sqlite3.connect(self.address, uri=True, timeout=30)) as db, db:
            db.execute("PRAGMA synchronous=EXTRA")  # FULL, and the folder of its journal
            return db.execute(statement, values).fetchall()

    def get(self, key, start, end):
        what = "SELECT ifnull(substr(data, ?, ?), x''), length(data) FROM objects WHERE key = ?"
        first = 1 + min(start, 2**30)  # above any length, and of 32 bits, as substr needs it
        return next(iter(self.run(what, first, end - start, key)), None)

    def put(self, key, data, if_absent):
        verb = "INSERT OR IGNORE" if if_absent else "INSERT OR REPLACE"
        return bool(self.run(f"{verb} INTO objects VALUES (?, ?) RETURNING key", key, data))

    def delete(self, key):
        self.run("DELETE FROM objects WHERE key = ?", key)

    def list(self, prefix, delimiter):
        rows = self.run("SELECT key, length(data) FROM objects WHERE instr(key, ?) = 1", prefix)
        return [toolkit.StoredObject(key=key, bytes=size) for key, size in rows]

    def error_type(self, error):
        if "is full" in str(error):
            return toolkit.StorageFullError
        if isinstance(error, sqlite3.OperationalError):  # such as a lock of another process
            return toolkit.UnreachableError
        return toolkit.BackendError
