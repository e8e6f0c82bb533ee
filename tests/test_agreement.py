"""Recorded and synthetic choices, and their replay."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_model.acceptance import IID, Markov, Recorded
from pipespec_model.agreement import NO_PROPOSAL, Agreement, Replay, made_up, synthetic
from pipespec_model.errors import InputError
from pipespec_model.uniforms import ON_PATH, STEP_TIME, uniform


def agreement(*rows: list[int], **more) -> Agreement:
    names = tuple(f"m{i}" for i in range(len(rows)))
    return Agreement("p", 3, names, np.array(rows, dtype=np.int64), **more)


def same(a: Agreement, b: Agreement) -> bool:
    return a.to_dict() == b.to_dict() and bool((a.tokens == b.tokens).all()) and a.tokens.dtype == b.tokens.dtype


@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_an_agreement_survives_to_dict_and_back(k: int, n: int, extra: int):
    """from_dict(to_dict(x)) is x, through JSON, an empty answer included."""
    names = tuple(f"m{i}" for i in range(k))
    made = Agreement("p", 3, names, np.arange(k * n).reshape(k, n), "code", n + extra, (7, 8))
    assert same(Agreement.from_dict(json.loads(json.dumps(made.to_dict()))), made)


@pytest.mark.parametrize("data", [
    {}, {"prompt": "p", "prompt_length": 1, "names": ["a"]},
    {"prompt": "p", "prompt_length": 1, "names": ["a", "b"], "tokens": [[1, 2], [3]]},
    {"prompt": "p", "prompt_length": 1, "names": ["a"], "tokens": [["x"]]},
    {"prompt": "p", "prompt_length": None, "names": ["a"], "tokens": [[1]]},
])
def test_a_bad_agreement_is_bad_input(data: dict):
    """A missing key, ragged rows or words for token ids are one clear error."""
    with pytest.raises(InputError, match="agreement must hold prompt"):
        Agreement.from_dict(data)


def test_as_many_rows_as_names():
    """A matrix that lacks a row, or has no rows, is refused."""
    with pytest.raises(InputError, match=r"agreement\.tokens must have 2 rows"):
        Agreement("p", 3, ("a", "b"), np.zeros((1, 4), dtype=np.int64))
    with pytest.raises(InputError, match=r"agreement\.tokens"):
        Agreement("p", 3, ("a",), np.zeros(4, dtype=np.int64))


def test_rates_come_from_the_targets_row():
    """Positions without a proposal are left out; a stage that never proposes has no rate."""
    made = agreement([1, 2, 9, NO_PROPOSAL], [NO_PROPOSAL] * 4, [1, 2, 3, 4])
    assert [made.rate(name) for name in made.names] == [pytest.approx(2 / 3), None, 1.0]


def test_any_subset_is_a_pipeline():
    """select takes rows by name in the order asked for, and names what is missing."""
    made = agreement([1, 9], [2, 9], [3, 9], budget=5, eos=(9,))
    two = made.select(["m1", "m2"])
    assert two.tokens.tolist() == [[2, 9], [3, 9]]
    assert (two.names, two.budget, two.eos) == (("m1", "m2"), 5, (9,))
    with pytest.raises(InputError, match="must hold a row for 'mx'"):
        made.select(["mx", "m2"])


def test_replay_gives_the_recorded_choice_on_the_targets_path():
    """After the target's own prefix a stage answers from its row, one choice per draft and one more."""
    replay = Replay(agreement([1, 9, 3, 4], [1, 2, 3, 4]))
    assert replay.choices(0, [], []) == [1]
    assert replay.choices(0, [1], []) == [9]
    assert replay.choices(1, [1], [2, 3]) == [2, 3, 4]
    assert replay.choices(0, [1, 2], [3]) == [3, 4]


def test_replay_leaves_the_record_at_the_first_difference():
    """Behind a draft that is not the target's a verifier agrees always at neighbour rate 1, never at 0,
    and what it makes up is no recorded token."""
    made = agreement([1, 9, 3, 4], [1, 2, 3, 4])
    always, never = Replay(made, neighbour_rate=1.0), Replay(made, neighbour_rate=0.0)
    assert always.choices(1, [1], [9, 3])[:2] == [2, 3]
    off = never.choices(1, [1], [9, 3])
    assert off[0] == 2
    assert min(off[1:]) > 1 << 32
    assert min(never.choices(1, [1, 2, 3, 4], [])) > 1 << 32
    assert always.choices(1, [9], [7]) != [7]


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_off_the_path_a_choice_is_the_same_before_and_after_the_draft(rate: float):
    """A stage agrees with its upstream at the neighbour rate also where it took a plain step or gave a bonus token
    before that draft came, which is then compared."""
    replay = Replay(agreement([1, 2], [1, 2], [1, 2]), neighbour_rate=rate)
    agreed = []
    for position in range(2, 1200):
        held = [7] * position
        (draft,), (first,) = replay.choices(0, held, []), replay.choices(1, held, [])
        assert replay.choices(1, held, [draft])[0] == first
        assert replay.choices(2, held, [first])[0] == replay.choices(2, held, [])[0]
        agreed.append(first == draft)
    assert np.mean(agreed) == pytest.approx(rate, abs=0.05)


