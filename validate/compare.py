"""Predictions beside measurements: one dictionary a row, as the contract of the report has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipespec_model import closed_form, metrics
from pipespec_model import predict as analytic
from pipespec_model.acceptance import IID, Markov
from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.metrics import mean_of_repeats
from pipespec_model.profile import Profile, pairs, recorded
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import BETWEEN_STEPS, PromptRecord, Trace
from pipespec_model.yardstick import probed_slowness
from simulate.run import forecast, simulate

from .budget import budget
from .rows import Row

REPLICAS = 4  # of a prompt in a forecast: one draw of the machine's slowness each
MODELS = ("closed_form", "renewal", "simulation")
# Greedy text may differ where the target's two best logits are closer than this: a few steps of the
# format at the usual size of a logit (16 to 32).
NEAR_TIE_MARGIN = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.5}


@dataclass(frozen=True)
class Prediction:
    """What was said of a row before it ran."""

    tokens_per_s: dict[str, float | None]
    interval: tuple[float, float] | None
    mean_acceptance_length: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"tokens_per_s": self.tokens_per_s, "interval": list(self.interval) if self.interval else None,
                "mean_acceptance_length": self.mean_acceptance_length}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Prediction:
        interval = data["interval"]
        return cls(data["tokens_per_s"], tuple(interval) if interval else None, data["mean_acceptance_length"])


def predict(row: Row, profile: Profile, *, num_prompts: int, repeats: int) -> Prediction:
    """Predict a row from the calibration prompts alone."""
    trace = simulate(row.pipeline, profile, recorded(profile, row.pipeline) * REPLICAS)
    said = forecast(trace, profile, num_prompts=num_prompts, repeats=repeats)
    by_model = {"closed_form": closed_form_tokens_per_s(row.pipeline, profile),
                "renewal": renewal_tokens_per_s(row.pipeline, profile), "simulation": said.tokens_per_s}
    return Prediction(by_model, said.interval, said.mean_acceptance_length)


def renewal_tokens_per_s(pipeline: PipelineSpec, profile: Profile) -> float | None:
    """The formula that applies (pipespec_model.predict), with the target's mean prefill of the calibration prompts
    before it; None where there is none."""
    prompts = float(np.mean([a.prompt_length for a in profile.agreement]))
    tokens = float(np.mean([a.num_tokens for a in profile.agreement]))
    try:
        said = analytic.predict(pipeline, profile, context=int(prompts + tokens / 2))
    except InputError:
        return None
    target = pipeline.target
    latency = profile.stage_latency(target)
    first_s = (latency.prefill or latency.step).mean_s(round(prompts), 0) * profile.slowness_at(target, None)
    first_s += profile.stage_costs(target, pipeline.strategy).start_s
    return tokens / (first_s + (tokens - 1) / said.tokens_per_s)


def closed_form_tokens_per_s(pipeline: PipelineSpec, profile: Profile) -> float | None:
    """The paper's formulas with measured seconds (protocols: one α, a full window always waits,
    no prefill); of a chain of more than two stages there is none."""
    context = int(np.mean([a.prompt_length + a.num_tokens / 2 for a in profile.agreement]))
    target = profile.stage_latency(pipeline.target).step
    if pipeline.strategy == "autoregressive":
        return closed_form.autoregressive_tokens_per_s(target.mean_s(1, context))
    drafter, verifier, link = pairs(pipeline)[-1]
    model = profile.pair(drafter, verifier)
    assert isinstance(model, Markov | IID)
    alpha, window = model.acceptance_rate, link.lookahead
    if pipeline.strategy == "pipelined":
        return closed_form.pipelined_tokens_per_s(alpha, window, target.mean_s(window + 1, context))
    if len(pipeline.stages) > 2:
        return None
    ratio = profile.stage_latency(drafter).step.mean_s(1, context) / target.mean_s(1, context)
    return closed_form.synchronous_tokens_per_s(alpha, window, ratio, target.mean_s(1, context))


def compare(row: Row, prediction: Prediction, trace: Trace, *, profile: Profile, agreements: Sequence[Agreement],
            answers: Mapping[str, Sequence[int]], margins: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """One row of the report.

    agreements : of the evaluation prompts, to replay
    answers : autoregressive tokens by prompt; margins : the target's top-2 margins along them
    """
    prompts = mean_of_repeats(trace.prompts)
    measured = metrics.tokens_per_s(prompts)
    assert measured is not None
    stages = trace.pipeline["stages"]
    # The machine's speed is given: it is no part of the model of time.
    beside = probed_slowness(trace, profile)
    slowness = [[beside.get((p.prompt, i), 1.0) for i in range(len(stages))] for p in trace.prompts]
    tokens = replay_set(row.pipeline, agreements, trace.prompts)
    replayed = simulate(row.pipeline, profile, tokens, slowness=slowness)
    timing = metrics.tokens_per_s(replayed.prompts)
    same, near = identity(trace.prompts, answers, margins, row.pipeline.target.dtype)
    interval = metrics.bootstrap_interval(prompts, metrics.throughput, rng=np.random.default_rng(1))
    return {
        "name": row.name, "note": row.note, "strategy": row.pipeline.strategy,
        "stages": [stage["name"] for stage in stages], "lookahead": [link.lookahead for link in row.pipeline.links],
        "handshake": row.pipeline.handshake, "devices": [stage["device"] for stage in stages],
        "threads": [stage["threads"] for stage in stages], "cores": trace.num_cores, "origin": trace.origin,
        "num_prompts": len(prompts), "num_tokens": sum(len(p.tokens) for p in prompts),
        "measured_tokens_per_s": measured, "measured_interval": list(interval) if interval else None,
        "predicted_tokens_per_s": prediction.tokens_per_s,
        "error_percent": {key: percent(value, measured) for key, value in prediction.tokens_per_s.items()},
        "timing_error_percent": percent(timing, measured), "replayed_tokens_per_s": timing,
        "predicted_interval": list(prediction.interval) if prediction.interval else None,
        "measured_mean_acceptance_length": metrics.mean_acceptance_length(trace),
        "predicted_mean_acceptance_length": prediction.mean_acceptance_length,
        "replayed_mean_acceptance_length": metrics.mean_acceptance_length(replayed),
        "identical_prompts": same, "near_tie_prompts": near,
        "noise_percent": noise_percent(trace), "ttft_s": float(np.mean([p.ttft_s for p in prompts])),
        "replayed_ttft_s": float(np.mean([p.ttft_s for p in replayed.prompts])),
        "stage_use": metrics.stage_use(trace), "step_times": step_times(trace, replayed),
        "error_budget": budget(row.pipeline, profile, trace, tokens, slowness),
    }


def step_times(measured: Trace, replayed: Trace) -> list[dict[str, Any]]:
    """Per stage and kind of step: how many, and their mean time, measured and replayed.  Shows where an
    error comes from: wrong times, or wrong counts."""
    out = []
    for i, stage in enumerate(measured.pipeline["stages"]):
        for kind in ("prefill", "draft", "decode", "verify", *sorted(BETWEEN_STEPS)):
            here = [s.duration_s for s in measured.steps if s.stage == i and s.kind == kind]
            there = [s.duration_s for s in replayed.steps if s.stage == i and s.kind == kind]
            if here and there:
                out.append({
                    "stage": stage["name"], "kind": kind, "measured_count": len(here),
                    "replayed_count": len(there), "measured_s": float(np.mean(here)),
                    "replayed_s": float(np.mean(there))})
    return out


def replay_set(pipeline: PipelineSpec, agreements: Sequence[Agreement], prompts: Sequence[PromptRecord],
               ) -> list[Agreement]:
    names = [stage.choice_key for stage in pipeline.stages]
    by_name = {agreement.prompt: agreement for agreement in agreements}
    return [by_name[prompt.name].select(names) for prompt in prompts]


def percent(value: float | None, measured: float) -> float | None:
    return None if value is None else 100.0 * (value - measured) / measured


def noise_percent(trace: Trace) -> float | None:
    """Difference of the throughput between the first two repeats: what the machine does not repeat."""
    rates = [metrics.tokens_per_s([p for p in trace.prompts if p.repeat == repeat]) for repeat in (0, 1)]
    if rates[0] is None or rates[1] is None:
        return None
    return 100.0 * abs(rates[0] - rates[1]) / ((rates[0] + rates[1]) / 2)


def identity(prompts: Sequence[PromptRecord], answers: Mapping[str, Sequence[int]],
             margins: Mapping[str, Sequence[float]], dtype: str) -> tuple[int, int]:
    """Prompts whose every repeat equals autoregressive decoding, and those that first differ where the
    target's two best tokens were a near-tie."""
    verdicts: dict[str, set[str]] = defaultdict(set)
    for prompt in prompts:
        answer = list(answers[prompt.name])
        if prompt.tokens == answer:
            verdicts[prompt.name].add("same")
            continue
        first = next((i for i, (a, b) in enumerate(zip(prompt.tokens, answer, strict=False)) if a != b),
                     min(len(prompt.tokens), len(answer)))
        known = margins.get(prompt.name, ())
        tie = first < len(known) and known[first] <= NEAR_TIE_MARGIN[dtype]
        verdicts[prompt.name].add("near tie" if tie else "different")
    same = sum(found == {"same"} for found in verdicts.values())
    near = sum("near tie" in found and "different" not in found for found in verdicts.values())
    return same, near


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups and the summary figures; fills ``speedup`` into the rows."""
    real = [row for row in rows if row["origin"] == "measured"]
    base = next((row for row in real if row["strategy"] == "autoregressive" and row["cores"] == 1), None)
    for row in rows:
        row["speedup"] = row["measured_tokens_per_s"] / base["measured_tokens_per_s"] if base and row in real else None
        rivals = [other["measured_tokens_per_s"] for other in real
                  if other["strategy"] != "pipelined" and other["cores"] <= row["cores"]]
        row["speedup_same_devices"] = row["measured_tokens_per_s"] / max(rivals) if rivals and row in real else None
    origins = sorted({row["origin"] for row in rows})
    noise = [row["noise_percent"] for row in rows if row["origin"] == "measured" and row["noise_percent"] is not None]
    inside = [row["predicted_interval"][0] <= row["measured_tokens_per_s"] <= row["predicted_interval"][1]
              for row in real if row["predicted_interval"]]
    return {
        "mape_percent": {origin: {key: mean_abs(row["error_percent"][key] for row in rows if row["origin"] == origin)
                                  for key in MODELS} for origin in origins},
        "timing_mape_percent": {origin: mean_abs(row["timing_error_percent"] for row in rows
                                                 if row["origin"] == origin) for origin in origins},
        "timing_worst_percent": {origin: max(abs(row["timing_error_percent"]) for row in rows
                                             if row["origin"] == origin) for origin in origins},
        "noise_floor_percent": float(np.mean(noise)) if noise else None,
        "interval_coverage": float(np.mean(inside)) if inside else None,
    }


def mean_abs(values: Any) -> float | None:
    found = [abs(value) for value in values if value is not None]
    return float(np.mean(found)) if found else None
