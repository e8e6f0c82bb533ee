"""Agreement as token ids: what each stage would choose after the target's own prefix.

With greedy decoding that choice is a fixed token per stage and position, so one teacher-forced pass
of each stage over the target's output tells every accept and reject of *any* subset of the stages,
at any lookahead, with no random acceptance at all.

Off the target's path (after a stage has diverged and before the rollback reaches it; it matters for
three stages and more) nothing is recorded.  There a stage chooses what its upstream chooses at a named
``neighbour_rate``, drawn by counter-based uniforms, whether it has seen that draft yet or not.

Sampled text has more to tell than what was drawn: along the target's text, the probability that a stage draws the
target's token too.  Given the text those draws are independent from position to position, so a replay may draw them
anew (:meth:`Agreement.drawn`) instead of repeating the one outcome that was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .acceptance import AcceptanceModel
from .errors import InputError
from .uniforms import OFF_PATH, ON_PATH, SAME_DRAW, TOKEN, uniform, uniforms_along, word

NO_PROPOSAL = -1
MADE_UP = 1 << 32  # made-up tokens start above every vocabulary


@dataclass(frozen=True)
class Agreement:
    """One prompt's choices.

    tokens : int array ``[stage, position]``, target last; -1 = that stage proposes nothing there
    names : one choice key a row (``StageSpec.choice_key``)
    budget : tokens that were asked for; the target may have ended earlier, at one of ``eos``
    prompt_tokens : where they are known, a lookup is run instead of replayed
    same_draw : of sampled text, ``[stage, position]``: the probability that the stage draws the target's token, given
        that the target does (``coupling.same_draw``); None = ``tokens`` are what there is
    overlap : likewise, 1 − TV of the stage's and the target's distributions (``coupling.best_agreement``), beside
        which to hold the mean of ``same_draw``; nothing is simulated with it
    """

    prompt: str
    prompt_length: int
    names: tuple[str, ...]
    tokens: NDArray[np.int64]
    category: str = ""
    budget: int = 0
    eos: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    same_draw: NDArray[np.float64] | None = None
    overlap: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape[0] != len(self.names):
            raise InputError("agreement.tokens", f"must have {len(self.names)} rows", self.tokens.shape)
        for name in ("same_draw", "overlap"):
            found = getattr(self, name)
            if found is None:
                continue
            if found.shape != self.tokens.shape:
                raise InputError(f"agreement.{name}", f"must be {' × '.join(map(str, self.tokens.shape))} as tokens",
                                 found.shape)
            if len(outside := found[~((found >= 0) & (found <= 1))]):
                raise InputError(f"agreement.{name}", "must be in [0, 1]", float(outside[0]))
        if self.budget < self.tokens.shape[1]:
            object.__setattr__(self, "budget", int(self.tokens.shape[1]))

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[1])

    def select(self, names: Sequence[str]) -> Agreement:
        """The rows of a pipeline's stages, in its order."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise InputError("agreement", f"must hold a row for {missing[0]!r}", list(self.names), "calibrate it")
        rows = [self.names.index(name) for name in names]
        return replace(self, names=tuple(names), tokens=self.tokens[rows], **self._cut(rows))

    def _cut(self, which: Any) -> dict[str, Any]:
        """Rows, or rows and columns, of the probabilities."""
        return {"same_draw": None if self.same_draw is None else self.same_draw[which],
                "overlap": None if self.overlap is None else self.overlap[which]}

    def drawn(self, seed: int, prompt: int) -> Agreement:
        """Choices drawn anew from ``same_draw``, by uniforms that are a function of seed, prompt and position; itself
        where there are no probabilities.

        A stage's choice is the target's with that probability.  One uniform a position serves all stages: with shared
        noise, who is more like the target agrees where another does.  (Of each stage alone the law is exact; that any
        two agree at once is then as likely as it can be.)  Otherwise it is what was recorded, or a token that no
        vocabulary holds, the same for all.
        """
        if self.same_draw is None:
            return self
        draws = uniforms_along(seed, prompt, 0, SAME_DRAW, self.num_tokens)
        other = np.array([made_up(seed, prompt, 0, position, 0) for position in range(self.num_tokens)], np.int64)
        wrong = np.where(self.tokens == self.tokens[-1], other, self.tokens)
        return replace(self, tokens=np.where(draws < self.same_draw, self.tokens[-1], wrong),
                       same_draw=None, overlap=None)

    def after(self, num_tokens: int) -> Agreement:
        """What is left once the target's first ``num_tokens`` tokens are part of the prompt."""
        told = tuple(self.tokens[-1, :num_tokens].tolist())
        return replace(self, prompt_length=self.prompt_length + num_tokens, tokens=self.tokens[:, num_tokens:],
                       budget=max(self.budget - num_tokens, 0),
                       prompt_tokens=(*self.prompt_tokens, *told) if self.prompt_tokens else (),
                       **self._cut((slice(None), slice(num_tokens, None))))

    def rate(self, name: str) -> float | None:
        """Share of positions where this stage's choice is the target's, or the mean probability that it is; None
        without proposals."""
        row = self.names.index(name)
        proposed = self.tokens[row] != NO_PROPOSAL
        return float(self.hits(row)[proposed].mean()) if proposed.any() else None

    def hits(self, row: int, other: int = -1) -> NDArray[np.float64]:
        """How probable it is, at each position, that two rows choose the same token; other : the target's"""
        last = other in (-1, len(self.names) - 1)
        if self.same_draw is not None and last:
            return self.same_draw[row]
        return ((self.tokens[row] == self.tokens[other]) & (self.tokens[row] != NO_PROPOSAL)).astype(float)

    def to_dict(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "prompt_length": self.prompt_length, "names": list(self.names),
                "tokens": self.tokens.tolist(), "category": self.category, "budget": self.budget,
                "eos": list(self.eos), "prompt_tokens": list(self.prompt_tokens),
                "same_draw": None if self.same_draw is None else self.same_draw.tolist(),
                "overlap": None if self.overlap is None else self.overlap.tolist()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Agreement:
        try:
            rows = len(data["names"])
            same_draw, overlap = (
                None if data.get(name) is None else np.asarray(data[name], np.float64).reshape(rows, -1)
                for name in ("same_draw", "overlap"))
            return cls(data["prompt"], int(data["prompt_length"]), tuple(data["names"]),
                       np.asarray(data["tokens"], dtype=np.int64).reshape(rows, -1),
                       data.get("category", ""), int(data.get("budget", 0)), tuple(data.get("eos", ())),
                       tuple(data.get("prompt_tokens", ())), same_draw, overlap)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError("agreement", f"must hold prompt, prompt_length, names and tokens ({error!r})") from None


def synthetic(names: Sequence[str], acceptance: Sequence[AcceptanceModel], *, num_tokens: int, seed: int,
              prompt: int = 0, prompt_length: int = 1) -> Agreement:
    """Made-up choices in which stage i agrees with stage i+1 as ``acceptance[i]`` says.

    Built from the target down: a stage's token is its downstream's own with that probability, else a
    token that nobody else chooses.
    """
    k = len(names)
    tokens = np.empty((k, num_tokens), dtype=np.int64)
    tokens[-1] = np.arange(num_tokens) + 1
    for stage in range(k - 2, -1, -1):
        draws = [uniform(seed, prompt, stage, ON_PATH, position) for position in range(num_tokens)]
        bits = acceptance[stage].bits(draws)
        for position, bit in enumerate(bits):
            tokens[stage, position] = (
                tokens[stage + 1, position] if bit else made_up(seed, prompt, stage, position, 0)
            )
    return Agreement(f"synthetic-{prompt}", prompt_length, tuple(names), tokens)


def made_up(seed: int, prompt: int, stage: int, position: int, last: int) -> int:
    """A token id that no vocabulary and no other stage holds, for a choice that is not recorded."""
    return MADE_UP + (word(seed, prompt, stage, TOKEN, position, last) >> 12)


@dataclass
class Replay:
    """Answers for a stage what its model would have answered: the engine's and the scripted
    backend's one source of tokens.

    neighbour_rate : probability that a stage off the target's path chooses what its upstream does
    """

    agreement: Agreement
    seed: int = 0
    prompt: int = 0
    neighbour_rate: float = 0.9
    _target: list[int] = field(init=False)
    _rows: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._rows = self.agreement.tokens.tolist()
        self._target = self._rows[-1]
        # Equal tokens are one object, which is what makes comparing a sequence with the target's quick.
        for row in self._rows[:-1]:
            row[:] = [own if token == own else token for token, own in zip(row, self._target, strict=True)]

    def choices(self, stage: int, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """Greedy choices after ``sequence`` and after each draft; ``len(drafts) + 1`` tokens."""
        position, last = len(sequence), sequence[-1] if sequence else 0
        on_path = self._on_path(sequence)
        out = []
        for draft in (*drafts, None):
            out.append(self._choice(stage, position, last, on_path=on_path, draft=draft))
            if draft is not None:
                on_path = on_path and position < len(self._target) and draft == self._target[position]
                position, last = position + 1, draft
        return out

    def _on_path(self, sequence: Sequence[int]) -> bool:
        return sequence == self._target[: len(sequence)]

    def propose(self, stage: int, sequence: Sequence[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens of a lookup, each after the ones before it."""
        position, last = len(sequence), sequence[-1] if sequence else 0
        on_path = self._on_path(sequence)
        out: list[int] = []
        while len(out) < limit:
            token = self._choice(stage, position, last, on_path=on_path, draft=None)
            if token == NO_PROPOSAL or not (on_path or self._goes_on(stage, position, last)):
                break
            on_path = on_path and position < len(self._target) and token == self._target[position]
            position, last = position + 1, token
            out.append(token)
        return out

    def _goes_on(self, stage: int, position: int, last: int) -> bool:
        return uniform(self.seed, self.prompt, stage, ON_PATH, position, last) < self.goes_on_rate(stage)

    def goes_on_rate(self, stage: int) -> float:
        """How often a lookup off the target's path proposes once more: the rate at which, on the path, a
        proposal is followed by another."""
        proposals = [token != NO_PROPOSAL for token in self._rows[stage]]
        followed = [after for before, after in pairwise(proposals) if before]
        return sum(followed) / len(followed) if followed else 0.0

    def _choice(self, stage: int, position: int, last: int, *, on_path: bool, draft: int | None) -> int:
        if on_path and position < len(self._target):
            return self._rows[stage][position]
        while stage and uniform(self.seed, self.prompt, stage, OFF_PATH, position, last) < self.neighbour_rate:
            if draft is not None:
                return draft
            stage -= 1  # the draft that upstream has made of it, or will
        return made_up(self.seed, self.prompt, stage, position, last)
