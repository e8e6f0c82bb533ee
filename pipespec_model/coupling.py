"""How often two distributions draw one token, by how the draws are coupled.

Assumes probabilities over one vocabulary, ``[vocab]`` each, that sum to one.  Nothing here knows of models.

References
----------
Leviathan, Kalman and Matias (2023), "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192
Daliri, Musco and Suresh (2024), "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv 2408.07978
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .errors import InputError

NONE = 1e-300  # what is less probable is taken for impossible: quotients stay finite


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """TV = ½ Σ |p − q|, in [0, 1].

    >>> total_variation([0.5, 0.5], [0.25, 0.75])
    0.25
    """
    return float(np.abs(np.asarray(p, dtype=float) - np.asarray(q, dtype=float)).sum() / 2)


def best_agreement(p: ArrayLike, q: ArrayLike) -> float:
    """1 − TV: what no coupling exceeds, and acceptance with min(1, p/q) reaches.

    >>> best_agreement([0.5, 0.5], [0.25, 0.75])
    0.75
    """
    return 1 - total_variation(p, q)


def shared_noise_agreement(p: ArrayLike, q: ArrayLike) -> float:
    """The probability that ``argmax(log p + g)`` and ``argmax(log q + g)`` are one token, g standard Gumbel.

    Notes
    -----
    exp(−g) is exponential, so both take the least of E_v / p_v and of E_v / q_v.  Token v is the least of both when
    E_w > E_v · max(p_w / p_v, q_w / q_v) for every other w, which has the probability
    1 / Σ_w max(p_w / p_v, q_w / q_v).  By the order of p/q the sums are partial sums: O(V log V).
    At least :func:`shared_noise_bound`, at most :func:`best_agreement`.

    >>> round(shared_noise_agreement([0.5, 0.5, 0], [0, 0.5, 0.5]), 4)  # 1 / (1 + 1 + 1), where 1 − TV is 1/2
    0.3333
    """
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    both = (p > NONE) & (q > NONE)
    if not both.any():
        return 0.0
    ratio = p[both] / q[both]
    order = np.argsort(ratio)
    a, b = p[both][order], q[both][order]
    # A token that only one side may draw counts whole on that side.
    only_p, only_q = p[~both].sum(), q[~both].sum()
    at_least = a[::-1].cumsum()[::-1] + only_p  # Σ p over the tokens whose ratio is as great, this one included
    below = b.cumsum() - b + only_q  # Σ q over those whose ratio is less
    return float((1 / (at_least / a + below / b)).sum())


def same_draw(p: ArrayLike, q: ArrayLike, token: int) -> float:
    """The probability that ``argmax(log q + g)`` is ``token`` too, given that ``argmax(log p + g)`` is.

    Notes
    -----
    By the law above, 1 / Σ_w max(p_w, q_w p_v/q_v) for v = ``token``.  Over v drawn from p its mean is
    :func:`shared_noise_agreement`.  Given a whole text, draws of different positions are independent, so these
    probabilities along a text tell all that its drafts' fates have in common: Σ_v P(v) over p alone does not, as a
    token decides what comes after it.

    >>> same_draw([0.5, 0.5, 0], [0, 0.5, 0.5], 1)  # 1 / (0.5 + 0.5 + 0.5)
    0.6666666666666666
    """
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    if not p[token] > NONE:
        raise InputError("p", f"must be > 0 at token {token}, which was drawn", float(p[token]))
    if not q[token] > NONE:
        return 0.0
    return float(min(1.0, 1 / np.maximum(p, q * (p[token] / q[token])).sum()))


def shared_noise_bound(p: ArrayLike, q: ArrayLike) -> float:
    """(1 − TV) / (1 + TV): the least that shared noise agrees (Daliri et al.).

    >>> shared_noise_bound([0.5, 0.5], [0.25, 0.75])
    0.6
    """
    distance = total_variation(p, q)
    return (1 - distance) / (1 + distance)
