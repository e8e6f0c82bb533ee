"""The event simulator against logs worked out by hand, and its laws on random pipelines.

A log line reads ``milliseconds stage event tokens-held``.  Stages hold constant step times, so that
every line follows from the rules in pipespec_model/protocol.py with pencil and paper.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipespec_model.acceptance import IID
from pipespec_model.agreement import NO_PROPOSAL, Agreement, synthetic
from pipespec_model.latency import Constant, Empirical
from pipespec_model.metrics import LinkFigures, booked_links
from pipespec_model.profile import Contention, Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from simulate.engine import PromptRun


def pipeline(k: int, strategy: str = "pipelined", *, lookup: bool = False, handshake: str = "overlapped",
             **link: int) -> PipelineSpec:
    """k stages s0, s1, …; links that hold four tokens and start at once unless told otherwise."""
    stages: list[dict[str, Any]] = [{"name": f"s{i}", "model": f"m{i}"} for i in range(k)]
    if lookup:
        stages[0]["drafter"] = "prompt-lookup"
    links = [{"lookahead": 0, "buffer_tokens": 4, "max_window": 4, **link}] * (k - 1)
    return PipelineSpec.from_dict({"strategy": strategy, "handshake": handshake, "stages": stages, "links": links})


def timed(*milliseconds: float, **more: Any) -> Profile:
    """A profile of constant step times, drafter first."""
    latency = {f"s{i}": StageLatency(Constant(ms / 1e3)) for i, ms in enumerate(milliseconds)}
    return Profile(latency, neighbour_rate=0.0, **more)


def choices(spec: PipelineSpec, *rows: Sequence[int], eos: Sequence[int] = ()) -> Agreement:
    tokens = np.array(rows, dtype=np.int64).reshape(len(rows), -1)
    return Agreement("by hand", 3, tuple(s.choice_key for s in spec.stages), tokens, eos=tuple(eos))


def log_of(spec: PipelineSpec, profile: Profile, *rows: Sequence[int]) -> list[str]:
    run = PromptRun(spec, profile, choices(spec, *rows), log=[])
    record, _ = run.run()
    assert record.tokens == list(rows[-1])
    assert run.log is not None
    return [f"{ns / 1e6:g} {stage} {what} {position}" for ns, stage, what, position in run.log]


def expected(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split(";")]


def test_autoregressive_is_one_step_a_token():
    """One stage of 4 ms decodes three tokens in steps that follow each other."""
    log = log_of(pipeline(1, "autoregressive"), timed(4), [1, 2, 3])
    assert log == expected(
        "0 0 start prefill 0; 4 0 end 0; 4 0 start decode 1; 8 0 end 1; 8 0 start decode 2; 12 0 end 2")


def test_all_accepted_pipelined():
    """Acceptance 1, a buffer of two: the drafter waits at two undecided tokens, and what was drafted
    during a verification is overtaken by its bonus token."""
    assert log_of(pipeline(2, buffer_tokens=2), timed(1, 4), [1, 2, 3, 4], [1, 2, 3, 4]) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0;
        1 0 end 0; 1 0 send down 1; 1 0 start draft 1; 1 1 arrive 0;
        2 0 end 1; 2 0 send down 2; 2 1 arrive 0;
        4 1 end 0; 4 1 send up 1; 4 1 start verify 1; 4 0 arrive 2; 4 0 start draft 2;
        5 0 end 2; 5 0 send down 3; 5 1 arrive 1;
        8 1 end 1; 8 1 send up 3; 8 1 start decode 3; 8 0 arrive 3; 8 0 send down 3; 8 1 arrive 3;
        12 1 end 3; 12 1 send up 4; 12 0 arrive 3""")


