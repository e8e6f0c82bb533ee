"""The committed cache entries, from a verifier's process to that of its layer-skipping drafter.

A skipping model that computes every entry itself agrees with the full one far less often than one that
attends to the full model's (docs/clasp.md has the figures), so a drafter in a process of its own needs the
verifier's entries with every verification.  They lie in shared memory, every layer's, a row a token of
prompt and text: the verifier copies the rows that it has just committed, and says so in a message; the
drafter copies them out before its next step.  Neither waits for the other.  A verifier that was rolled back
writes rows a second time, perhaps while the drafter reads them; it says so again, and the rows are read
again.  Until then a draft may attend to a torn row: it is a draft, and the verifier's own cache is never read.
"""

from __future__ import annotations

import torch

from execute.decoders import InPlaceCache
from execute.shared import Shared


def bytes_per_token(cache: InPlaceCache) -> int:
    """layers × 2 × kv heads × head size × element size."""
    layers, _, heads, size = cache.keys.shape
    return 2 * layers * heads * size * cache.keys.element_size()


def entries_in(shared: Shared, like: InPlaceCache, rows: int) -> InPlaceCache:
    """A cache of the shape of ``like`` that lies in shared memory and has room for ``rows`` tokens, never more.

    A token's entries of all layers lie side by side: what one verification hands over is one piece of memory.
    """
    layers, _, heads, size = like.keys.shape
    memory = shared.map(rows * bytes_per_token(like))
    out = InPlaceCache((layers, heads, size), like.keys.dtype, torch.device("cpu"))
    entries = torch.frombuffer(memory, dtype=like.keys.dtype).view(rows, 2, layers, heads, size)
    out.keys, out.values = entries.permute(1, 2, 0, 3, 4)
    return out


def copy_rows(source: InPlaceCache, into: InPlaceCache, start: int, end: int) -> None:
    """Copy the entries of tokens ``start`` … ``end`` − 1, every layer's."""
    into.make_room(end)
    if start < end:
        into.keys[:, start:end] = source.keys[:, start:end]
        into.values[:, start:end] = source.values[:, start:end]
    into.length = max(into.length, end)
