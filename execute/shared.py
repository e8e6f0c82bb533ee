"""Memory that two processes share and that has no name.

It is a file without one: the kernel frees it with the last process that holds it, however that ends, so
there is nothing to clean up and nothing that can be left behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import Any


class Shared:
    """A handle on such memory, passed to a process as it is spawned.  Empty at first."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def make(cls) -> Shared:
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("pipespec"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        """Give this handle up; what is mapped stays."""
        os.close(self._fd)

    def map(self, size: int) -> mmap.mmap:
        """The first ``size`` bytes; the memory grows where it has fewer, and never shrinks."""
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)
        return mmap.mmap(self._fd, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._fd),)


def _received(handle: Any) -> Shared:
    return Shared(handle.detach())
