"""Sweeps: a pipeline under every combination of what is varied, one row each.

Every random number is a pure function of seed, replication and position (pipespec_model.uniforms), so all rows meet
the same luck, and they are the same for any number of workers and any order.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import joblib
import pandas as pd

from pipespec_model.errors import InputError
from pipespec_model.profile import Profile
from pipespec_model.spec import PipelineSpec

from .batch import Point
from .points import Changes, Design, Kind
from .row import Effort, Row, rows
from .store import Store, table
from .vary import Axis, Value, axes_of

BATCH_S = 0.5
"""A worker's batch; what a killed sweep does again is at most one a worker."""
PROBE_ROWS = 8
MOST_PER_BATCH = 1024
WORTH_WORKERS_S = 4.0
"""Work for which processes are started: each takes a second or so to load."""
BYTES_PER_ROW = 4000
"""Of a row in memory, as JSON and in the table, generously."""


@dataclass(frozen=True)
class Sweep:
    """Everything that rows depend on; a worker gets it whole."""

    pipeline: PipelineSpec
    profile: Profile
    design: Design
    effort: Effort

    def changes(self) -> Changes:
        return Changes(self.pipeline, self.profile, self.design.axes)

    @property
    def bytes_needed(self) -> int:
        return len(self.design) * BYTES_PER_ROW

    def identity(self) -> dict[str, Any]:
        """What a folder of rows must have been made with to go on in it."""
        profile = json.dumps(self.profile.to_dict(), sort_keys=True)
        return {"pipeline": self.pipeline.to_dict(), "profile_sha256": hashlib.sha256(profile.encode()).hexdigest(),
                "design": json.loads(json.dumps(asdict(self.design))), "effort": self.effort.to_dict()}

    def rows(self, indices: Sequence[int], changes: Changes | None = None) -> list[Row]:
        """Rows of these points."""
        changes = changes or self.changes()
        heads: list[Row] = []
        points: list[Point | str] = []
        for index, values in zip(indices, self.design.rows(indices), strict=True):
            heads.append({"point": index} | dict(zip((axis.column for axis in self.design.axes), values, strict=True)))
            try:
                points.append(changes.at(values))
            except InputError as error:
                points.append(str(error))
        found = iter(rows([point for point in points if not isinstance(point, str)], self.effort))
        return [head | ({"problem": point} if isinstance(point, str) else {"problem": None} | next(found))
                for head, point in zip(heads, points, strict=True)]


@dataclass(frozen=True)
class Workers:
    """Who computes rows: ``jobs`` processes here (-1: one a core), or a Dask cluster at ``dask``."""

    jobs: int = 1
    dask: str | None = None

    def __post_init__(self) -> None:
        if self.jobs == 0 or self.jobs < -1:
            raise InputError("--jobs", "must be >= 1, or -1 for every core", self.jobs)

    def run(self, sweep: Sweep, batches: Sequence[Sequence[int]]) -> Iterator[list[Row]]:
        """Batches of rows, as they are finished."""
        if self.dask is None and self.jobs == 1:
            changes = sweep.changes()
            yield from (sweep.rows(batch, changes) for batch in batches)
            return
        with self._cluster():
            parallel = joblib.Parallel(n_jobs=-1 if self.dask else self.jobs, return_as="generator_unordered",
                                       batch_size=1, pre_dispatch="2*n_jobs" if self.dask is None else "all")
            yield from parallel(joblib.delayed(sweep.rows)(batch) for batch in batches)

    def _cluster(self) -> Any:
        if self.dask is None:
            return nullcontext()
        try:
            from dask.distributed import Client
        except ImportError:
            raise InputError("--dask", "must have dask installed", mend="pip install 'pipespec[dask]'") from None
        try:
            client = Client(self.dask, timeout=10, set_as_default=False)
        except (OSError, ValueError) as error:
            raise InputError("--dask", f"must be the address of a scheduler ({error})", self.dask) from None
        return _Backend(client)


class _Backend:
    """joblib on a cluster for as long as the context is open."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __enter__(self) -> None:
        self._config = joblib.parallel_config(backend="dask", client=self._client)
        self._config.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._config.__exit__(*error)
        self._client.close()


def sweep(pipeline: PipelineSpec, profile: Profile,
          vary: Mapping[str, str | Sequence[Value]] | Sequence[Axis], *, design: Kind = "grid",
          num_points: int | None = None, effort: Effort | None = None, out: str | Path | None = None,
          workers: Workers | None = None, advance: Callable[[int], None] | None = None) -> pd.DataFrame:
    """A table with one row a configuration; its columns are in ``row.COLUMNS``.

    Parameters
    ----------
    vary : values, or a text as on the command line, by field
    num_points : of a Latin hypercube
    out : folder that holds finished rows, for a sweep that is to survive being killed; None = memory only
    advance : called with the number of rows that were finished

    >>> from pipespec_model.profile import Profile
    >>> pair = PipelineSpec.from_dict({"stages": [{"name": "small", "model": "s"}, {"name": "large", "model": "l"}]})
    >>> known = Profile.from_dict({"latency": {"small": {"kind": "constant", "seconds": 0.01},
    ...                                        "large": {"kind": "constant", "seconds": 0.1}}})
    >>> found = sweep(pair, known, {"links.0.acceptance_rate": [0.0, 1.0]}, effort=Effort(engine="analytic"))
    >>> found["speedup"].round(2).tolist()
    [1.0, 10.0]
    """
    effort = effort or Effort()
    made = Sweep(pipeline, profile, Design(axes_of(vary), design, num_points, effort.seed), effort)
    return run_sweep(made, out=None if out is None else Path(out), workers=workers or Workers(), advance=advance)


def run_sweep(made: Sweep, *, out: Path | None, workers: Workers,
              advance: Callable[[int], None] | None = None) -> pd.DataFrame:
    """Compute what the folder ``out`` does not hold yet.  Raises InputError where no point is a pipeline."""
    made.changes()  # refuses bad fields before a folder is made
    advance = advance or (lambda done: None)
    if out is None:
        rows: list[Row] = []
        for found in _compute(made, set(), workers):
            rows += found
            advance(len(found))
        result = table(rows)
    else:
        with Store(out, made.identity()) as store:
            advance(len(store.rows))
            for found in _compute(made, {item["point"] for item in store.rows}, workers):
                store.append(found)
                advance(len(found))
            result = store.export()
    if "problem" in result and result["problem"].notna().all():
        raise InputError("sweep", f"must have a point that is a pipeline ({result['problem'].iloc[0]})")
    return result


def _compute(made: Sweep, done: set[int], workers: Workers) -> Iterator[list[Row]]:
    """Rows of the points that are not done, some at a time."""
    todo = [index for index in range(len(made.design)) if index not in done]
    # The first row compiles what there is to compile; the next ones tell how long a row takes.
    changes, seconds = made.changes(), BATCH_S
    probes = [todo[:1], todo[1 : 1 + PROBE_ROWS]]
    for probe in filter(None, probes):
        begun = time.perf_counter()
        found = made.rows(probe, changes)
        seconds = (time.perf_counter() - begun) / len(probe)
        yield found
    size = min(max(1, round(BATCH_S / max(seconds, 1e-6))), MOST_PER_BATCH)
    rest = todo[1 + PROBE_ROWS :]
    if workers.dask is None and seconds * len(rest) < WORTH_WORKERS_S:
        workers = Workers()
    yield from workers.run(made, [rest[i : i + size] for i in range(0, len(rest), size)])
