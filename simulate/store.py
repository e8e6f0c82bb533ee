"""A sweep's rows on disk: appended one by one, so that a killed sweep loses none and doubles none.

``sweep.json`` says which sweep the folder holds, ``rows.jsonl`` has one row a line, in the order in which they were
finished.  A last line that was cut off is dropped and its point done again.  At the end ``sweep.parquet`` and
``sweep.csv`` hold the same rows by point.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from pipespec_model.cli import make_folder
from pipespec_model.errors import InputError

from .row import Row


class Store:
    """The folder of one sweep; a context manager that holds it against a second writer.

    identity : everything that rows depend on; a folder with another one is refused
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.out = out
        self.rows: list[Row] = []
        make_folder(out)
        self._file = (out / "rows.jsonl").open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InputError(f"--out {out}", "must not be in use by another sweep") from None
        try:
            self._identify(identity)
            self.rows = self._resume()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _identify(self, identity: dict[str, Any]) -> None:
        path = self.out / "sweep.json"
        text = json.dumps(identity, indent=1, sort_keys=True)
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise InputError(f"--out {self.out}", "must be empty or hold the same sweep", mend=(
                    "it was begun with another pipeline, profile or options; choose another folder"))
            return
        if self._file.tell():
            raise InputError(f"--out {self.out}", "must be empty or hold a sweep", mend="it has rows and no sweep.json")
        _replace(path, text.encode())

    def _resume(self) -> list[Row]:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        whole, torn = lines[:-1], lines[-1]
        if torn:
            self._file.truncate(sum(len(line) + 1 for line in whole))
        rows = []
        for number, line in enumerate(whole, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{self.out / 'rows.jsonl'}:{number}", f"must be one JSON object ({error})") from None
        return rows

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows through to the operating system: what is returned from is safe from a killed process."""
        rows = list(rows)
        self._file.write(b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows))
        self._file.flush()
        self.rows += rows

    def export(self) -> pd.DataFrame:
        """Write Parquet and CSV; returns the table."""
        made = table(self.rows)
        for name, write in (("sweep.parquet", made.to_parquet), ("sweep.csv", made.to_csv)):
            half = self.out / f".{name}"
            write(half, index=False)
            half.replace(self.out / name)
        return made


def table(rows: list[Row]) -> pd.DataFrame:
    """Rows by point, however they came; a column that no row fills is left out."""
    made = pd.DataFrame(sorted(rows, key=lambda row: row["point"]))
    return made.dropna(axis="columns", how="all").reset_index(drop=True)


def load_table(path: str | Path) -> pd.DataFrame:
    """A sweep's table from its folder, its Parquet or its CSV."""
    path = Path(path)
    path = path / "sweep.parquet" if path.is_dir() else path
    if not path.is_file():
        raise InputError(str(path), "must be a sweep's table", mend="run pipespec simulate sweep first")
    return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)


def _replace(path: Path, data: bytes) -> None:
    half = path.with_name(f".{path.name}")
    with half.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    half.replace(path)
