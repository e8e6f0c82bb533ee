"""How tokens are drawn: the options, one set for every stage of a pipeline.

Temperature 0 is greedy decoding.  Each option means what the logits processor of that name means in
transformers.  docs/losslessness.md says why the text has the target's distribution whatever the drafters do.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from .spec import Spec


class Sampling(Spec):
    """What becomes of a stage's logits before it chooses.

    temperature : 0 = the best token
    top_k : only the so many best tokens (0: all)
    top_p : only the best tokens that together have this probability (1: all)
    min_p : only tokens at least so probable, relative to the best one (0: all)
    repetition_penalty : positive logits of tokens of the prompt or the text so far are divided by it, negative ones
        multiplied (1: none)
    min_new_tokens : no end of sequence before so many tokens
    seed : of all draws; one seed is one text of a prompt, whatever the strategy
    """

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    min_new_tokens: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _all_used(self) -> Sampling:
        unused = [name for name in ("top_k", "top_p", "min_p", "seed")
                  if getattr(self, name) != type(self).model_fields[name].default]
        if unused and not self.temperature:
            raise ValueError(f"{unused[0]} must be absent with temperature 0: greedy decoding does not draw")
        return self

    @property
    def plain(self) -> bool:
        """Whether this is greedy decoding of the logits as they are."""
        return not self.temperature and self.repetition_penalty == 1 and not self.min_new_tokens

    @property
    def or_none(self) -> Sampling | None:
        """Itself; None where it is plain."""
        return None if self.plain else self

    @property
    def given(self) -> dict[str, float]:
        """The options that are not their defaults."""
        return {name: getattr(self, name) for name, item in type(self).model_fields.items()
                if getattr(self, name) != item.default}

    @property
    def said(self) -> str:
        """In words: ``temperature 0.8, top-p 0.95, seed 1``."""
        return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in self.given.items())

    @property
    def first_set(self) -> str:
        """The first option given, the seed apart: what a refusal names."""
        return next((name for name in self.given if name != "seed"), "temperature")