def test_none_accepted_pipelined():
    """Acceptance 0 at lookahead 0: the target takes a plain step after each rollback and never waits."""
    assert log_of(pipeline(2, buffer_tokens=2), timed(1, 4), [9, 9, 9], [1, 2, 3]) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0;
        1 0 end 0; 1 0 send down 1; 1 0 start draft 1; 1 1 arrive 0;
        2 0 end 1; 2 0 send down 2; 2 1 arrive 0;
        4 1 end 0; 4 1 send up 1; 4 1 start decode 1; 4 0 arrive 2; 4 0 start draft 1;
        5 0 end 1; 5 0 send down 2; 5 1 arrive 1;
        8 1 end 1; 8 1 send up 2; 8 1 start decode 2; 8 0 arrive 2; 8 0 send down 2; 8 1 arrive 2;
        12 1 end 2; 12 1 send up 3; 12 0 arrive 2""")


def test_a_buffer_of_one():
    """One undecided token at most: the drafter's token is always decided while it waits."""
    spec = pipeline(2, buffer_tokens=1, max_window=1)
    assert log_of(spec, timed(1, 3), [1, 2, 3], [1, 2, 3]) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0;
        1 0 end 0; 1 0 send down 1; 1 1 arrive 0;
        3 1 end 0; 3 1 send up 1; 3 1 start decode 1; 3 0 arrive 1; 3 0 start draft 1;
        4 0 end 1; 4 0 send down 2; 4 1 arrive 1;
        6 1 end 1; 6 1 send up 2; 6 1 start decode 2; 6 0 arrive 2; 6 0 send down 2; 6 1 arrive 2;
        9 1 end 2; 9 1 send up 3; 9 0 arrive 2""")


def test_a_rejection_in_mid_window_of_a_chain():
    """Two of three drafts accepted, then the correction: the next round drafts on from it."""
    spec = pipeline(2, "speculative", lookahead=3)
    assert log_of(spec, timed(1, 4), [1, 2, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6]) == expected("""
        0 0 start prefill 0; 1 0 end 0; 1 0 start draft 1; 2 0 end 1; 2 0 start draft 2; 3 0 end 2;
        3 0 send down 3; 3 1 arrive 0; 3 1 start prefill 0; 7 1 end 0; 7 1 send up 3; 7 0 arrive 3;
        7 0 start draft 3; 8 0 end 3; 8 0 start draft 4; 9 0 end 4; 9 0 send down 5; 9 1 arrive 3;
        9 1 start verify 3; 13 1 end 3; 13 1 send up 6; 13 0 arrive 5""")


def test_a_chain_of_two_with_the_bonus_token():
    """All accepted: two drafts of 1 ms and a verification of 4 ms give three tokens a round."""
    assert log_of(pipeline(2, "speculative", lookahead=2), timed(1, 4), *[[1, 2, 3, 4, 5, 6]] * 2) == expected("""
        0 0 start prefill 0; 1 0 end 0; 1 0 start draft 1; 2 0 end 1; 2 0 send down 2; 2 1 arrive 0;
        2 1 start prefill 0; 6 1 end 0; 6 1 send up 3; 6 0 arrive 2;
        6 0 start draft 3; 7 0 end 3; 7 0 start draft 4; 8 0 end 4; 8 0 send down 5; 8 1 arrive 3;
        8 1 start verify 3; 12 1 end 3; 12 1 send up 6; 12 0 arrive 5""")


def test_blocking_starts_from_two_first_tokens_and_asks_after_each_verification():
    """All accepted: no request after prefill; the verification takes all that waits."""
    spec = pipeline(2, handshake="blocking", lookahead=1)
    assert log_of(spec, timed(1, 4), [1, 2, 3, 4], [1, 2, 3, 4]) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0;
        1 0 end 0; 1 0 send down 1; 1 0 start draft 1; 1 1 arrive 0;
        2 0 end 1; 2 0 send down 2; 2 0 start draft 2; 2 1 arrive 0;
        3 0 end 2; 3 0 send down 3; 3 1 arrive 0; 4 1 end 0; 4 1 start verify 1;
        8 1 end 1; 8 1 send up 4; 8 0 arrive 3""")


