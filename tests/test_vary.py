"""What a sweep can vary, which values, and which points a design has."""

from __future__ import annotations

import numpy as np
import pytest
from sweeps import CHAIN, PAIR, PROFILE

from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.profile import Costs, Profile
from pipespec_model.spec import PipelineSpec
from simulate.points import Changes, Design
from simulate.vary import FIELDS, Axis, axes_of, axis, parse_vary, targets


@pytest.mark.parametrize(("text", "values"), [
    ("depth=2..5", (2, 3, 4, 5)),
    ("links.0.lookahead=0..16:5", (0, 4, 8, 12, 16)),
    ("links.*.acceptance_rate=0.05..0.25:5", (0.05, 0.1, 0.15, 0.2, 0.25)),
    ("stages.0.latency=1e-3,0.01", (0.001, 0.01)),
    ("handshake=overlapped,blocking", ("overlapped", "blocking")),
    ("depth=3..3", (3,)),
])
def test_values_as_written(text: str, values: tuple):
    """Whole ranges count, n points are evenly spaced without binary dust, lists are as written."""
    found = parse_vary(text).values
    assert found == values
    assert [type(x) for x in found] == [type(x) for x in values]


@pytest.mark.parametrize(("text", "said"), [
    ("depth", "--vary must be FIELD=VALUES, got 'depth'"),
    ("depth=5..2", "must not be an empty range, got '5..2': write the smaller end first"),
    ("depth=", "must have at least one value"),
    ("x=0.1..0.2", "must say how many points"),
    ("x=0.1..0.2:0", "must have a whole number >= 1 of points"),
    ("x=a..b:3", "must have numbers at both ends of a range"),
    ("x=1,2,1", "must not name a value twice"),
])
def test_values_that_are_none(text: str, said: str):
    """An empty range, a missing count and a repeated value are each named."""
    with pytest.raises(InputError) as error:
        parse_vary(text)
    assert said in str(error.value)


@pytest.mark.parametrize(("path", "said"), [
    ("links.0.lookahed", "is not a known field: did you mean links.0.lookahead?"),
    ("links.*.aceptance_rate", "did you mean links.*.acceptance_rate?"),
    ("stage.0.latency", "did you mean stages.0.latency?"),
    ("handshak", "did you mean handshake?"),
    ("zzzzzz", "known are strategy, handshake"),
    ("links.2.lookahead", "must be one of 0, 1, small>middle, middle>large, *"),
    ("stages.huge.latency", "must be one of 0, 1, 2, small, middle, large, *"),
])
def test_a_field_that_does_not_exist(path: str, said: str):
    """The nearest name is suggested; a wrong index is told what there is."""
    with pytest.raises(InputError) as error:
        targets(path, CHAIN)
    assert said in str(error.value)


def test_places():
    """A star is all, a stage and a link go by number or name."""
    assert targets("links.*.lookahead", CHAIN) == ("lookahead", (0, 1))
    assert targets("stages.large.latency", CHAIN) == ("latency", (2,))
    assert targets("links.middle>large.lookahead", CHAIN) == ("lookahead", (1,))
    assert axis("stages.*.latency", [1]).column == "stages_all_latency_s"


def test_axes_are_given_once():
    """The same field twice, or none at all, is no sweep."""
    with pytest.raises(InputError, match="must be given once"):
        axes_of([axis("depth", "1..2"), axis("depth", "2..3")])
    with pytest.raises(InputError, match="must be given at least once"):
        axes_of({})


def test_a_grid_is_the_product_and_its_last_axis_is_the_fastest():
    """6 points of 2 × 3, every one once; any point can be asked for alone."""
    grid = Design((Axis("a", (1, 2)), Axis("b", (3, 4, 5))))
    assert grid.rows(range(len(grid))) == [(1, 3), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5)]
    assert grid.rows([4]) == [(2, 4)]
    # Never enumerated: a product that no memory holds has a length and a last point.
    huge = Design(tuple(Axis(name, tuple(range(1000))) for name in "abcd"))
    assert len(huge) == 10**12
    assert huge.rows([10**12 - 1]) == [(999,) * 4]


def test_zip_walks_all_axes_at_once():
    """First values, second values; unequal lengths are refused."""
    assert Design((Axis("a", (1, 2)), Axis("b", (3, 4))), "zip").rows([0, 1]) == [(1, 3), (2, 4)]
    with pytest.raises(InputError, match="as many values on every --vary"):
        Design((Axis("a", (1, 2)), Axis("b", (3,))), "zip")


def test_a_latin_hypercube_uses_every_stratum_once():
    """Of 20 points, one lies in each twentieth of the span; a list of four is used five times each."""
    design = Design((axis("links.0.acceptance_rate", "0..1:3"), axis("depth", "1..4"),
                     axis("stages.0.latency", "0.5..1.5:2")), "lhs", 20, seed=3)
    rows = design.rows(range(20))
    assert sorted(int(20 * row[0]) for row in rows) == list(range(20))
    assert sorted(row[1] for row in rows) == sorted([1, 2, 3, 4] * 5)
    assert sorted(int(20 * (row[2] - 0.5)) for row in rows) == list(range(20))
    assert design.rows([7, 3]) == [rows[7], rows[3]]
    for wrong in ({"kind": "lhs"}, {"kind": "grid", "num_points": 3}, {"kind": "lhs", "num_points": 0}):
        with pytest.raises(InputError, match="--points"):
            Design(design.axes, **wrong)


