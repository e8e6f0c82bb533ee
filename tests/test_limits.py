"""The formulas in their limits, against each other and against what must come out."""

from __future__ import annotations

import doctest
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
from drawn_pipelines import script

from pipespec_model.acceptance import IID
from pipespec_model.closed_form import tokens_per_step, tokens_per_verification
from pipespec_model.decomposition import decomposed
from pipespec_model.predict import predict, synchronous_rounds
from pipespec_model.profile import Profile
from pipespec_model.renewal import two_stages
from pipespec_model.spec import PipelineSpec

RATES = [0.05, 0.3, 0.6, 0.8, 0.95]
FREE_S = 1e-7  # a drafter's step beside a target's of 0.1 s


def chain(rate: float, k: int = 3) -> tuple[PipelineSpec, Profile]:
    """A random chain of the error map, every link without lookahead and with one acceptance rate, no costs."""
    spec, profile = script().drawn(2, k=k)
    links = tuple(link.model_copy(update={"lookahead": 0}) for link in spec.links)
    return spec.model_copy(update={"links": links}), Profile(
        profile.latency, acceptance=dict.fromkeys(profile.acceptance, IID(rate)))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("window", [1, 4, 8])
def test_with_a_free_drafter_the_papers_formula_is_exact(rate: float, window: int) -> None:
    """c → 0 and no lookahead: after a refusal a plain step, else a full window, whose bonus position was drafted:
    Eq. 4, tokens per step, and in seconds too where a wide step takes no longer."""
    found = two_stages(draft_s=FREE_S, verify_s=np.full(window + 1, 0.1), acceptance=IID(rate),
                       buffer_tokens=4 * (window + 1))
    assert found.mean_acceptance_length == pytest.approx(tokens_per_step(rate, window), rel=1e-3)
    assert found.tokens_per_s * 0.1 == pytest.approx(tokens_per_step(rate, window), rel=1e-3)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("window", [1, 4, 8])
def test_with_a_free_drafter_and_full_windows_it_is_leviathans(rate: float, window: int) -> None:
    """c → 0 and a lookahead of a whole window: every step verifies γ drafts; in turn or at once is the same."""
    found = two_stages(draft_s=FREE_S, verify_s=np.full(window + 1, 0.1), acceptance=IID(rate), lookahead=window,
                       buffer_tokens=4 * (window + 1))
    assert found.mean_acceptance_length == pytest.approx(tokens_per_verification(rate, window), rel=1e-3)
    assert found.starved_probability == pytest.approx(0.0, abs=1e-9)
    in_turn = synchronous_rounds(draft_s=FREE_S, verify_s=0.1, acceptance=IID(rate), window=window)
    assert found.tokens_per_s == pytest.approx(in_turn.tokens_per_s, rel=1e-3)


def test_the_papers_formula_fails_in_seconds() -> None:
    """The same pair with c = 0.3: Eq. 4 still says 2.3 tokens a step, the target gets less and in less time than
    plain decoding where wide steps are dear."""
    wide = np.array([0.1] + [0.3] * 4)
    found = two_stages(draft_s=0.03, verify_s=wide, acceptance=IID(0.5), buffer_tokens=16)
    assert tokens_per_step(0.5, 4) > 1
    assert found.mean_acceptance_length < tokens_per_step(0.5, 4)
    assert found.tokens_per_s * 0.1 < 1


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_no_draft_and_no_stage_are_autoregressive(rate: float) -> None:
    """γ = 0 in turn, and a chain of one stage, are plain decoding: 1 / t(1)."""
    assert synchronous_rounds(draft_s=0.02, verify_s=0.1, acceptance=IID(rate), window=0).tokens_per_s == (
        pytest.approx(10.0))
    spec, profile = chain(rate)
    alone = predict(PipelineSpec.alone(spec.target), profile)
    assert alone.tokens_per_s == pytest.approx(1 / profile.stage_latency(spec.target).step.mean_s(1, 0))
    assert alone.mean_acceptance_length == 1


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_chain_without_agreement_is_its_target(k: int) -> None:
    """α = 0 at every link, no lookahead: the target never waits and is never helped."""
    spec, profile = chain(0.0, k)
    alone = predict(PipelineSpec.alone(spec.target), profile).tokens_per_s
    assert predict(spec, profile).tokens_per_s == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("k", [2, 3])
def test_a_chain_in_full_agreement_is_certain(k: int) -> None:
    """α = 1 at every link leaves nothing to chance: the simulation, within 2%, and never more than the drafter
    makes or a window carries."""
    spec, profile = chain(1.0, k)
    carried = [1 / profile.stage_latency(spec.stages[0]).step.mean_s(1, 0)]
    for stage, link in zip(spec.stages[1:], spec.links, strict=True):
        widest = min(link.max_window, link.buffer_tokens) + 1
        carried.append(max(w / profile.stage_latency(stage).step.mean_s(w, 0) for w in range(1, widest + 1)))
    said = predict(spec, profile).tokens_per_s
    assert said <= 1.02 * min(carried)
    assert said == pytest.approx(script().simulated(spec, profile, 2)[0], rel=0.02)


def test_a_chain_is_faster_with_every_agreement() -> None:
    """Throughput of three stages rises with the α of all links (rises by more than sampling errs)."""
    speeds = [decomposed(*chain(rate)).tokens_per_s for rate in (0.0, 0.25, 0.5, 0.7, 0.85, 0.95, 1.0)]
    assert all(a < b for a, b in pairwise(speeds))


@pytest.mark.parametrize("name", ["renewal", "pays", "predict", "decomposition", "bounds", "depth", "uses", "fair"])
def test_doctests_run(name: str) -> None:
    """The examples in the documentation are true, and there are some."""
    found = doctest.testmod(import_module(f"pipespec_model.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
