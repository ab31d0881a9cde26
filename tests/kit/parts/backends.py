"""A storage backend in one file."""

import contextlib
import io
import sqlite3

from muster.checkpoint.backends.base import MANIFEST
from muster.checkpoint.backends.by_rename import CommitByRename


class Sqlite(CommitByRename):
    """Stores checkpoints in one SQLite database."""

    def __init__(self, url):
        self.root, self.path = url, url.partition("://")[2]

    def do(self, line, *values):
        with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as database, database:
            return database.execute(line, values).fetchall()

    def prepare(self):
        self.do("CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, data BLOB)")

    @contextlib.contextmanager
    def put(self, name):
        stream = io.BytesIO()
        yield stream
        self.do("INSERT OR REPLACE INTO files VALUES (?, ?)", name, stream.getvalue())

    def create(self, name, data):
        try:
            self.do("INSERT INTO files VALUES (?, ?)", name, data)
        except sqlite3.IntegrityError:
            raise FileExistsError(name) from None

    def get(self, name):
        found = self.do("SELECT data FROM files WHERE name = ?", name)
        if not found:
            raise FileNotFoundError(name)
        return io.BytesIO(found[0][0])

    def list(self, folder=""):
        below = f"{folder}/" if folder else ""
        names = [name for (name,) in self.do("SELECT name FROM files")]
        return sorted({name[len(below) :].split("/")[0] for name in names if name.startswith(below)})

    def size(self, name):
        return len(self.get(name).getvalue())

    def delete(self, name):
        self.do("DELETE FROM files WHERE name = ? OR name LIKE ?", name, f"{name}/%")

    def publish(self, draft, name, manifest):
        if self.list(name):
            raise FileExistsError(name)
        with self.put(f"{draft}/{MANIFEST}") as file:
            file.write(manifest)
        self.rename(draft, name)

    def rename(self, old, new):
        self.do("UPDATE files SET name = ? || substr(name, ?) WHERE name LIKE ?", new, len(old) + 1, f"{old}/%")
