"""The rows of the study: every file predicted from the greedy and synchronous files of its folder.

A synchronous file is predicted leaving itself out.  Nothing of a pipelined file enters its prediction, with two
exceptions that are columns of their own: the lookahead that its windows imply, because labels can be wrong, and
the drafter's own step time, which shows what the last percent hangs on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipespec_model import closed_form
from pipespec_model.acceptance import IID, AcceptanceModel, Markov
from pipespec_model.errors import InputError
from pipespec_model.renewal import renewal
from pipespec_model.spec import AUTO, PipelineSpec
from simulate.choose import choose_lookaheads

from .bits import agreement_rates
from .calibration import RULE, Calibration, DraftRule
from .energy import Power, fit_power, gpus, measured_joules_per_token, predicted_joules_per_token
from .files import PublishedFile
from .lookahead import NUM_PROMPTS, Lookaheads, inferred
from .replay import Replayed, agreements, redrawn, run

Advance = Callable[[str, float], None]
NEIGHBOUR_RATES = (0.7, 0.97)
"""Between these the agreement of two stages that are both wrong may lie; no file tells it."""
NUM_RESAMPLES = 2000


@dataclass
class Study:
    """A folder's files and what was computed from them.

    rows, what_if, speedups : the report's tables, one dictionary a row
    """

    files: list[PublishedFile]
    refused: dict[str, str]
    calibration: Calibration
    power: dict[str, Power]
    rows: list[dict[str, Any]] = field(default_factory=list)
    what_if: list[dict[str, Any]] = field(default_factory=list)
    other_rules: dict[str, dict[str, float | None]] = field(default_factory=dict)
    _best: dict[tuple[str, ...], PipelineSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, files: list[PublishedFile], refused: dict[str, str]) -> Study:
        return cls(files, refused, Calibration.of(files), fit_power(files))

    def predict(self, advance: Advance, *, other_rules: bool = False) -> None:
        """Fill in the tables; ``advance(what, files done)`` reports progress."""
        lookaheads = Lookaheads(self.calibration)
        rules: tuple[DraftRule, ...] = ("greedy step", "greedy total", "synchronous step") if other_rules else ()
        by_rule: dict[str, list[float]] = {rule: [] for rule in rules}
        for file in self.files:
            advance(file.name, 0.0)
            calibration = self.calibration
            if file.strategy == "speculative" and len(file.stages) == 2:
                calibration = Calibration.of(other for other in self.files if other is not file)
            row = _unpredicted(file)
            self.rows.append(row)
            try:
                if file.strategy == "pipelined":
                    row["lookahead_scores"] = lookaheads.scores(file)
                    row["inferred_lookahead"] = inferred(row["lookahead_scores"], file.label)
                if file.strategy != "autoregressive":
                    self._fill(row, file, calibration)
                for rule in rules if file.strategy == "pipelined" else ():
                    pipeline = file.pipeline(row["inferred_lookahead"])
                    made = agreements(pipeline, calibration, row["prompts"])
                    by_rule[rule].append(percent(run(pipeline, calibration, made, rule=rule).ms_per_token,
                                                 row["measured_ms_per_token"]))
            except InputError as error:
                only = file.strategy == "speculative" and len(file.stages) == 2
                row["used_for_calibration"] = only
                row["warnings"].append("the only synchronous file of its pair: calibrated on, not predicted" if only
                                       else f"not predicted: {error}")
            advance(file.name, 1.0)
        self.other_rules = {rule: {"mape_percent": mean_abs(found), "worst_percent": worst(found)}
                            for rule, found in by_rule.items()}

    # -- one row -------------------------------------------------------------------------------

    def _fill(self, row: dict[str, Any], file: PublishedFile, calibration: Calibration) -> None:
        pipeline = file.pipeline(row["inferred_lookahead"])
        known = calibration.known_prompts(pipeline)
        indices = [prompt.index for prompt in file.prompts if prompt.index in known]
        if not indices:
            raise InputError("prompts", "must be among those of the synchronous files")
        measured = {p.index: (p.total_s, p.num_tokens) for p in file.prompts if p.index in indices}
        if len(indices) < len(file.prompts):
            row["warnings"].append(f"compared on the {len(indices)} prompts that the synchronous files hold too")
        made = agreements(pipeline, calibration, indices)
        replayed = run(pipeline, calibration, made)
        measured_ms = _ratio(measured)
        row |= {"prompts": indices, "num_prompts": len(indices), "measured_ms_per_token": measured_ms,
                "predicted_ms_per_token": replayed.ms_per_token,
                "error_percent": percent(replayed.ms_per_token, measured_ms),
                "error_interval": _error_interval(replayed.seconds(), measured),
                "error_percent_mean_over_prompts": percent(_mean(replayed.seconds()), _mean(measured))}
        if file.strategy == "pipelined":
            own = run(pipeline, calibration, made, draft_s=_own_draft_s(file, calibration, replayed))
            row["error_percent_own_drafter"] = percent(own.ms_per_token, measured_ms)
        self._counts(row, file, calibration, replayed)
        row["predicted_by_model"] = self._models(file, calibration, pipeline, indices, replayed)
        row["error_percent_by_model"] = {name: None if ms is None else percent(ms, measured_ms)
                                         for name, ms in row["predicted_by_model"].items()}
        row["extremes"] = _extremes(pipeline, calibration, indices)
        if len(pipeline.stages) > 2:
            row["neighbour_rate_range"] = {str(rate): run(
                pipeline, calibration, agreements(pipeline, calibration, indices, wrong_alike_rate=rate),
                neighbour_rate=rate).ms_per_token for rate in NEIGHBOUR_RATES}
        row["measured_joules_per_token"] = measured_joules_per_token(file, indices)
        row["predicted_joules_per_token"] = predicted_joules_per_token(replayed, file.stages, self.power)
        row["speedup"] = self._speedup(file, replayed)
        _warn(row, file, calibration, indices)
        if file.strategy == "pipelined":
            self.what_if.append(self._what_if(row, file, pipeline))

    def _counts(self, row: dict[str, Any], file: PublishedFile, calibration: Calibration, replayed: Replayed) -> None:
        """Verifications and drafts, in total and where they differ; a pipelined run does not record a prompt's
        last verification."""
        unrecorded = int(file.strategy == "pipelined")
        last = len(file.stages) - 1
        verifications = {i: n - unrecorded for i, n in replayed.steps(last).items()}
        drafts = replayed.steps(0)
        recorded = {p.index: (len(p.emitted[-1]), len(p.step_s[0])) for p in file.prompts if p.index in drafts}
        row["measured_verifications"] = sum(n for n, _ in recorded.values())
        row["predicted_verifications"] = sum(verifications.values())
        row["measured_drafts"] = sum(n for _, n in recorded.values())
        row["predicted_drafts"] = sum(drafts.values())
        if file.strategy == "speculative":
            # Contradictions over all files: one may show only between this file and the others.
            merged = self.calibration.pair_bits(file.stages[-2], file.target)
            row["prompts_that_differ"] = [
                {"prompt": i, "measured": list(recorded[i]), "predicted": [verifications[i], drafts[i]],
                 "contradictory_positions": list(merged[i].contradictory), "other_output": list(merged[i].other_output)}
                for i in recorded if recorded[i] != (verifications[i], drafts[i])]
        ends = {"measured": {p.index: p.ends() for p in file.prompts if p.index in drafts}, "replayed": replayed.ends()}
        row["accepted_lengths"] = {name: _histogram(found, unrecorded * (name == "replayed"))
                                   for name, found in ends.items()}

    def _models(self, file: PublishedFile, calibration: Calibration, pipeline: PipelineSpec, indices: Sequence[int],
                replayed: Replayed) -> dict[str, float | None]:
        """Milliseconds a token: the replay, and weaker models with the same step times."""
        rates = [agreement_rates(calibration.pair_bits(stage, pipeline.target).values())
                 for stage in pipeline.stages[:-1]]
        iid = redrawn(pipeline, calibration, indices, [IID(overall) for overall, _, _ in rates])
        markov = redrawn(pipeline, calibration, indices, [Markov(one, zero) for _, one, zero in rates])
        alpha, window = rates[-1][0], pipeline.links[-1].lookahead
        target = calibration.verify(file.target)
        tokens_per_s: float | None = None
        if file.strategy == "pipelined":
            tokens_per_s = closed_form.pipelined_tokens_per_s(alpha, window, target.mean_s(window + 1, 0))
        elif len(file.stages) == 2:
            one_s = target.mean_s(1, 0)
            draft_s = calibration.draft_s(file.stages[0], "synchronous step", file.target)
            tokens_per_s = closed_form.synchronous_tokens_per_s(alpha, window, draft_s / one_s, one_s)
        renewal_ms = None
        if file.strategy == "pipelined" and len(file.stages) == 2:
            renewal_ms = renewal_ms_per_token(pipeline, calibration, Markov(*rates[-1][1:]), replayed.seconds())
        return {"replay": replayed.ms_per_token, "iid": run(pipeline, calibration, iid).ms_per_token,
                "markov": run(pipeline, calibration, markov).ms_per_token, "renewal": renewal_ms,
                "closed_form": 1e3 / tokens_per_s if tokens_per_s else None}

    def _speedup(self, file: PublishedFile, replayed: Replayed) -> dict[str, Any] | None:
        """Against the target alone, on the prompts that both files hold."""
        alone = next((other for other in self.files if other.strategy == "autoregressive"
                      and other.target.model == file.target.model), None)
        if alone is None:
            return None
        base = {p.index: (p.total_s, p.num_tokens) for p in alone.prompts}
        here = {p.index: (p.total_s, p.num_tokens) for p in file.prompts}
        predicted = replayed.seconds()
        common = sorted(base.keys() & here.keys() & predicted.keys())
        if not common:
            return None
        a, b, c = (np.array([found[i] for i in common]) for found in (base, here, predicted))
        return {"num_common_prompts": len(common), "baseline": alone.name,
                "baseline_dtype": alone.target.dtype, "dtype": file.target.dtype,
                "measured": _speed(a, b), "measured_interval": _interval(a, b), "predicted": _speed(a, c),
                "predicted_interval": _interval(a, c),
                "measured_mean_over_prompts": float(np.mean(a[:, 0] / a[:, 1] / (b[:, 0] / b[:, 1]))),
                "predicted_mean_over_prompts": float(np.mean(a[:, 0] / a[:, 1] / (c[:, 0] / c[:, 1])))}

    def _what_if(self, row: dict[str, Any], file: PublishedFile, pipeline: PipelineSpec) -> dict[str, Any]:
        """The same run with the overlapped handshake, as it was configured and with the best lookaheads."""
        ours = pipeline.model_copy(update={"handshake": "overlapped"})
        key = tuple(stage.choice_key for stage in file.stages)
        known = self.calibration.known_prompts(pipeline)
        if key not in self._best:
            few = agreements(ours, self.calibration, known[:NUM_PROMPTS])
            self._best[key] = choose_lookaheads(ours.with_lookaheads([AUTO] * len(ours.links)),
                                                self.calibration.profile(ours, warm=True), few)
        made = agreements(ours, self.calibration, row["prompts"])
        alone = next((other for other in self.files if other.strategy == "autoregressive"
                      and other.target.model == file.target.model), None)
        devices = sum(len(gpus(stage)) for stage in file.stages)
        best = self._best[key]
        alike = next((other for other in self.what_if if other["models"] == file.models
                      and other["prompts"] == row["prompts"]), None)
        best_ms = alike["best_ms_per_token"] if alike else run(best, self.calibration, made).ms_per_token
        return {"file": file.name, "models": file.models, "lookahead": [link.lookahead for link in ours.links],
                "measured_ms_per_token": row["measured_ms_per_token"],
                "predicted_ms_per_token": row["predicted_ms_per_token"],
                "overlapped_ms_per_token": run(ours, self.calibration, made).ms_per_token,
                "best_ms_per_token": best_ms, "prompts": row["prompts"],
                "best_lookahead": [link.lookahead for link in best.links], "num_gpus": devices,
                "alone_ms_per_token": alone.ms_per_token if alone else None,
                "alone_num_gpus": len(gpus(alone.target)) if alone else None}

    # -- the whole -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON; the summary figures cover rows that were not used for calibration."""
        judged = [row for row in self.rows if row["error_percent"] is not None and not row["used_for_calibration"]]
        groups = {kind: [row["error_percent"] for row in judged if row["strategy"] == kind]
                  for kind in ("pipelined", "speculative")}
        own = [row["error_percent_own_drafter"] for row in judged if row["error_percent_own_drafter"] is not None]
        errors = [row["error_percent"] for row in judged]
        models = ("replay", "markov", "iid", "renewal", "closed_form")
        return {
            "rows": self.rows, "mape_percent": mean_abs(errors), "worst_percent": worst(errors),
            "by_strategy": {kind: {"mape_percent": mean_abs(found), "worst_percent": worst(found)}
                            for kind, found in groups.items()},
            "own_drafter": {"mape_percent": mean_abs(own), "worst_percent": worst(own)},
            "mape_percent_by_model": {kind: {name: mean_abs(
                row["error_percent_by_model"][name] for row in judged if row["strategy"] == kind) for name in models}
                for kind in groups},
            "what_if": self.what_if, "refused": self.refused, "draft_rule": RULE, "other_draft_rules": self.other_rules,
            "calibrated_on": list(self.calibration.files), "bits": self._bits(), "step_times": self._step_times(),
            "power_w": {key: vars(power) for key, power in self.power.items()},
        }

    def _bits(self) -> list[dict[str, Any]]:
        return [{
            "pair": list(pair), "num_prompts": len(merged),
            "positions": sum(item.num_tokens for item in merged.values()),
            "unknown": sum(item.num_unknown for item in merged.values()),
            "contradictory": {str(i): list(item.contradictory) for i, item in merged.items() if item.contradictory},
            "other_output": {str(i): list(item.other_output) for i, item in merged.items() if item.other_output},
            "agreement_rate": agreement_rates(merged.values())[0],
        } for pair, merged in self.calibration.bits.items()]

    def _step_times(self) -> list[dict[str, Any]]:
        return [{"pair": list(pair), "draft_s": times.draft_s, "rollback_s": times.rollback_s,
                 "verify_1_s": times.verify.mean_s(1, 0), "verify_2_s": times.verify.mean_s(2, 0),
                 "verify_20_s": times.verify.mean_s(20, 0), "prefill_s": times.prefill_s, "warmup_s": times.warmup_s,
                 "handover_s": times.handover_s} for pair, times in self.calibration.pairs.items()]


