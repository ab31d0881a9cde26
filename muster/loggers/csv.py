"""train.csv and eval.csv in the run's folder, one row per record; existing rows after `step` are dropped first."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from muster.files import replace_file
from muster.loggers.base import Logger


class Csv(Logger):
    def __init__(self, folder: Path, step: int):
        self._folder, self._columns = folder, dict[str, list[str]]()
        for kind in ("train", "eval"):
            path = folder / f"{kind}.csv"
            if path.exists():
                rows = [row for row in csv.reader(path.read_text(encoding="utf-8").splitlines()) if row]
                self._columns[kind] = rows[0]
                at, whole = rows[0].index("step"), [row for row in rows[1:] if len(row) == len(rows[0])]
                self._write(kind, [rows[0], *(row for row in whole if int(row[at]) <= step)])

    def log(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "event":
            return
        path = self._folder / f"{kind}.csv"
        values = {name: value for name, value in record.items() if name != "kind"}
        if kind not in self._columns:
            self._columns[kind] = list(values)
            self._write(kind, [self._columns[kind]])
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([values.get(name, "") for name in self._columns[kind]])

    def _write(self, kind: str, rows: list[list[str]]) -> None:
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        replace_file(
            self._folder / f"{kind}.csv", lambda draft: draft.write_text(text.getvalue(), newline="", encoding="utf-8")
        )