def test_a_blocking_rejection_costs_the_residual_step_and_a_window():
    """The request of 7 ms is answered when the drafter's step ends at 8; one draft later, at 10, the
    target may start: three milliseconds that the overlapped handshake spends on a plain step."""
    spec = pipeline(2, handshake="blocking", lookahead=1)
    assert log_of(spec, timed(2, 3), [1, 9, 3, 4, 5], [1, 2, 3, 4, 5]) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0;
        2 0 end 0; 2 0 send down 1; 2 0 start draft 1; 2 1 arrive 0; 3 1 end 0;
        4 0 end 1; 4 0 send down 2; 4 0 start draft 2; 4 1 arrive 1; 4 1 start verify 1;
        6 0 end 2; 6 0 send down 3; 6 0 start draft 3; 6 1 arrive 1;
        7 1 end 1; 7 1 send up 2; 7 0 arrive 3;
        8 0 end 3; 8 0 send down 2; 8 0 start draft 2; 8 1 arrive 2;
        10 0 end 2; 10 0 send down 3; 10 0 start draft 3; 10 1 arrive 2; 10 1 start verify 2;
        12 0 end 3; 12 0 send down 4; 12 1 arrive 2;
        13 1 end 2; 13 1 send up 4; 13 0 arrive 4; 13 0 send down 4; 13 1 arrive 4; 13 1 start decode 4;
        16 1 end 4; 16 1 send up 5; 16 0 arrive 4""")


def test_a_blocking_drafter_decodes_the_bonus_position_itself():
    """Shorter than the target after a full acceptance, it changes nothing and drafts that position
    again, right at 9 ms, and the one after it wrongly."""
    spec = pipeline(2, handshake="blocking", lookahead=1, buffer_tokens=1, max_window=1)
    assert log_of(spec, timed(1, 4), [1, 2, 3, 9, 5, 6], [1, 2, 3, 4, 5, 6]) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0;
        1 0 end 0; 1 0 send down 1; 1 0 start draft 1; 1 1 arrive 0;
        2 0 end 1; 2 0 send down 2; 2 1 arrive 0; 4 1 end 0; 4 1 start verify 1;
        8 1 end 1; 8 1 send up 3; 8 0 arrive 2; 8 0 send down 2; 8 0 start draft 2; 8 1 arrive 3;
        9 0 end 2; 9 0 send down 3; 9 0 start draft 3; 9 1 arrive 3;
        10 0 end 3; 10 0 send down 4; 10 1 arrive 3; 10 1 start verify 3;
        14 1 end 3; 14 1 send up 4; 14 0 arrive 4; 14 0 send down 4; 14 0 start draft 4; 14 1 arrive 4;
        15 0 end 4; 15 0 send down 5; 15 1 arrive 4; 15 1 start verify 4;
        19 1 end 4; 19 1 send up 6; 19 0 arrive 5""")


def test_a_blocking_chain_is_not_given_the_bonus_token():
    """A round of prefills, then the drafter is short of the bonus token after the first window: it drafts
    that position itself, so what is accepted whole costs three draft steps."""
    spec = pipeline(2, "speculative", handshake="blocking", lookahead=2)
    assert log_of(spec, timed(1, 4), *[[1, 2, 3, 4, 5, 6, 7]] * 2) == expected("""
        0 0 start prefill 0; 1 0 end 0; 1 0 send down 1; 1 1 arrive 0; 1 1 start prefill 0;
        5 1 end 0; 5 1 send up 1; 5 0 arrive 1; 5 0 start draft 1; 6 0 end 1; 6 0 start draft 2; 7 0 end 2;
        7 0 send down 3; 7 1 arrive 1; 7 1 start verify 1; 11 1 end 1; 11 1 send up 4; 11 0 arrive 3;
        11 0 start draft 3; 12 0 end 3; 12 0 start draft 4; 13 0 end 4; 13 0 start draft 5; 14 0 end 5;
        14 0 send down 6; 14 1 arrive 4; 14 1 start verify 4; 18 1 end 4; 18 1 send up 7; 18 0 arrive 6""")


