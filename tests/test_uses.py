"""Which use of the same devices wins."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path

import pytest
from drawn_pipelines import script

from pipespec_model import uses
from pipespec_model.closed_form import synchronous_tokens_per_s
from pipespec_model.pays import Pair


def test_doctests_run():
    """The examples in the documentation are true."""
    found = doctest.testmod(uses)
    assert found.attempted >= 2
    assert found.failed == 0


def test_the_three_uses_are_their_own_formulas():
    """Sharded, in turn and at once: each is what its formula says, with the best window or lookahead."""
    pair = Pair(0.02, (0.1,) * 9, 0.8)
    plain = uses.uses_of_devices(pair, serial_share=1.0)
    assert plain.autoregressive == pytest.approx(10.0)
    assert plain.synchronous == pytest.approx(max(synchronous_tokens_per_s(0.8, w, 0.2, 0.1) for w in range(1, 9)))
    assert plain.pipelined == pytest.approx(pair.solve().tokens_per_s)
    sharded = uses.uses_of_devices(pair, serial_share=0.0)
    assert sharded.autoregressive == pytest.approx(20.0)
    assert sharded.synchronous == pytest.approx(max(synchronous_tokens_per_s(0.8, w, 0.4, 0.05) for w in range(1, 9)))
    assert sharded.pipelined == plain.pipelined


def test_each_use_wins_somewhere():
    """A drafter that is hardly ever right: shard; right and not too cheap: pipeline; almost free: in turn."""
    def best(draft_s: float, rate: float) -> str:
        return uses.uses_of_devices(Pair(draft_s, (0.1,) * 9, rate)).best

    assert best(0.03, 0.1) == "autoregressive"
    assert best(0.03, 0.9) == "pipelined"
    assert best(0.001, 0.7) == "synchronous"


def test_more_target_devices_leave_less_for_one_more():
    """Where the target is sharded already, one device more adds less to it; the pipeline is what it was."""
    pair = Pair(0.03, (0.1,) * 9, 0.8)
    one, two, four = (uses.uses_of_devices(pair, target_devices=number) for number in (1, 2, 4))
    assert one.autoregressive > two.autoregressive > four.autoregressive > 10
    assert one.synchronous > two.synchronous > four.synchronous
    assert one.pipelined == two.pipelined == four.pipelined
    assert (one.best, four.best) == ("synchronous", "pipelined")


def test_the_figure_is_drawn_from_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture):
    """On a coarse grid: shares of a panel add up, the pipeline's grows with the target's devices, a file is written."""
    monkeypatch.setattr(sys, "argv", ["regions", "--points", "6", "--figure", str(tmp_path / "regions.svg")])
    script("regions").main()
    lines = capsys.readouterr().out.splitlines()
    shares = [[int(part.split()[1].rstrip("%")) for part in line.split(": ")[1].split(" of ")[0].split(", ")]
              for line in lines]
    assert len(shares) == 6
    assert all(abs(sum(row) - 100) <= 2 for row in shares)
    assert shares[0][2] <= shares[1][2] <= shares[2][2]
    assert (tmp_path / "regions.svg").stat().st_size > 10_000