def test_replay_is_a_pure_function():
    """The same question gets the same answer in any order; another seed or prompt another one."""
    made = agreement([1, 9, 3, 4], [1, 2, 3, 4])
    replay = Replay(made, seed=3)
    asked = [(1, [9], [8]), (0, [1, 9], []), (1, [1], [9, 9])]
    first = [replay.choices(*question) for question in asked]
    assert [replay.choices(*question) for question in reversed(asked)] == first[::-1]
    assert Replay(made, seed=4).choices(0, [9], []) != replay.choices(0, [9], [])
    assert Replay(made, seed=3, prompt=1).choices(0, [9], []) != replay.choices(0, [9], [])


def test_one_draft_more_does_not_change_the_choices_before_it():
    """A wider window gives the narrower one's choices as its beginning."""
    replay = Replay(agreement([1, 2, 9, 4], [1, 2, 3, 4]), neighbour_rate=0.5)
    drafts = [1, 2, 9, 8, 7, 6]
    for width in range(len(drafts)):
        longer = replay.choices(1, [], drafts[: width + 1])
        assert longer[: width + 1][:width] == replay.choices(1, [], drafts[:width])[:width]


def test_a_lookup_proposes_a_block_and_stops_where_it_has_nothing():
    """On the path proposals follow each other up to the limit or the first position without one."""
    replay = Replay(agreement([1, 2, 3, NO_PROPOSAL], [1, 2, 3, 4]))
    assert replay.propose(0, [], 10) == [1, 2, 3]
    assert replay.propose(0, [], 2) == [1, 2]
    assert replay.propose(0, [1, 2, 3], 5) == []
    assert replay.propose(0, [], 0) == []


def test_a_lookup_off_the_path_goes_on_at_the_recorded_rate():
    """Once its proposal was wrong, a lookup goes on as often as on the record a proposal follows a
    proposal: never where none does, always where all do."""
    alone = [9, NO_PROPOSAL] * 10
    assert Replay(agreement(alone, list(range(1, 21)))).propose(0, [], 10) == [9]
    block = Replay(agreement([9] * 20, list(range(1, 21)))).propose(0, [], 10)
    assert block[0] == 9
    assert len(block) == 10


@pytest.mark.parametrize("model", [IID(0.7), Markov(0.9, 0.3), Recorded((True, True, False))])
def test_synthetic_choices_follow_their_acceptance_model(model):
    """Row by row the bits are the model's own for the same uniforms, whatever the number of stages."""
    made = synthetic(["a", "b", "c"], [model, IID(1.0)], num_tokens=200, seed=5, prompt=2)
    draws = [uniform(5, 2, 0, ON_PATH, position) for position in range(200)]
    assert (made.tokens[0] == made.tokens[1]).tolist() == model.bits(draws)
    assert (made.tokens[1] == made.tokens[2]).all()
    assert made.tokens[2].tolist() == list(range(1, 201))


def test_synthetic_wrong_tokens_are_nobodys():
    """At acceptance 0 no stage's token is another's, so a wrong drafter is wrong for everyone."""
    made = synthetic(["a", "b", "c"], [IID(0.0)] * 2, num_tokens=100, seed=1)
    assert len(np.unique(made.tokens)) == 300
    assert made_up(1, 0, 0, 0, 0) == made.tokens[0, 0]


def test_uniforms_are_uniform_and_unrelated():
    """Mean ½ and correlation 0 between neighbouring seeds, prompts, stages, purposes and indices, each
    within four standard errors; the counter-based draws are fixed, so luck plays no part."""
    n = 4000
    base = np.array([uniform(0, 0, 0, ON_PATH, i) for i in range(n)])
    assert base.min() >= 0.0
    assert base.max() < 1.0
    others = [(1, 0, 0, ON_PATH, 0), (0, 1, 0, ON_PATH, 0), (0, 0, 1, ON_PATH, 0), (0, 0, 0, STEP_TIME, 0),
              (0, 0, 0, ON_PATH, 1)]
    assert abs(base.mean() - 0.5) < 4 / math.sqrt(12 * n)
    for seed, prompt, stage, purpose, shift in others:
        other = np.array([uniform(seed, prompt, stage, purpose, i + shift) for i in range(n)])
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(n)
    assert abs(np.corrcoef(base, base + 0.05 * other)[0, 1]) > 4 / math.sqrt(n)