def changed(spec: PipelineSpec, profile: Profile = PROFILE, **values: object) -> tuple[PipelineSpec, Profile]:
    """Pipeline and profile with these fields set; ``__`` stands for a dot."""
    axes = tuple(Axis(key.replace("__", "."), (value,)) for key, value in values.items())
    return Changes(spec, profile, axes).at(tuple(values.values()))  # type: ignore[arg-type]


def test_fields_of_the_pipeline_change():
    """Strategy, handshake, lookahead and device arrive in the spec, and nothing else changes."""
    spec, profile = changed(PAIR, handshake="blocking", links__0__lookahead=3, stages__small__device="gpu:9")
    assert (spec.handshake, spec.links[0].lookahead, spec.stages[0].device) == ("blocking", 3, "gpu:9")
    assert spec.stages[1] == PAIR.stages[1]
    assert profile == PROFILE


def test_depth_keeps_the_stages_next_to_the_target():
    """Two of three stages are the last two with their link; one is autoregressive, as is that strategy."""
    two, _ = changed(CHAIN, depth=2, links__1__lookahead=4)
    assert two.label == "{middle,large}"
    assert [link.lookahead for link in two.links] == [4]
    for alone in ({"depth": 1}, {"strategy": "autoregressive"}):
        assert changed(CHAIN, **alone)[0] == PipelineSpec.alone(CHAIN.target)
    with pytest.raises(InputError, match=r"depth must be in \[1, 3\], the stages of the pipeline file, got 4"):
        changed(CHAIN, depth=4)


def test_fields_of_the_profile_change_what_is_used():
    """Acceptance, times, costs, contention and the neighbour rate are what the pipeline then looks up, also
    where a smaller depth moves the stages."""
    spec, profile = changed(
        CHAIN, depth=2, links__1__acceptance_rate=0.4, stages__1__latency=0.5, stages__large__latency_factor=2.0,
        stages__1__handover_s=0.25, stages__1__rollback_s=0.125, stages__large__contention=0.5, neighbour_rate=0.3)
    middle, large = spec.stages
    assert profile.pair(middle, large) == IID(0.4)
    assert profile.stage_latency(middle).step.mean_s(3, 0) == 0.5
    assert profile.stage_latency(large).step.mean_s(3, 0) == pytest.approx(2 * 0.103)
    assert profile.stage_costs(middle, "pipelined") == Costs(handover_s=0.25, rollback_s=0.125)
    assert profile.stage_costs(large, "pipelined") == Costs()
    assert profile.rates(frozenset(map(profile.rate_key, spec.stages)))[profile.rate_key(large)] == 0.5
    assert profile.neighbour_rate == 0.3


def test_a_varied_rate_is_not_overruled_by_recorded_texts():
    """Rows of a profile would be replayed whatever the rate; they are dropped, and only then."""
    rows = Agreement("kept", 1, tuple(stage.choice_key for stage in PAIR.stages), np.array([[1, 9], [1, 2]]))
    known = Profile(PROFILE.latency, PROFILE.acceptance, agreement=(rows,))
    assert changed(PAIR, known, links__0__acceptance_rate=0.5)[1].agreement == ()
    assert changed(PAIR, known, links__0__lookahead=2)[1].agreement == (rows,)


@pytest.mark.parametrize(("values", "said"), [
    ({"links__0__acceptance_rate": 1.5}, r"acceptance_rate must be in \[0, 1\], got 1.5"),
    ({"stages__0__latency": -1.0}, "seconds must be a finite number >= 0"),
    ({"stages__0__latency": "fast"}, "latency must be a number, got 'fast'"),
    ({"stages__0__contention": 0.0}, r"must be in \(0, 1\]"),
    ({"links__0__lookahead": 40}, "lookahead must be <= min"),
    ({"links__0__lookahead": "auto"}, "must be a number here"),
    ({"strategy": "magic"}, "strategy must be"),
])
def test_values_out_of_range(values: dict, said: str):
    """Each is refused by the rule of its field."""
    with pytest.raises(InputError, match=said):
        changed(PAIR, **values)


def test_two_stages_of_one_model_have_no_acceptance_to_vary():
    """They agree by definition, so a varied rate would never reach the simulation."""
    twins = PAIR.model_copy(update={"stages": (PAIR.stages[1].model_copy(update={"name": "copy"}), PAIR.stages[1])})
    with pytest.raises(InputError, match="must join two different models"):
        changed(twins, links__0__acceptance_rate=0.5)


SAMPLES = {"strategy": "speculative", "handshake": "blocking", "depth": 1, "neighbour_rate": 0.3, "drafter": "hybrid",
           "model": "other", "device": "gpu:7", "dtype": "float16", "quantize": "int8", "threads": 3, "max_ngram": 4,
           "draft_exit_threshold": 0.25}


@pytest.mark.parametrize("path", [path for path in FIELDS if not path.endswith(
    ("num_skipped_layers", "layer_opt_interval", "draft_exit_threshold", "kept_layers"))])
def test_every_field_reaches_pipeline_or_profile(path: str):
    """No field that can be named is parsed and then unused."""
    name = path.rpartition(".")[2]
    place = path.replace("*", "0")
    value = SAMPLES.get(name, 2 if path.startswith("links") and name != "acceptance_rate" else 0.5)
    spec, profile = Changes(PAIR, PROFILE, (Axis(place, (value,)),)).at((value,))
    assert (spec, profile) != (PAIR, PROFILE)