def test_a_blocking_chain_without_drafts():
    """At lookahead 0 the drafter only fills in what it was not given, and the target decodes."""
    spec = pipeline(2, "speculative", handshake="blocking", lookahead=0)
    assert log_of(spec, timed(1, 4), [1, 2, 3], [1, 2, 3]) == expected("""
        0 0 start prefill 0; 1 0 end 0; 1 0 send down 1; 1 1 arrive 0; 1 1 start prefill 0;
        5 1 end 0; 5 1 send up 1; 5 0 arrive 1; 5 0 send down 1; 5 1 arrive 1; 5 1 start decode 1;
        9 1 end 1; 9 1 send up 2; 9 0 arrive 1; 9 0 start draft 1; 10 0 end 1; 10 0 send down 2; 10 1 arrive 2;
        10 1 start decode 2; 14 1 end 2; 14 1 send up 3; 14 0 arrive 2""")


def test_in_a_blocking_chain_only_the_target_speaks():
    """The middle stage refuses the drafter's right token at position 2, the target the middle's own: the
    drafter hears of the target's alone, keeps its token, and drafts on from there."""
    spec = pipeline(3, "speculative", handshake="blocking", lookahead=2)
    rows = [1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6]
    assert log_of(spec, timed(1, 2, 4), *rows) == expected("""
        0 0 start prefill 0; 1 0 end 0; 1 0 send down 1; 1 1 arrive 0; 1 1 start prefill 0;
        3 1 end 0; 3 1 send down 1; 3 2 arrive 0; 3 2 start prefill 0; 7 2 end 0; 7 2 send up 1;
        7 1 arrive 1; 7 1 send up 1; 7 0 arrive 1; 7 0 start draft 1; 8 0 end 1; 8 0 start draft 2; 9 0 end 2;
        9 0 send down 3; 9 1 arrive 1; 9 1 start verify 1; 11 1 end 1; 11 1 send down 3; 11 2 arrive 1;
        11 2 start verify 1; 15 2 end 1; 15 2 send up 3; 15 1 arrive 3; 15 1 send up 3; 15 0 arrive 3;
        15 0 start draft 3; 16 0 end 3; 16 0 start draft 4; 17 0 end 4; 17 0 send down 5; 17 1 arrive 3;
        17 1 start verify 3; 19 1 end 3; 19 1 send down 5; 19 2 arrive 3; 19 2 start verify 3;
        23 2 end 3; 23 2 send up 6; 23 1 arrive 5""")


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_overlapped_is_never_slower_than_blocking(k: int):
    """Over 40 prompts of equal choices and step times, the overlapped handshake takes at most 1% more
    time (it may start a verification with fewer drafts), and from three stages on it takes less."""
    rng = random.Random(k)
    names = [f"m{i}|float32|none" for i in range(k)]
    profile = timed(*(12 * 2.2**i for i in range(k)))
    made = [synthetic(names, [IID(rng.choice([0.5, 0.8, 0.95]))] * (k - 1), num_tokens=40, seed=1, prompt=i)
            for i in range(40)]
    total = {handshake: sum(PromptRun(pipeline(k, handshake=handshake, lookahead=1), profile, agreement,
                                      prompt=i).run()[0].total_s for i, agreement in enumerate(made))
             for handshake in ("overlapped", "blocking")}
    assert total["overlapped"] < total["blocking"] * (1.01 if k == 2 else 1.0)


