"""Sweeps on a Dask cluster: the rows of one worker, also when a worker dies."""

from __future__ import annotations

import os
import signal

import pandas as pd
import pytest
from sweeps import CHAIN, PAIR, PROFILE, lines

from pipespec_model.errors import InputError
from simulate.points import Design
from simulate.row import Effort
from simulate.sweep import Sweep, Workers, run_sweep
from simulate.vary import axes_of

pytestmark = [
    pytest.mark.dask,
    # The cluster's own logging of a death, and its sockets' end, are not ours to mend.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning",
                               "ignore:.*:UserWarning:distributed", "ignore::DeprecationWarning:distributed"),
]


@pytest.fixture
def cluster():
    """A scheduler and two worker processes, each restarted by its nanny when it dies."""
    distributed = pytest.importorskip("dask.distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as made:
        yield made


def test_a_worker_killed_in_mid_sweep_costs_no_row(cluster, tmp_path):
    """Two worker processes, one of them killed by SIGKILL after some rows: the table is that of one process
    here, cell by cell, and each row was written once."""
    vary = {"links.0.acceptance_rate": "0.1..0.9:30", "links.0.lookahead": "0..5"}
    made = Sweep(CHAIN, PROFILE, Design(axes_of(vary)), Effort(num_tokens=8000, replications=2, predicted=False))
    victims: list[int] = []
    pids = [worker.pid for worker in cluster.workers.values()]
    assert len(set(pids) | {os.getpid()}) == 3

    def advance(done: int) -> None:
        if not victims and len(seen := lines(tmp_path / "out")) > 2:
            assert len(seen) < 180, "the kill would come too late to show anything"
            os.kill(pids[0], signal.SIGKILL)
            victims.append(pids[0])

    found = run_sweep(made, out=tmp_path / "out", workers=Workers(dask=cluster.scheduler_address), advance=advance)
    assert victims == pids[:1]
    assert sorted(row["point"] for row in lines(tmp_path / "out")) == list(range(180))
    pd.testing.assert_frame_equal(found, run_sweep(made, out=None, workers=Workers(1)))


def test_an_address_where_nobody_listens_is_bad_input():
    """The scheduler that was named is in the line."""
    made = Sweep(PAIR, PROFILE, Design(axes_of({"links.0.lookahead": [0, 1, 2]})), Effort(num_tokens=10))
    with pytest.raises(InputError, match=r"--dask must be the address of a scheduler .*tcp://127.0.0.1:1"):
        run_sweep(made, out=None, workers=Workers(dask="tcp://127.0.0.1:1"))
