"""Best depth of a pipeline."""

from __future__ import annotations

import doctest

import pytest

from pipespec_model import depth
from pipespec_model.acceptance import IID
from pipespec_model.depth import best_depth, depths
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.predict import predict
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec

SPEC = PipelineSpec.from_dict({
    "strategy": "pipelined", "stages": [{"name": name, "model": name} for name in ("s", "m", "l")],
    "links": [{"lookahead": 1, "max_window": 4}, {"lookahead": 2, "max_window": 8}]})


def profile(small: float, middle: float, **rates: float) -> Profile:
    return Profile({"s": StageLatency(Constant(small)), "m": StageLatency(Constant(middle)),
                    "l": StageLatency(Constant(0.1))},
                   acceptance={key.replace("_", ">"): IID(rate) for key, rate in rates.items()})


def test_doctests_run() -> None:
    """The example in the documentation is true."""
    assert doctest.testmod(depth).failed == 0


def test_every_choice_of_drafters_is_asked() -> None:
    """Four chains of two drafters; each with the settings of its verifier's link, and its own prediction."""
    known = profile(0.004, 0.02, s_m=0.8, m_l=0.8, s_l=0.6)
    found = depths(SPEC, known)
    assert sorted(one.pipeline.label for one in found) == sorted(["{l}", "{s,l}", "{m,l}", "{s,m,l}"])
    speeds = [one.tokens_per_s for one in found]
    assert speeds == sorted(speeds, reverse=True)
    for one in found:
        assert one.tokens_per_s == predict(one.pipeline, known).tokens_per_s
        if one.pipeline.links:
            assert one.pipeline.links[-1].max_window == 8


@pytest.mark.parametrize(("known", "label"), [
    (profile(0.09, 0.095, s_m=0.1, m_l=0.1, s_l=0.1), "{l}"),  # drafters no faster and never right
    (profile(0.03, 0.03, s_m=0.1, m_l=0.97, s_l=0.1), "{m,l}"),
    (profile(0.005, 0.06, s_m=0.1, m_l=0.5, s_l=0.9), "{s,l}"),
    (profile(0.004, 0.04, s_m=0.95, m_l=0.95, s_l=0.4), "{s,m,l}"),
])
def test_each_depth_is_best_somewhere(known: Profile, label: str) -> None:
    """Useless drafters are dropped, useful ones kept."""
    assert best_depth(SPEC, known).pipeline.label == label


def test_a_drafter_that_changes_nothing_is_not_worth_a_stage() -> None:
    """Within the margin the shorter chain is taken, even where the longer is a little faster."""
    known = profile(0.019, 0.02, s_m=0.9, m_l=0.8, s_l=0.1)
    assert best_depth(SPEC, known, margin=0.05).pipeline.label == "{m,l}"
    assert best_depth(SPEC, known, margin=0.9).pipeline.label == "{l}"


def test_unknown_pairs_are_left_out_and_other_strategies_refused() -> None:
    """Nothing is invented for a pair without acceptance."""
    found = depths(SPEC, profile(0.004, 0.02, s_m=0.8, m_l=0.8))
    assert "{s,l}" not in [one.pipeline.label for one in found]
    with pytest.raises(InputError, match="must be pipelined"):
        depths(PipelineSpec.alone(SPEC.target), profile(0.004, 0.02))
