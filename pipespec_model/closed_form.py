"""The PipeSpec paper's closed forms (arXiv 2505.01572, section 3.3), with their limits.

Assumptions, all of them strong: acceptance i.i.d. with one rate; a full window always waits when the
verifier is ready; a step is a step whatever its width.  So the forms speak of tokens *per step* of
the last model; `pipelined_tokens_per_s` and its sisters put measured seconds beside them, which is
the ``closed_form`` column of the reports.

Symbols: α = ``acceptance_rate`` in [0, 1]; γ = ``window`` >= 0, drafts a verification.
"""

from __future__ import annotations

from .errors import InputError


def _check(acceptance_rate: float, window: float) -> None:
    if not 0.0 <= acceptance_rate <= 1.0:
        raise InputError("acceptance_rate", "must be in [0, 1]", acceptance_rate)
    if not window >= 0:
        raise InputError("window", "must be >= 0", window)


def tokens_per_verification(acceptance_rate: float, window: int) -> float:
    """Mean tokens emitted by one verification of a full window: (1 − α^(γ+1)) / (1 − α).

    References: Leviathan et al. 2023 (arXiv 2211.17192), Eq. 1.  Limits: α → 1 gives γ + 1; α = 0
    or γ = 0 gives 1.

    >>> tokens_per_verification(0.5, 2), tokens_per_verification(1.0, 4), tokens_per_verification(0.3, 0)
    (1.75, 5.0, 1.0)
    """
    _check(acceptance_rate, window)
    if acceptance_rate == 1.0:
        return float(window + 1)
    if window == 0:
        return 1.0
    return (1.0 - acceptance_rate ** (window + 1)) / (1.0 - acceptance_rate)


def next_verify_probability(verify_probability: float, acceptance_rate: float, window: int) -> float:
    """PipeSpec Eq. 2: ρ_j = ρ_{j−1} α^(γ+1) + (1 − ρ_{j−1}) α, the probability that the stage
    verifies at its j-th step.

    >>> next_verify_probability(0.0, 0.8, 4)
    0.8
    """
    _check(acceptance_rate, window)
    return verify_probability * acceptance_rate ** (window + 1) + (1 - verify_probability) * acceptance_rate


def verify_probability(acceptance_rate: float, window: int) -> float:
    """PipeSpec Eq. 3, the limit of Eq. 2: ρ = α / (1 − α^(γ+1) + α).

    The recurrence contracts by |α^(γ+1) − α| < 1 each step, so the limit exists and is unique for
    α < 1 and is reached geometrically; α = 1 gives ρ = 1.

    >>> verify_probability(0.0, 4), verify_probability(1.0, 4)
    (0.0, 1.0)
    """
    _check(acceptance_rate, window)
    return acceptance_rate / (1 - acceptance_rate ** (window + 1) + acceptance_rate)


def tokens_per_step(acceptance_rate: float, window: int) -> float:
    """PipeSpec Eq. 1 and 4: E[N] = (1 − ρ)·1 + ρ·(1 − α^(γ+1)) / (1 − α), with ρ of Eq. 3.

    Theorem 1 of the paper is E[N] > 1 for 0 < α < 1 and γ > 0.  It says nothing about seconds: it
    assumes that a full window always waits.

    >>> tokens_per_step(0.0, 4), tokens_per_step(0.7, 0), tokens_per_step(1.0, 3)
    (1.0, 1.0, 4.0)
    """
    rho = verify_probability(acceptance_rate, window)
    return (1 - rho) + rho * tokens_per_verification(acceptance_rate, window)


def synchronous_speedup(acceptance_rate: float, window: int, cost_ratio: float) -> float:
    """Speed-up of synchronous speculation over autoregressive decoding,
    (1 − α^(γ+1)) / ((1 − α)(γ c + 1)).

    cost_ratio : c, drafter step / target step (Leviathan's; the PipeSpec paper writes its inverse)

    >>> synchronous_speedup(1.0, 4, 0.25)
    2.5
    """
    if not cost_ratio >= 0:
        raise InputError("cost_ratio", "must be >= 0", cost_ratio)
    return tokens_per_verification(acceptance_rate, window) / (window * cost_ratio + 1)


def autoregressive_tokens_per_s(target_step_s: float) -> float:
    """1 / t(1).

    >>> autoregressive_tokens_per_s(0.05)
    20.0
    """
    return 1.0 / target_step_s


def synchronous_tokens_per_s(acceptance_rate: float, window: int, cost_ratio: float, target_step_s: float) -> float:
    """The textbook synchronous form in seconds: ``synchronous_speedup`` / t(1).

    >>> synchronous_tokens_per_s(1.0, 4, 0.25, 0.1)
    25.0
    """
    return synchronous_speedup(acceptance_rate, window, cost_ratio) / target_step_s


def pipelined_tokens_per_s(acceptance_rate: float, window: int, verify_step_s: float) -> float:
    """Eq. 4 in seconds: E[N] / t(γ + 1) of the last stage.

    >>> pipelined_tokens_per_s(1.0, 3, 0.1)
    40.0
    """
    return tokens_per_step(acceptance_rate, window) / verify_step_s
