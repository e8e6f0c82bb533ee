"""More than two stages by formula: against the event simulator, against the two-stage model, limits, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_pipelines import script

from pipespec_model.bounds import bounds
from pipespec_model.decomposition import decomposed
from pipespec_model.errors import InputError
from pipespec_model.predict import predict
from pipespec_model.renewal import renewal
from pipespec_model.spec import PipelineSpec


def test_formula_is_the_simulation_on_random_pipelines() -> None:
    """A share of the error map of docs/theory.md: none off by more than 8%, nor all together by more than 3%,
    beyond four standard errors of the simulation (false alarm below 1e-3)."""
    percents, errors = [], []
    for seed in range(7):
        spec, profile = script().drawn(seed, k=3 + (seed == 6))
        found, error = script().simulated(spec, profile, 8)
        percents.append(100 * (decomposed(spec, profile).tokens_per_s / found - 1))
        errors.append(100 * error / found)
        assert abs(percents[-1]) <= 8 + 4 * errors[-1], f"seed {seed}"
    assert abs(np.mean(percents)) <= 3 + 4 * np.sqrt(np.mean(np.square(errors)) / len(errors))


@pytest.mark.parametrize("seed", range(6))
def test_two_stages_are_the_renewal_models(seed: int) -> None:
    """With one link there is nothing to decompose: the exact model within 2% (its grid of phases is finer)."""
    spec, profile = script().drawn(seed, k=2)
    said, exact = decomposed(spec, profile), renewal(spec, profile)
    assert said.tokens_per_s == pytest.approx(exact.tokens_per_s, rel=0.02)
    assert said.mean_acceptance_length == pytest.approx(exact.mean_acceptance_length, rel=0.02)


@pytest.mark.parametrize("seed", range(12))
def test_formula_keeps_within_the_bounds(seed: int) -> None:
    """What is proved of every pipeline holds of the approximation."""
    spec, profile = script().drawn(seed)
    proved, said = bounds(spec, profile), decomposed(spec, profile).tokens_per_s
    assert proved.lower * 0.98 <= said <= proved.upper * 1.02


@pytest.mark.parametrize("k", [2, 3])
def test_a_buffer_that_is_never_full_is_any_larger_one(k: int) -> None:
    """Room for 512, 1,000 or 100,000 tokens is the same where windows are small."""
    spec, profile = script().drawn(1, k=k)
    speeds = [decomposed(spec.model_copy(update={"links": tuple(
        link.model_copy(update={"buffer_tokens": room}) for link in spec.links)}), profile).tokens_per_s
        for room in (512, 1000, 100_000)]
    assert speeds == pytest.approx([speeds[0]] * 3)


def test_predict_names_the_decomposition() -> None:
    """The same figure through ``predict``, which says which model answered; the same twice."""
    spec, profile = script().drawn(1)
    said = predict(spec, profile)
    assert said.model == "decomposition"
    assert said.tokens_per_s == decomposed(spec, profile).tokens_per_s == predict(spec, profile).tokens_per_s


def test_outside_the_range_it_says_so() -> None:
    """The published handshake with three stages, and a target alone, are refused by name."""
    spec, profile = script().drawn(1, handshake="blocking")
    with pytest.raises(InputError, match="handshake must be overlapped"):
        decomposed(spec, profile)
    alone = PipelineSpec.alone(spec.target)
    with pytest.raises(InputError, match="must be pipelined models"):
        decomposed(alone, profile)
