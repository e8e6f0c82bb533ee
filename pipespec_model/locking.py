"""One process at a time in a folder: a lock that leaves no file and ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import InputError


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an existing folder; without ``wait``, InputError where another run holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(f"--out {folder}", "must not be in use by another run",
                             mend="give another folder") from None
        yield
    finally:
        os.close(handle)
