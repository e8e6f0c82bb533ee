"""Random pipelines with profiles and prompts, of every kind that the compiled engine covers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipespec_model.acceptance import IID, AcceptanceModel, Hazard, Markov, Recorded
from pipespec_model.agreement import NO_PROPOSAL, Agreement, synthetic
from pipespec_model.latency import Affine, Constant, Empirical, LatencyModel, Roofline, Scaled, Table
from pipespec_model.profile import Contention, Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec

# Few values, all multiples of half a millisecond, so that many things happen at one instant.
TIMES = (0.0, 0.0005, 0.001, 0.002, 0.005)


@dataclass(frozen=True)
class Drawn:
    """``recorded``: a prompt to replay; None: one made up of ``num_tokens`` tokens."""

    pipeline: PipelineSpec
    profile: Profile
    recorded: Agreement | None
    num_tokens: int
    seed: int
    spread: bool
    number: int = 0

    @property
    def agreement(self) -> Agreement:
        """The prompt for the SimPy model."""
        if self.recorded is not None:
            return self.recorded
        stages = self.pipeline.stages
        models = [self.profile.pair(a, b) for a, b in pairwise(stages)]
        return synthetic([s.choice_key for s in stages], models, num_tokens=self.num_tokens, seed=self.seed,
                         prompt=self.number)


@st.composite
def latencies(draw: st.DrawFn) -> LatencyModel:
    kind = draw(st.sampled_from(["constant", "constant", "affine", "table", "empirical", "roofline", "scaled"]))
    a, b, c = (draw(st.sampled_from(TIMES)) for _ in range(3))
    if kind == "affine":
        return Affine(a, b, c, draw(st.sampled_from([0.0, 1e-5])))
    if kind == "table":
        widths = (1, 2, 7)[: draw(st.integers(1, 3))]
        quantiles = draw(st.sampled_from([(), (1.1,), (0.5, 0.9, 1.7)]))
        return Table(widths, (a, b, c)[: len(widths)], draw(st.sampled_from([0.0, 1e-5])), 5, quantiles)
    if kind == "empirical":
        return Empirical((a, b, c)[: draw(st.integers(1, 3))])
    if kind == "roofline":
        return Roofline(1e6, 3e5, 1e9, 1e9, 1e3, a)
    if kind == "scaled":
        return Scaled(Scaled(Affine(a, b, c), 0.3), draw(st.sampled_from([0.5, 1.7])))
    return Constant(a)


RATES = st.sampled_from([0.0, 0.3, 0.8, 1.0])
MODELS: st.SearchStrategy[AcceptanceModel] = st.one_of(
    st.builds(IID, RATES), st.builds(Markov, RATES, RATES), st.builds(Hazard, st.tuples(RATES, RATES, RATES)),
    st.builds(Recorded, st.lists(st.booleans(), min_size=1, max_size=5).map(tuple)))


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineSpec:
    k = draw(st.integers(1, 5))
    strategy = draw(st.sampled_from(["speculative", "pipelined", "pipelined"])) if k > 1 else "autoregressive"
    handshake = draw(st.sampled_from(["overlapped", "blocking"]))
    stages: list[dict[str, Any]] = [{"name": f"s{i}", "model": f"m{i}"} for i in range(k)]
    if k > 1 and draw(st.booleans()) and draw(st.booleans()):
        stages[0]["drafter"] = "prompt-lookup"
    links = []
    for _ in range(k - 1):
        buffer, window = (draw(st.sampled_from([1, 2, 5, 16])) for _ in range(2))
        least = int(strategy == "speculative" and handshake == "overlapped")
        links.append({"lookahead": draw(st.integers(least, min(buffer, window))), "buffer_tokens": buffer,
                      "max_window": window})
    return PipelineSpec.from_dict({"strategy": strategy, "handshake": handshake, "stages": stages, "links": links})


@st.composite
def profiles(draw: st.DrawFn, spec: PipelineSpec) -> Profile:
    names = [stage.name for stage in spec.stages]
    latency = {name: StageLatency(draw(latencies()), draw(st.none() | latencies())) for name in names}
    times = st.sampled_from(TIMES)
    costs = {name: Costs(*(draw(times) if draw(st.booleans()) else 0.0 for _ in range(5))) for name in names}
    contention: list[Contention] = []
    if len(names) > 1 and draw(st.booleans()):
        rate = st.sampled_from([0.5, 0.7, 1.0])
        contention.append(Contention({name: draw(rate) for name in names}))
        if draw(st.booleans()):
            contention.append(Contention({name: draw(rate) for name in names[:2]}))
    turns = (Contention({name: draw(st.sampled_from([0.6, 1.0])) for name in names}),) if draw(st.booleans()) else ()
    slowness = {name: (1.0, 1.1, 1.9) for name in names if draw(st.booleans()) and draw(st.booleans())}
    acceptance = {f"{a}>{b}": draw(MODELS) for a, b in pairwise(names)}
    return Profile(latency, acceptance, tuple(contention), turns, costs, slowness=slowness,
                   neighbour_rate=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))


@st.composite
def recordings(draw: st.DrawFn, spec: PipelineSpec, num_tokens: int) -> Agreement:
    """A matrix of few token ids, so that stages agree off the target's path by chance too; gaps; ends."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    k = len(spec.stages)
    tokens = np.tile(rng.integers(1, 5, num_tokens), (k, 1))
    wrong = rng.random((k - 1, num_tokens)) < draw(st.sampled_from([0.0, 0.2, 0.5]))
    tokens[:-1][wrong] = rng.integers(1, 5, int(wrong.sum()))
    if k > 1 and draw(st.booleans()):
        tokens[0, rng.random(num_tokens) < 0.3] = NO_PROPOSAL
    eos = draw(st.sampled_from([(), (), (3,), (2, 9)]))
    # Of sampled text; a row that is 0 or 1, as a lookup's is, stays as it was recorded.
    chance = None
    if draw(st.booleans()):
        chance = np.where(tokens == tokens[-1], rng.choice([0.5, 0.9, 1.0], tokens.shape),
                          rng.choice([0.0, 0.5], tokens.shape))
        chance[-1] = 1.0
    return Agreement("drawn", draw(st.integers(1, 4)), tuple(s.choice_key for s in spec.stages), tokens,
                     budget=num_tokens + draw(st.sampled_from([0, 0, 3])), eos=eos, same_draw=chance)


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    spec = draw(pipelines())
    num_tokens = draw(st.sampled_from([1, 2, 3, 9, 25, 60]))
    recorded = draw(recordings(spec, num_tokens)) if draw(st.booleans()) else None
    return Drawn(spec, draw(profiles(spec)), recorded, num_tokens, draw(st.integers(0, 3)), draw(st.booleans()),
                 draw(st.integers(0, 2)))


