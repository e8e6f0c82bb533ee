"""``predict``: the analytical model that applies to a pipeline, by name, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .acceptance import AcceptanceModel
from .decomposition import decomposed
from .errors import InputError
from .profile import Costs, Profile, pairs
from .renewal import renewal, seconds_of, survival_rates
from .spec import PipelineSpec


@dataclass(frozen=True)
class Prediction:
    """Long-run throughput by formula.

    model : ``autoregressive`` (exact), ``synchronous rounds`` and ``renewal`` (two stages, exact for constant
        times) or ``decomposition`` (more stages, an approximation: docs/theory.md has its error map)
    """

    model: str
    tokens_per_s: float
    mean_acceptance_length: float


def predict(pipeline: PipelineSpec, profile: Profile, *, context: int = 0) -> Prediction:
    """Tokens per second once under way, prefill not counted.

    context : cache length at which step times are taken

    Raises InputError, naming what is outside the models' range, instead of answering.
    """
    pipeline.require_lookaheads()
    target = pipeline.target
    if pipeline.strategy == "autoregressive":
        step_s = seconds_of(pipeline, profile, target, 1, context)
        step_s += profile.stage_costs(target, pipeline.strategy).turnaround_s
        return Prediction("autoregressive", 1 / step_s, 1.0)
    if any(stage.drafter != "model" for stage in pipeline.stages):
        raise InputError(pipeline.label, "must be models only for a formula", mend="simulate it")
    if len(pipeline.stages) > 2:
        if pipeline.strategy != "pipelined":
            raise InputError(pipeline.label, "must be two stages for the synchronous formula", mend="simulate it")
        made = decomposed(pipeline, profile, context=context)
        return Prediction("decomposition", made.tokens_per_s, made.mean_acceptance_length)
    if pipeline.strategy == "pipelined":
        found = renewal(pipeline, profile, context=context)
        return Prediction("renewal", found.tokens_per_s, found.mean_acceptance_length)
    if pipeline.handshake == "blocking":
        raise InputError(f"{pipeline.label}: handshake", "must be overlapped for the synchronous formula", "blocking",
                         "simulate it")
    (drafter, _, link), = pairs(pipeline)
    return synchronous_rounds(
        draft_s=seconds_of(pipeline, profile, drafter, 1, context) * profile.turn_rate(pipeline.stages, drafter),
        first_draft_s=seconds_of(pipeline, profile, drafter, 1, context),
        verify_s=seconds_of(pipeline, profile, target, link.lookahead + 1, context),
        acceptance=profile.pair(drafter, target), window=link.lookahead,
        drafter_costs=profile.stage_costs(drafter, pipeline.strategy),
        target_costs=profile.stage_costs(target, pipeline.strategy))


def synchronous_rounds(*, draft_s: float, verify_s: float, acceptance: AcceptanceModel, window: int,
                       first_draft_s: float | None = None, drafter_costs: Costs | None = None,
                       target_costs: Costs | None = None) -> Prediction:
    """Rounds of ``window`` drafts and a verification, one after the other.

    Leviathan et al.'s formula (closed_form.synchronous_tokens_per_s) with the time of a wide step, the costs
    between steps, and acceptance that may depend on the run of agreements before.

    first_draft_s : of a round's first draft, which finds its weights evicted from the caches; None = as the others

    >>> from pipespec_model.acceptance import IID
    >>> round(synchronous_rounds(draft_s=0.01, verify_s=0.1, acceptance=IID(0.5), window=2).tokens_per_s, 4)
    14.5833
    """
    a, b = drafter_costs or Costs(), target_costs or Costs()
    rates = survival_rates(acceptance)
    last = len(rates) - 1
    # States: agreements in a row before the round, and (last one) a refusal that costs a rollback.
    size = last + 2
    kernel, tokens = np.zeros((size, size)), np.zeros(size)
    for state in range(size):
        run, reach = state % (last + 1), 1.0
        for i in range(window):
            refused = reach * (1 - rates[run])
            kernel[state, last + 1 if window - i >= 2 else 0] += refused
            tokens[state] += refused * (i + 1)
            reach *= rates[run]
            run = min(run + 1, last)
        tokens[state] += reach * (window + 1)
        # Nobody compares the bonus position, but the run goes on there or ends.
        kernel[state, min(run + 1, last)] += reach * rates[run]
        kernel[state, 0] += reach * (1 - rates[run])
    weight = stationary(kernel)
    first_s = draft_s if first_draft_s is None else first_draft_s
    drafts_s = first_s + (window - 1) * (draft_s + a.turnaround_s) if window else 0.0
    round_s = drafts_s + b.handover_s + verify_s + a.handover_s + a.rollback_s * weight[last + 1]
    per_round = float(weight @ tokens)
    return Prediction("synchronous rounds", per_round / float(round_s), per_round)


def stationary(kernel: np.ndarray) -> np.ndarray:
    """The distribution that a Markov chain keeps (rows sum to 1); of several, one."""
    size = len(kernel)
    equations = np.vstack([kernel.T - np.eye(size), np.ones(size)])
    return np.linalg.lstsq(equations, np.r_[np.zeros(size), 1.0], rcond=None)[0]
