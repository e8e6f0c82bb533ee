"""Do the stages of a pipeline speak the same tokens?  Compared by meaning, not by size.

A vocabulary that is only padded (32000 against 32256 with the same tokens) works; padding is never
proposed.  Equal sizes with two ids swapped, or another tokenizer, are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipespec_model.errors import InputError
from pipespec_model.spec import PipelineSpec

from .loading import load_tokenizer


def common_vocabulary(pipelines: Iterable[PipelineSpec], tokenizers: Mapping[str, Any] | None = None) -> int | None:
    """Ids that every model of these pipelines knows; None when there is only one model.

    tokenizers : by model, where they are loaded already
    Raises InputError naming the first id that two models read differently.
    """
    models = list(dict.fromkeys(stage.model for p in reversed(list(pipelines)) for stage in reversed(p.stages)))
    if len(models) < 2:
        return None
    loaded = {model: (tokenizers or {}).get(model) or load_tokenizer(model) for model in models}
    target = by_id(loaded[models[0]])
    size = len(target)
    for model in models[1:]:
        other = by_id(loaded[model])
        check_same(models[0], target, model, other)
        size = min(size, len(other))
    return size


def by_id(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def check_same(target_name: str, target: Mapping[int, str], name: str, other: Mapping[int, str]) -> None:
    shared = sorted(set(target) & set(other))
    different = next((number for number in shared if target[number] != other[number]), None)
    if different is not None:
        raise InputError(f"model {name!r}", f"must read token ids as {target_name!r} does; id {different} is "
                         f"{other[different]!r} there and {target[different]!r} in the target",
                         mend="use models of one family, with one tokenizer")
    if len(shared) < 0.9 * max(len(target), len(other)):
        raise InputError(f"model {name!r}", f"must share the vocabulary of {target_name!r}",
                         f"{len(shared)} of {max(len(target), len(other))} ids", "use models with one tokenizer")
