"""Which parts of a model's layers a drafter leaves out, and SWIFT's file of them.

CLaSp (arXiv 2505.24196) skips whole layers; SWIFT (arXiv 2410.06916) skips attention and MLP blocks
apart.  One type serves both.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipespec_model.errors import InputError
from pipespec_model.spec import read_document


@dataclass(frozen=True)
class SkipSet:
    """Indices of the layers whose attention, and whose MLP, is skipped."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def layers(cls, indices: Iterable[int]) -> SkipSet:
        """Whole layers."""
        found = frozenset(indices)
        return cls(found, found)

    @property
    def whole(self) -> tuple[int, ...]:
        """The layers that are skipped whole, increasing."""
        return tuple(sorted(self.attention & self.mlp))

    def check(self, num_layers: int) -> None:
        """Raise InputError for a set that this many layers cannot have: an index outside the model, or all."""
        outside = sorted(index for index in self.attention | self.mlp if not 0 <= index < num_layers)
        if outside:
            raise InputError("skipped layers", f"must be in 0..{num_layers - 1}", outside[0])
        if len(self.whole) == num_layers:
            raise InputError("skipped layers", f"must leave at least one of {num_layers}", len(self.whole))


KEEP_ALL = SkipSet()


def free_layers(num_layers: int, count: int, kept: Collection[int]) -> list[int]:
    """The layers of which ``count`` are to be skipped, increasing.

    kept : layers that must not be skipped
    Raises InputError where there are too few.
    """
    outside = sorted(index for index in kept if not 0 <= index < num_layers)
    if outside:
        raise InputError("kept_layers", f"must be in 0..{num_layers - 1}", outside[0])
    free = [index for index in range(num_layers) if index not in set(kept)]
    most = min(len(free), num_layers - 1)
    if not 0 <= count <= most:
        raise InputError("num_skipped_layers", f"must be in 0..{most}, of {num_layers} layers and "
                         f"{len(set(kept))} that are kept", count)
    return free


def uniform_skips(num_layers: int, count: int, kept: Collection[int] = ()) -> SkipSet:
    """``count`` layers, evenly spread over those that may be skipped."""
    free = free_layers(num_layers, count, kept)
    return SkipSet.layers(free[int((i + 0.5) * len(free) / count)] for i in range(count))


def random_skips(num_layers: int, count: int, kept: Collection[int] = (), *, rng: np.random.Generator) -> SkipSet:
    """``count`` layers drawn without preference from those that may be skipped."""
    free = free_layers(num_layers, count, kept)
    return SkipSet.layers(int(index) for index in rng.choice(free, size=count, replace=False))


def read_skips(path: str | Path) -> SkipSet:
    """Read SWIFT's ``skip_layers.json``: the lists ``attention`` and ``mlp``, or a list of such by model name
    of which there is one.  Raises InputError naming what is wrong."""
    data = read_document(path)
    if isinstance(data, dict) and len(data) == 1 and not {"attention", "mlp"} & set(data):
        data = next(iter(data.values()))
    if not isinstance(data, dict) or set(data) != {"attention", "mlp"}:
        raise InputError(str(path), "must hold the lists 'attention' and 'mlp', and nothing else")
    for key, found in data.items():
        whole = isinstance(found, list) and all(type(x) is int and x >= 0 for x in found)
        if not whole or len(set(found)) < len(found):
            raise InputError(f"{path}: {key}", "must be a list of different layer numbers >= 0", found)
    return SkipSet(frozenset(data["attention"]), frozenset(data["mlp"]))


def write_skips(skips: SkipSet, path: str | Path) -> None:
    """Write SWIFT's ``skip_layers.json``."""
    data = {"attention": sorted(skips.attention), "mlp": sorted(skips.mlp)}
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")