def test_a_chain_of_three_hands_its_turn_round():
    """The middle stage verifies two drafts and adds its own, the target verifies all three; the turn
    goes back stage by stage.  The last round has room for one draft and the target's own token."""
    assert log_of(pipeline(3, "speculative", lookahead=2), timed(1, 2, 4), *[[1, 2, 3, 4, 5, 6]] * 3) == expected("""
        0 0 start prefill 0; 1 0 end 0; 1 0 start draft 1; 2 0 end 1; 2 0 send down 2; 2 1 arrive 0;
        2 1 start prefill 0; 4 1 end 0; 4 1 send up 3; 4 1 send down 3; 4 0 arrive 2; 4 2 arrive 0;
        4 2 start prefill 0; 8 2 end 0; 8 2 send up 4; 8 1 arrive 3; 8 1 send up 4; 8 1 send up 4;
        8 0 arrive 3; 8 0 arrive 3; 8 0 start draft 4; 9 0 end 4; 9 0 send down 5; 9 1 arrive 4;
        9 1 start decode 4; 11 1 end 4; 11 1 send up 5; 11 1 send down 5; 11 0 arrive 5; 11 2 arrive 4;
        11 2 start verify 4; 15 2 end 4; 15 2 send up 6; 15 1 arrive 5""")


def test_a_lookup_that_stops_early():
    """A lookup with two of three tokens says *final*, so a target that wants two drafts and holds one
    starts as soon as it hears it."""
    rows = [1, 2, NO_PROPOSAL, NO_PROPOSAL], [1, 2, 3, 4]
    assert log_of(pipeline(2, lookup=True, lookahead=2), timed(1, 4), *rows) == expected("""
        0 0 start draft 0; 0 1 start prefill 0; 1 0 end 0; 1 0 send down 2; 1 1 arrive 0;
        4 1 end 0; 4 1 send up 1; 4 0 arrive 2; 4 0 send down 2; 4 1 arrive 1; 4 1 start verify 1;
        8 1 end 1; 8 1 send up 3; 8 1 start decode 3; 8 0 arrive 2; 8 0 send down 3; 8 1 arrive 3;
        12 1 end 3; 12 1 send up 4; 12 0 arrive 3""")
    assert log_of(pipeline(2, "speculative", lookup=True, lookahead=2), timed(1, 4), *rows) == expected("""
        0 0 start draft 0; 1 0 end 0; 1 0 send down 2; 1 1 arrive 0; 1 1 start prefill 0;
        5 1 end 0; 5 1 send up 3; 5 0 arrive 2; 5 0 send down 3; 5 1 arrive 3;
        5 1 start decode 3; 9 1 end 3; 9 1 send up 4; 9 0 arrive 3""")


