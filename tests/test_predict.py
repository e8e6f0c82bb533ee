"""``predict`` picks the formula that applies, and says so where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from pipespec_model.acceptance import IID, Hazard, Markov
from pipespec_model.agreement import synthetic
from pipespec_model.closed_form import synchronous_tokens_per_s
from pipespec_model.errors import InputError
from pipespec_model.latency import Affine, Constant
from pipespec_model.predict import predict, synchronous_rounds
from pipespec_model.profile import Contention, Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from simulate.engine import PromptRun

STAGES = [{"name": "d", "model": "small"}, {"name": "t", "model": "large"}]
ACCEPTANCE = Markov(0.9, 0.5)
PROFILE = Profile({"d": StageLatency(Constant(0.013)), "t": StageLatency(Affine(0.1, 0.12, 0.001))},
                  acceptance={"d>t": ACCEPTANCE}, turns=(Contention({"d": 0.6, "t": 0.9}),),
                  costs={"*": Costs(turnaround_s=0.0004, handover_s=0.0011, rollback_s=0.002)})


def spec(strategy: str, **link: Any) -> PipelineSpec:
    if strategy == "autoregressive":
        return PipelineSpec.from_dict({"strategy": strategy, "stages": STAGES[1:]})
    return PipelineSpec.from_dict({"strategy": strategy, "stages": STAGES, "links": [link]})


def simulated(pipeline: PipelineSpec, num_tokens: int = 6000) -> float:
    made = synthetic([s.choice_key for s in pipeline.stages], [ACCEPTANCE] * (len(pipeline.stages) - 1),
                     num_tokens=num_tokens, seed=4)
    record, _ = PromptRun(pipeline, PROFILE, made, seed=4, spread=False).run()
    return len(record.tokens) / record.total_s


@pytest.mark.parametrize(("pipeline", "model"), [
    (spec("autoregressive"), "autoregressive"), (spec("speculative", lookahead=4), "synchronous rounds"),
    (spec("speculative", lookahead=1), "synchronous rounds"), (spec("pipelined", lookahead=0, max_window=6), "renewal"),
    (spec("pipelined", lookahead=3), "renewal"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_the_formula_is_the_simulation(pipeline: PipelineSpec, model: str) -> None:
    """Throughput of a long simulated run, within 1.5% (the simulation's own luck)."""
    said = predict(pipeline, PROFILE)
    assert said.model == model
    assert said.tokens_per_s == pytest.approx(simulated(pipeline), rel=0.015)


def test_rounds_are_leviathans_where_he_speaks() -> None:
    """Same step time at every width, no costs, i.i.d.: the published formula."""
    for rate in (0.0, 0.3, 0.9, 1.0):
        found = synchronous_rounds(draft_s=0.02, verify_s=0.1, acceptance=IID(rate), window=4)
        assert found.tokens_per_s == pytest.approx(synchronous_tokens_per_s(rate, 4, 0.2, 0.1))
    flat, hazard = (synchronous_rounds(draft_s=0.02, verify_s=0.1, acceptance=model, window=3).tokens_per_s
                    for model in (IID(0.6), Hazard((0.6, 0.6))))
    assert flat == pytest.approx(hazard)


@pytest.mark.parametrize(("data", "said"), [
    ({"strategy": "speculative", "stages": [{"name": "x", "model": "m"}, *STAGES],
      "links": [{"lookahead": 1}, {"lookahead": 1}]}, "two stages"),
    ({"strategy": "pipelined", "handshake": "blocking", "stages": [{"name": "x", "model": "m"}, *STAGES],
      "links": [{}, {}]}, "handshake"),
    ({"strategy": "pipelined", "stages": [{"name": "d", "model": "large", "drafter": "prompt-lookup"}, STAGES[1]],
      "links": [{}]}, "models only"),
    ({"strategy": "speculative", "handshake": "blocking", "stages": STAGES, "links": [{"lookahead": 2}]}, "overlapped"),
    ({"strategy": "pipelined", "stages": STAGES, "links": [{"lookahead": "auto"}]}, "lookahead"),
])
def test_outside_its_range_it_says_so(data: dict[str, Any], said: str) -> None:
    """No formula is stretched: the error names what is outside."""
    with pytest.raises(InputError, match=said):
        predict(PipelineSpec.from_dict(data), PROFILE)


def test_contention_counts_as_constant() -> None:
    """Rates of stages that compute together scale their steps."""
    pipeline = spec("pipelined", lookahead=0)
    slower = Profile(PROFILE.latency, acceptance=PROFILE.acceptance, contention=(Contention({"d": 0.8, "t": 0.5}),))
    alone = Profile({"d": StageLatency(Constant(0.013 / 0.8)), "t": StageLatency(Affine(0.2, 0.24, 0.002))},
                    acceptance=PROFILE.acceptance)
    assert predict(pipeline, slower).tokens_per_s == pytest.approx(predict(pipeline, alone).tokens_per_s, rel=1e-6)
