"""No simulated pipeline leaves its bounds; limits in which they meet."""

from __future__ import annotations

from itertools import pairwise

import pytest
from drawn_pipelines import script

from pipespec_model.acceptance import IID
from pipespec_model.bounds import bounds
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec


def pair(strategy: str = "pipelined", lookahead: int = 0) -> PipelineSpec:
    return PipelineSpec.from_dict({
        "strategy": strategy, "stages": [{"name": "d", "model": "small"}, {"name": "t", "model": "large"}],
        "links": [{"lookahead": lookahead, "buffer_tokens": 4, "max_window": 4}]})


def profile(rate: float) -> Profile:
    return Profile({"d": StageLatency(Constant(0.01)), "t": StageLatency(Constant(0.1))},
                   acceptance={"d>t": IID(rate)})


@pytest.mark.parametrize("handshake", ["overlapped", "blocking"])
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_no_pipeline_leaves_its_bounds(seed: int, handshake: str) -> None:
    """Random pipelines of two to five stages, both handshakes; within four standard errors of the simulation."""
    spec, known = script().drawn(seed, k=2 + seed % 4, handshake=handshake)
    said = bounds(spec, known)
    found, error = script().simulated(spec, known, 2)
    assert said.lower <= found + 4 * error
    assert found <= said.upper + 4 * error
    assert 0 < said.lower <= said.upper


def test_bounds_meet_where_nothing_is_ever_accepted() -> None:
    """α = 0, lookahead 0, one step time: exactly one token a step, from above and from below."""
    said = bounds(pair(), profile(0.0))
    assert (said.lower, said.upper) == pytest.approx((10.0, 10.0))


def test_bounds_rise_with_acceptance() -> None:
    """Both bounds are monotone in α where a wide step costs no more."""
    found = [bounds(pair(), profile(rate)) for rate in (0.0, 0.3, 0.6, 0.9, 1.0)]
    for one, more in pairwise(found):
        assert one.lower <= more.lower + 1e-9
        assert one.upper <= more.upper + 1e-9
    assert found[-1].upper == pytest.approx(50.0)  # four drafts and one of its own every 0.1 s


def test_a_lookahead_can_only_lower_the_lower_bound_by_its_wait() -> None:
    """A target that may have to wait for drafts is not promised what one that never waits is."""
    assert bounds(pair(lookahead=2), profile(0.0)).lower < bounds(pair(), profile(0.0)).lower


def test_what_has_no_bounds_is_refused() -> None:
    """A synchronous chain is not a pipeline."""
    with pytest.raises(InputError, match="pipelined"):
        bounds(pair("speculative", lookahead=2), profile(0.5))