def _unpredicted(file: PublishedFile) -> dict[str, Any]:
    # In a chain the first verifier emits at most L, and as a rule does so somewhere.
    chain = file.strategy == "speculative"
    longest = max((n for p in file.prompts for n in p.emitted[0]), default=0) if chain else None
    return {
        "file": file.name, "strategy": file.strategy, "models": file.models, "labelled_lookahead": file.label,
        "inferred_lookahead": longest, "num_prompts": len(file.prompts), "measured_ms_per_token": file.ms_per_token,
        "predicted_ms_per_token": None, "error_percent": None, "error_interval": None,
        "error_percent_own_drafter": None, "error_percent_mean_over_prompts": None,
        "predicted_by_model": {}, "error_percent_by_model": {},
        "measured_verifications": sum(len(p.emitted[-1]) for p in file.prompts) if len(file.stages) > 1 else None,
        "predicted_verifications": None, "measured_drafts": None, "predicted_drafts": None,
        "used_for_calibration": file.strategy == "autoregressive", "warnings": [], "extremes": None,
        "measured_joules_per_token": measured_joules_per_token(file, [p.index for p in file.prompts]),
        "predicted_joules_per_token": None, "speedup": None, "accepted_lengths": None, "prompts": [],
        "lookahead_scores": None,
    }


