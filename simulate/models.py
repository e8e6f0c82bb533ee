"""Which models a profile knows, read back from its keys as stages that could be configured.

The keys are those of ``StageSpec`` (choice_key, time_key); a profile by hand is keyed by names, which a pipeline file
may explain.  Layer-skipping drafters are left out: what they cost belongs to the pipeline that they were measured in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipespec_model.errors import InputError
from pipespec_model.profile import Profile
from pipespec_model.spec import StageSpec

_LOOKUP = re.compile(r"prompt-lookup-(\d+)")
_HYBRID = re.compile(r"(?P<model>.+)\+lookup-(?P<ngram>\d+)")
_TIMED = re.compile(r"(?P<key>.+)\|(?P<device>[^|]+)\|(?P<threads>\d+)t")


def model_names(profile: Profile) -> list[str]:
    """Choice keys, or names, of everything whose agreement is known; one model alone needs none."""
    found = [name for entry in profile.agreement for name in entry.names]
    if not found:
        found = [name for pair in profile.acceptance for name in pair.split(">")]
    if not found:
        found = [_base(key) for key in profile.latency]
    return [name for name in dict.fromkeys(found) if "+clasp-" not in name]


def stages_of(name: str, profile: Profile, known: Mapping[str, StageSpec], target: str) -> list[StageSpec]:
    """The model as a stage, once for each device and number of threads that it was measured with.

    target : whose tokenizer a lookup uses
    """
    if name in known:
        return [known[name]]
    if found := _LOOKUP.fullmatch(name):
        model = known[target].model if target in known else target.split("|")[0]
        return [StageSpec(name="lookup", model=model, drafter="prompt-lookup", max_ngram=int(found[1]))]
    hybrid = _HYBRID.fullmatch(name)
    base = hybrid["model"] if hybrid else name
    if base in profile.latency:
        return [StageSpec(name=name, model=name, device="cuda")]
    out = []
    for key in profile.latency:
        timed = _TIMED.fullmatch(key)
        if timed and timed["key"] == base:
            out.append(_stage(base, timed, hybrid and int(hybrid["ngram"]), target))
    if not out:
        raise InputError(f"profile.latency[{base}]", "must be there", mend="calibrate it, or add it by hand")
    return out


def _stage(key: str, timed: re.Match[str], ngram: int | None, target: str) -> StageSpec:
    parts = key.split("|")
    if len(parts) != 3:
        raise InputError("profile", "must have keys of the form model|dtype|quantize", key)
    model, dtype, quantize = parts
    if key == target or model != target.split("|")[0]:
        name = model.rsplit("/", 1)[-1] + ("" if quantize == "none" else f"-{quantize}")
    else:
        name = quantize if quantize != "none" else dtype  # the target's own model, in another form
    return StageSpec.model_validate({
        "name": name + ("+lookup" if ngram else ""), "model": model, "dtype": dtype, "device": timed["device"],
        "threads": int(timed["threads"]), "quantize": None if quantize == "none" else quantize,
        **({"drafter": "hybrid", "max_ngram": ngram} if ngram else {})})


def _base(key: str) -> str:
    timed = _TIMED.fullmatch(key)
    return timed["key"] if timed else key