def test_two_rollbacks_at_one_instant_upper_link_first():
    """Stages 1 and 2 end at 4 ms, drafter's side first: stage 1 has begun a step on its wrong token
    before the target's rollback arrives, and passes it on when that step ends."""
    rows = [8, 2, 3], [9, 2, 3], [1, 2, 3]
    assert log_of(pipeline(3), timed(1, 4, 4), *rows) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0; 0 2 start prefill 0;
        1 0 end 0; 1 0 send down 1; 1 0 start draft 1; 1 1 arrive 0; 2 0 end 1; 2 0 send down 2; 2 1 arrive 0;
        4 1 end 0; 4 1 send up 1; 4 1 send down 1; 4 1 start decode 1; 4 0 arrive 2; 4 2 arrive 0;
        4 0 start draft 1; 4 2 end 0; 4 2 send up 1; 4 2 start decode 1; 4 1 arrive 1;
        5 0 end 1; 5 0 send down 2; 5 1 arrive 1;
        8 1 end 1; 8 1 send up 1; 8 1 send up 1; 8 1 send down 1; 8 1 start decode 1;
        8 0 arrive 2; 8 0 arrive 2; 8 2 arrive 1; 8 0 start draft 1; 8 2 end 1; 8 2 send up 2;
        8 2 start decode 2; 8 1 arrive 1; 9 0 end 1; 9 0 send down 2; 9 1 arrive 1;
        12 1 end 1; 12 1 send up 2; 12 1 send down 2; 12 0 arrive 2; 12 2 arrive 2; 12 0 send down 2;
        12 1 arrive 2; 12 2 end 2; 12 2 send up 3; 12 1 arrive 2""")


def test_two_rollbacks_at_one_instant_lower_link_first():
    """The target's rollback arrives at 4 ms, just before stage 1 ends there with its own: the drafter
    gets both at once and drafts from the second."""
    rows = [8, 2, 3], [9, 2, 3], [1, 2, 3]
    late = timed(1, 4, 3, costs={"s1": Costs(handover_s=0.001)})
    assert log_of(pipeline(3), late, *rows) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0; 0 2 start prefill 0;
        1 0 end 0; 1 0 send down 1; 1 0 start draft 1; 2 1 arrive 0; 2 0 end 1; 2 0 send down 2; 3 1 arrive 0;
        3 2 end 0; 3 2 send up 1; 3 2 start decode 1; 4 1 arrive 0;
        4 1 end 0; 4 1 send up 1; 4 1 send up 1; 4 1 send down 1; 4 1 start decode 1;
        4 0 arrive 2; 4 0 arrive 2; 4 2 arrive 1; 4 0 start draft 1; 5 0 end 1; 5 0 send down 2; 6 1 arrive 1;
        6 2 end 1; 6 2 send up 2; 6 2 start decode 2; 7 1 arrive 1;
        8 1 end 1; 8 1 send up 2; 8 1 send down 2; 8 0 arrive 2; 8 2 arrive 2; 8 0 send down 2; 9 1 arrive 2;
        9 2 end 2; 9 2 send up 3""")


@pytest.mark.parametrize(("verify_ms", "first"), [(4.0, "draft"), (3.5, "rollback")])
def test_a_rollback_together_with_a_draft_loses_nothing(verify_ms: float, first: str):
    """A verdict and a draft that cross at one instant, in both orders, are both booked: the answer is
    the target's and every draft is in exactly one place."""
    spec = pipeline(2)
    profile = timed(1, verify_ms, costs={"s0": Costs(handover_s=(4.0 - verify_ms) / 1e3)})
    answer = list(range(1, 13))
    run = PromptRun(spec, profile, choices(spec, [9] * 12, answer), log=[])
    record, _ = run.run()
    assert run.log is not None
    at_four = [(stage, what) for ns, stage, what, _ in run.log if ns == 4_000_000]
    drafted, rolled_back = at_four.index((0, "end")), at_four.index((0, "arrive"))
    assert (drafted < rolled_back) == (first == "draft")
    assert record.tokens == answer
    assert LinkFigures.of(*record.counters).conserved


def test_overlapping_steps_share_the_machine():
    """Rates 0.5 and 0.8: 2 ms of drafting take 4 ms; the target did 3.2 of its 4 ms by then and does
    the rest alone, so it ends at 4.8 ms and its second step, alone, at 8.8 ms."""
    spec = pipeline(2)
    keys = [stage.time_key for stage in spec.stages]
    shared = timed(2, 4, contention=(Contention({keys[0]: 0.5, keys[1]: 0.8}),))
    assert log_of(spec, shared, [1, 2], [1, 2]) == expected("""
        0 0 start prefill 0; 0 1 start prefill 0; 4 0 end 0; 4 0 send down 1; 4 1 arrive 0;
        4.8 1 end 0; 4.8 1 send up 1; 4.8 1 start decode 1; 4.8 0 arrive 1; 4.8 0 send down 1;
        4.8 1 arrive 1; 8.8 1 end 1; 8.8 1 send up 2; 8.8 0 arrive 1""")