def _warn(row: dict[str, Any], file: PublishedFile, calibration: Calibration, indices: Sequence[int]) -> None:
    if max(file.label, 1) != max(row["inferred_lookahead"], 1):
        row["warnings"].append(f"labelled lookahead {file.label}, but its windows are those of "
                               f"{row['inferred_lookahead']}, which the prediction uses")
    if len(file.prompts) < file.num_samples:
        row["warnings"].append(f"holds {len(file.prompts)} of {file.num_samples} prompts")
    tokens = {p.index: p.num_tokens for p in file.prompts}
    differ = sorted({i for stage in file.stages[:-1] for i in indices
                     if calibration.pair_bits(stage, file.target)[i].num_tokens != tokens[i]})
    if differ:
        row["warnings"].append("another output than in the synchronous files: prompt "
                               + ", ".join(map(str, differ)))


def _extremes(pipeline: PipelineSpec, calibration: Calibration, indices: Sequence[int]) -> dict[str, Any] | None:
    """Time and verifications with every unknown position taken for 0 or for 1; None where none is unknown."""
    if not any(calibration.pair_bits(stage, pipeline.target)[i].num_unknown
               for stage in pipeline.stages[:-1] for i in indices):
        return None
    out = {}
    for unknown in ("all 0", "all 1"):
        found = run(pipeline, calibration, agreements(pipeline, calibration, indices, unknown=unknown))
        counts = found.steps(len(pipeline.stages) - 1).values()
        out[unknown] = {"ms_per_token": found.ms_per_token,
                        "verifications": sum(counts) - len(counts) * (pipeline.strategy == "pipelined")}
    return out