@st.composite
def short_cases(draw: st.DrawFn) -> Drawn:
    """At most two stages, constant times, independent drafts: what the loops without events are for, and a little
    more.  In a pipeline there are mostly no seconds between steps."""
    k = draw(st.sampled_from([1, 2, 2, 2]))
    strategy = draw(st.sampled_from(["speculative", "pipelined", "pipelined"])) if k > 1 else "autoregressive"
    buffer, window = (draw(st.sampled_from([1, 2, 3, 5, 16])) for _ in range(2))
    link = {"lookahead": draw(st.integers(int(strategy == "speculative"), min(buffer, window))),
            "buffer_tokens": buffer, "max_window": window}
    stages = [{"name": f"s{i}", "model": f"m{i}"} for i in range(k)]
    spec = PipelineSpec.from_dict({"strategy": strategy, "stages": stages, "links": [link] * (k - 1)})
    times = st.sampled_from([0.0005, 0.0007, 0.001, 0.002, 0.003, 0.01, 0.02]).map(Constant)
    latency = {f"s{i}": StageLatency(draw(times), draw(st.none() | times)) for i in range(k)}
    between = strategy != "pipelined" or draw(st.integers(0, 9)) == 0
    seconds = st.sampled_from([0.0, 0.0005, 0.003]) if between else st.just(0.0)
    costs = {"*": Costs(*(draw(seconds) for _ in range(4)), finish_s=draw(st.sampled_from([0.0, 0.001])))}
    turns = (Contention({f"s{i}": draw(st.sampled_from([0.6, 1.0])) for i in range(2)}),) if draw(st.booleans()) else ()
    rate = draw(st.sampled_from([0.0, 0.3, 0.6, 0.8, 0.95, 1.0]))
    profile = Profile(latency, {"s0>s1": IID(rate)}, turns=turns, costs=costs)
    return Drawn(spec, profile, None, draw(st.sampled_from([1, 2, 3, 4, 5, 20, 300])), draw(st.integers(0, 99)), True)