def test_costs_between_steps_are_paid_where_they_belong():
    """Request to first step 1 ms, between a stage's steps 2 ms, last step to end 3 ms: two steps of
    4 ms take 14 ms and the first token 5."""
    spec = pipeline(1, "autoregressive")
    profile = timed(4, costs={"*": Costs(start_s=0.001, turnaround_s=0.002, finish_s=0.003)})
    record, steps = PromptRun(spec, profile, choices(spec, [1, 2])).run()
    assert [step.start_s for step in steps] == [0.001, 0.007]
    assert (record.ttft_s, record.total_s) == (0.005, 0.014)


def test_a_chain_pays_hand_over_and_rollback():
    """Hand-over to the target 0.5 ms and to the drafter 0.25 ms; the step after a rollback that crops
    the cache takes 2 ms more."""
    spec = pipeline(2, "speculative", lookahead=2)
    costs = {"s0": Costs(handover_s=0.00025, rollback_s=0.002), "s1": Costs(handover_s=0.0005)}
    agreement = choices(spec, [1, 2, 3, 9, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7])
    record, steps = PromptRun(spec, timed(1, 4, costs=costs), agreement).run()
    # Rounds emit 1 2 3, then 4 (9 is refused and the draft after it is cropped), then 5 6 7.
    assert [(s.start_s, s.duration_s, s.rolled_back) for s in steps if s.stage == 0] == [
        (0.0, 0.001, False), (0.001, 0.001, False), (0.00675, 0.001, False), (0.00775, 0.001, False),
        (0.0135, 0.003, True), (0.0165, 0.001, False)]
    assert [(s.start_s, s.duration_s, s.emitted) for s in steps if s.stage == 1] == [
        (0.0025, 0.004, 3), (0.00925, 0.004, 1), (0.018, 0.004, 3)]
    assert record.total_s == 0.022


STRATEGIES = [("speculative", None), ("pipelined", 0), ("pipelined", None)]


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("window", [1, 5, 50])
@pytest.mark.parametrize(("strategy", "lookahead"), STRATEGIES)
def test_budgets_are_met_exactly(strategy: str, lookahead: int | None, window: int, rate: float):
    """Budgets 0, 1, 2, γ and γ + 1 give exactly that many tokens, with two stages and with three."""
    for k in (2, 3):
        spec = pipeline(k, strategy, lookahead=window if lookahead is None else lookahead,
                        buffer_tokens=window, max_window=window)
        for budget in (0, 1, 2, window, window + 1):
            made = synthetic([s.choice_key for s in spec.stages], [IID(rate)] * (k - 1), num_tokens=budget, seed=1)
            record, _ = PromptRun(spec, timed(*[1, 2, 4][-k:]), made).run()
            assert record.tokens == list(range(1, budget + 1))


@pytest.mark.parametrize("wrong", [(), (2,), tuple(range(20))])
@pytest.mark.parametrize("window", [1, 5, 50])
@pytest.mark.parametrize(("strategy", "lookahead"), STRATEGIES)
def test_nothing_is_emitted_after_the_end_of_sequence(
        strategy: str, lookahead: int | None, window: int, wrong: tuple[int, ...]):
    """The end of sequence at position 0, 1, γ − 1, γ or γ + 1 is the last token, and nothing behind it
    counts as accepted."""
    answer = list(range(1, 21))
    drafter = [99 if i in wrong else token for i, token in enumerate(answer)]
    spec = pipeline(2, strategy, lookahead=window if lookahead is None else lookahead,
                    buffer_tokens=window, max_window=window)
    for end in {0, 1, window - 1, window, window + 1} & set(range(20)):
        run = PromptRun(spec, timed(1, 4), choices(spec, drafter, answer, eos=[answer[end], 777]))
        record, steps = run.run()
        assert record.tokens == answer[: end + 1]
        assert sum(step.emitted for step in steps if step.stage == 1) == end + 1
        assert record.counters[1]["accepted"] <= end + 1
        assert LinkFigures.of(*record.counters).conserved