def _own_draft_s(file: PublishedFile, calibration: Calibration, replayed: Replayed) -> float:
    """The file's mean draft step, less the rollbacks' share of it, which the replay tells."""
    recorded = [seconds for prompt in file.prompts for seconds in prompt.step_s[0]]
    steps = [step for step in replayed.trace.steps if step.stage == 0 and step.kind != "prefill"]
    share = sum(step.rolled_back for step in steps) / max(len(steps), 1)
    profile = calibration.profile(file.pipeline(file.label), warm=True)
    return float(np.mean(recorded)) - share * profile.stage_costs(file.stages[0], file.strategy).rollback_s


def renewal_ms_per_token(pipeline: PipelineSpec, calibration: Calibration, acceptance: AcceptanceModel,
                         prompts: dict[int, tuple[float, int]]) -> float:
    """By formula: prefill as in the replay, then the renewal model; ``prompts`` as ``Replayed.seconds``."""
    cold, warm = (calibration.profile(pipeline, warm=warm) for warm in (False, True))
    drafter, target = pipeline.stages
    found = renewal(pipeline, replace(warm, acceptance={f"{drafter.name}>{target.name}": acceptance}))
    start_s = [found.mean_s(1, 0) if found else 0.0 for found in
               (profile.stage_latency(target).prefill for profile in (cold, warm))]
    # Prefill emits the first token; the first prompt bears the warm-up.
    seconds = sum(start_s[min(i, 1)] + found.seconds(tokens - 1) for i, (_, tokens) in enumerate(prompts.values()))
    return 1e3 * seconds / sum(tokens for _, tokens in prompts.values())


