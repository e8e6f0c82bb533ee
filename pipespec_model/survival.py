"""Acceptance inside compiled walks: the probability of still agreeing, by agreements in a row.

Numba keeps compiled callers by their own files' dates: after a change here, delete their cache (``__pycache__``).
"""

from __future__ import annotations

from numba import njit


@njit(cache=True)
def compare(mass, rates):
    """Move ``mass`` past one position that is compared; returns the probability of a disagreement there.

    mass : probability that no draft was refused yet and 0, 1, 2, … agreements precede, in place
    rates : of an agreement then; the last one repeats (renewal.survival_rates)
    """
    last = len(rates) - 1
    refused = 0.0
    for i in range(last + 1):
        refused += mass[i] * (1.0 - rates[i])
        mass[i] *= rates[i]
    if last:
        top = mass[last] + mass[last - 1]
        for i in range(last - 1, 0, -1):
            mass[i] = mass[i - 1]
        mass[last] = top
        mass[0] = 0.0
    return refused


@njit(cache=True)
def pass_by(mass, rates):
    """Likewise past one that nobody compares: a run of agreements goes on there or ends."""
    refused = compare(mass, rates)
    mass[0] += refused
