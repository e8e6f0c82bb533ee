"""What the executor loses between steps: throughput over that of the same steps with nothing between them."""

from __future__ import annotations

import pytest
from conftest import chain, stage

from execute.fleet import Fleet, new_trace
from execute.prompts import Prompt
from execute.scripted import Script
from pipespec_model.acceptance import IID
from pipespec_model.agreement import synthetic
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from validate.budget import budget

LEAST = {0.020: 0.95, 0.005: 0.90, 0.001: 0.70}  # by step time; quiet machines do better


@pytest.mark.bench
@pytest.mark.parametrize("handshake", ["pipelined", "pipelined blocking"])
@pytest.mark.parametrize("depth", [2, 3, 4, 5])
@pytest.mark.parametrize("step_s", LEAST)
def test_little_is_lost_between_steps(step_s: float, depth: int, handshake: str) -> None:
    """Scripted stages, 4 prompts of 48 tokens.  Their step times have no common measure: of equal ones a
    request would by rule miss the end of a step by the least delay and wait for another whole one."""
    times = {f"s{i}": step_s * (1 - 0.1732 * (depth - 1 - i)) for i in range(depth)}
    stages = [stage(f"s{i}") for i in range(depth)]
    spec = chain(handshake, stages)
    names = [s.choice_key for s in stages]
    agreements = [synthetic(names, [IID(0.85)] * (depth - 1), num_tokens=48, seed=3, prompt=i, prompt_length=4)
                  for i in range(4)]
    with Fleet(stages, scripts={name: Script(Constant(seconds)) for name, seconds in times.items()}) as fleet:
        trace = new_trace(fleet.configure(spec), emulated=True)
        for number, agreement in enumerate(agreements):
            trace.add(*fleet.run_prompt(spec, Prompt(agreement.prompt, "", tokens=(1, 2, 3, 4)), number=number,
                                        max_new_tokens=48, agreement=agreement))
    profile = Profile({name: StageLatency(Constant(seconds)) for name, seconds in times.items()})
    found = budget(spec, profile, trace, agreements, [[1.0] * depth] * 4)
    print(f"{handshake} k={depth} {step_s * 1e3:.0f} ms: efficiency {found['efficiency']:.3f}")
    assert found["efficiency"] >= LEAST[step_s], found