def test_a_block_of_three_or_more_is_accepted():
    """The end-of-sequence and budget cases do exercise long blocks: five drafts accepted at once."""
    spec = pipeline(2, "speculative", lookahead=5, buffer_tokens=5, max_window=5)
    _, steps = PromptRun(spec, timed(1, 4), choices(spec, range(1, 21), range(1, 21))).run()
    assert [step.accepted for step in steps if step.stage == 1] == [5, 5, 5, 1]


def random_case(seed: int) -> tuple[PipelineSpec, Profile, Agreement]:
    """A pipeline of 1 to 5 stages with random links, times, costs, contention and agreement."""
    rng = random.Random(seed)
    k = rng.choice([1, 2, 3, 4, 5])
    strategy = rng.choice(["speculative", "pipelined"]) if k > 1 else "autoregressive"
    lookup = k > 1 and rng.random() < 0.25
    buffer, window = rng.choice([1, 2, 5, 16]), rng.choice([1, 2, 5, 16])
    lookahead = rng.randint(strategy == "speculative", min(buffer, window))
    handshake = rng.choice(["overlapped", "blocking"])
    spec = pipeline(k, strategy, lookup=lookup, handshake=handshake, lookahead=lookahead, buffer_tokens=buffer,
                    max_window=window)
    rates = {stage.time_key: rng.choice([0.5, 0.7, 1.0]) for stage in spec.stages}
    profile = Profile(
        {f"s{i}": StageLatency(rng.choice([Constant(rng.choice([0.001, 0.002, 0.005])), Empirical((0.001, 0.003))]))
         for i in range(k)},
        contention=(Contention(rates),) if k > 1 else (), neighbour_rate=rng.choice([0.0, 0.5, 1.0]),
        costs={"*": Costs(handover_s=rng.choice([0, 0.0005, 0.003]), turnaround_s=rng.choice([0, 0.001]))})
    made = synthetic([s.choice_key for s in spec.stages], [IID(rng.choice([0, 0.3, 0.8, 1])) for _ in range(k - 1)],
                     num_tokens=rng.choice([1, 2, 3, 25]), seed=seed)
    if lookup:
        made.tokens[0, [rng.random() < 0.3 for _ in range(made.num_tokens)]] = NO_PROPOSAL
    return spec, profile, made


@pytest.mark.parametrize("block", range(10))
def test_conservation_on_random_pipelines(block: int):
    """On 300 random pipelines the answer is the target's own, and of every link every draft is in
    exactly one place."""
    for seed in range(30 * block, 30 * block + 30):
        spec, profile, made = random_case(seed)
        record, steps = PromptRun(spec, profile, made, seed=seed).run()
        assert record.tokens == made.tokens[-1].tolist(), seed
        for link in booked_links(spec):
            assert LinkFigures.of(*record.counters[link : link + 2]).conserved, seed
        for stage in range(len(spec.stages)):
            mine = sorted((s for s in steps if s.stage == stage), key=lambda s: s.start_s or 0.0)
            ends = [(s.start_s or 0.0) + s.duration_s for s in mine]
            assert all(end <= (after.start_s or 0.0) + 1e-12 for end, after in zip(ends, mine[1:], strict=False))


def test_a_prompt_gives_the_same_events_whenever_it_is_run():
    """Same seed and prompt number: the same log, whatever ran before; another number: another one."""
    spec = pipeline(3)
    profile = Profile({f"s{i}": StageLatency(Empirical((0.001 * (i + 1), 0.002 * (i + 1)))) for i in range(3)})
    prompts = [synthetic([s.choice_key for s in spec.stages], [IID(0.6)] * 2, num_tokens=20, seed=3, prompt=i)
               for i in range(4)]

    def logs(order: Sequence[int]) -> dict[int, Any]:
        out = {}
        for i in order:
            run = PromptRun(spec, profile, prompts[i], seed=3, prompt=i, log=[])
            out[i] = (run.run(), run.log)
        return out

    assert logs([0, 1, 2, 3]) == logs([3, 1, 0, 2])
    assert logs([0])[0][1] != logs([1])[1][1]