def _histogram(ends: dict[int, list[int]], dropped: int) -> list[int]:
    """How many verifications emitted 0, 1, 2, … tokens; without each prompt's last ``dropped``."""
    lengths = Counter(b - a for found in ends.values() for a, b in pairwise([1, *found[: len(found) - dropped]]))
    return [lengths[n] for n in range(max(lengths, default=0) + 1)]


def percent(value: float, measured: float) -> float:
    return 100.0 * (value - measured) / measured


def mean_abs(errors: Any) -> float | None:
    found = [abs(error) for error in errors if error is not None]
    return float(np.mean(found)) if found else None


def worst(errors: Sequence[float]) -> float | None:
    return max(map(abs, errors), default=None)


def _ratio(found: dict[int, tuple[float, int]]) -> float:
    return 1e3 * sum(s for s, _ in found.values()) / sum(n for _, n in found.values())


def _mean(found: dict[int, tuple[float, int]]) -> float:
    return 1e3 * float(np.mean([s / n for s, n in found.values()]))


def _speed(base: np.ndarray, other: np.ndarray) -> float:
    """Ratio of total time per token; rows are prompts, columns seconds and tokens."""
    return float(base[:, 0].sum() / base[:, 1].sum() / (other[:, 0].sum() / other[:, 1].sum()))


def _interval(base: np.ndarray, other: np.ndarray) -> list[float] | None:
    """95% bootstrap interval of the speed-up over prompts, the same prompts on both sides."""
    n = len(base)
    if n < 2:
        return None
    chosen = np.random.default_rng(1).integers(n, size=(NUM_RESAMPLES, n))
    a, b = base[chosen].sum(axis=1), other[chosen].sum(axis=1)
    low, high = np.quantile(a[:, 0] / a[:, 1] / (b[:, 0] / b[:, 1]), [0.025, 0.975])
    return [float(low), float(high)]


def _error_interval(predicted: dict[int, tuple[float, int]], measured: dict[int, tuple[float, int]],
                    ) -> list[float] | None:
    """95% bootstrap interval over prompts of the error in percent."""
    rows = [np.array([found[i] for i in measured]) for found in (predicted, measured)]
    found = _interval(*rows)
    return [100.0 * (value - 1) for value in found] if found else None
