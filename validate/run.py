"""The main job: calibrate on one half of the prompts, predict, then measure on the other half.

Predictions are on disk before the first evaluation step.  The output folder can be resumed: what is
there is not measured again, and each finished prompt is kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from execute.calibrate import calibrate
from execute.fleet import Fleet, new_trace
from execute.forced import Draws
from execute.host import host, versions
from execute.processes import stages_apart
from execute.prompts import Prompt
from execute.record import Drawn, draws_of, record_agreement
from execute.vocabulary import common_vocabulary
from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.profile import Profile, load_profile, recorded, save_profile
from pipespec_model.sampling import Sampling
from pipespec_model.spec import StageSpec, checked
from pipespec_model.trace import Trace, TraceWriter, load_trace, save_trace
from simulate.choose import choose_lookaheads

from .compare import Prediction, compare, identity, predict, summarise
from .rows import Row, emulated_agreements, emulated_rows, emulated_scripts, emulated_stages

ROUGH_TOKEN_S = 0.055  # for the progress bar alone
Advance = Callable[[str, float], None]
"""Progress: what begins now, and how much of the whole (in rough seconds) has just ended."""


@dataclass(frozen=True)
class Settings:
    """What was held fixed; echoed into the report."""

    model: str
    dtype: str
    max_new_tokens: int
    repeats: int
    full: bool
    emulated_prompts: int
    emulated_tokens: int
    calibration_prompts: list[str]
    evaluation_prompts: list[str]
    prompts_sha256: str
    rows: list[dict[str, Any]]
    sampling: dict[str, Any] | None = None


@dataclass
class Group:
    """Rows that share stage processes: the real ones, or the emulated ones."""

    rows: list[Row]
    stages: list[StageSpec]
    calibration: list[Prompt]
    evaluation: list[Prompt]
    max_new_tokens: int
    repeats: int
    rounds: int | None = None
    check_calibration_half: bool = False
    calibration_agreements: list[Agreement] | None = None
    evaluation_agreements: list[Agreement] | None = None
    traces: dict[str, Trace] = field(default_factory=dict)
    checks: dict[str, Trace] = field(default_factory=dict)
    predictions: dict[str, Prediction] = field(default_factory=dict)
    profile: Profile | None = None
    sampling: Sampling | None = None
    margins: dict[str, list[float]] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        return self.calibration_agreements is not None

    @property
    def numbers(self) -> dict[str, int]:
        """By prompt, what its noise goes by: as in the calibration, and the same in every repeat."""
        return {prompt.name: number for number, prompt in enumerate([*self.calibration, *self.evaluation])}

    def draws(self, prompt: Prompt) -> Draws | None:
        return draws_of(prompt, self.sampling, self.numbers[prompt.name])


def emulated_group(num_prompts: int, num_tokens: int, *, extra: bool = False) -> Group:
    def prompts(agreements: Sequence[Agreement]) -> list[Prompt]:
        return [Prompt(a.prompt, "emulated", "emulated", tokens=tuple(range(1, a.prompt_length + 1)))
                for a in agreements]

    before = emulated_agreements(12, num_tokens, first=1000)
    after = emulated_agreements(num_prompts, num_tokens, first=0)
    # Step times that are set need few rounds and no repeat; the other agreements serve the forecast.
    rows = emulated_rows(extra=extra)
    return Group(rows, emulated_stages(), prompts(before), prompts(after), num_tokens, 1, rounds=2,
                 calibration_agreements=before, evaluation_agreements=after)


def open_folder(out: Path, settings: Settings) -> None:
    """Make or resume the output folder; refuses a folder that holds another run."""
    mark, text = out / "run.json", json.dumps(asdict(settings), indent=1)
    try:
        (out / "traces").mkdir(parents=True, exist_ok=True)
        before = mark.read_text(encoding="utf-8") if mark.exists() else text
        if before != text:
            raise InputError(f"--out {out}", "must be empty or hold the same run", mend="give another folder")
        mark.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out}", f"must be a writable folder ({error.strerror})") from None


def weight(group: Group) -> float:
    """Rough seconds of a group, for the progress bar."""
    runs = len(group.evaluation) * group.repeats + len(group.calibration) * group.check_calibration_half
    rounds = group.rounds or len(group.calibration)
    return 10.0 * rounds + len(group.rows) * runs * group.max_new_tokens * ROUGH_TOKEN_S + 10.0


def run_group(group: Group, out: Path, advance: Advance) -> None:
    """Calibrate, predict, write, measure.  Fills the group in."""
    kind = "emulated" if group.emulated else "real"
    scripts = emulated_scripts() if group.emulated else None
    pipelines = [row.pipeline for row in group.rows]
    profile_file, prediction_file = out / f"profile-{kind}.json", out / f"predictions-{kind}.json"
    advance(f"starting {len(group.stages)} {kind} stage processes", 0.0)
    vocabulary = None if group.emulated else common_vocabulary(pipelines)
    with Fleet(group.stages, scripts=scripts, vocabulary=vocabulary, apart=stages_apart(pipelines)) as fleet:
        for pipeline in pipelines:
            fleet.check_fits(pipeline, [*group.calibration, *group.evaluation], group.max_new_tokens)
        group.rows = [replace(row, pipeline=fleet.place(row.pipeline)) for row in group.rows]
        begun = prediction_file.exists()
        if not begun:
            advance("calibrating", 10.0)
            profile, traces = calibrate(
                fleet, pipelines, group.calibration, max_new_tokens=group.max_new_tokens,
                rounds=group.rounds, agreements=group.calibration_agreements, sampling=group.sampling,
                tick=lambda text: advance(text, 10.0))
            save_profile(profile, profile_file)
            for i, trace in enumerate(traces):
                save_trace(trace, out / "traces" / f"calibration-{kind}-{i:03d}.jsonl")
        group.profile = load_profile(profile_file)
        group.rows = [_resolved(row, group.profile) for row in group.rows]
        if not begun:
            predictions = {row.name: predict(row, group.profile, num_prompts=len(group.evaluation),
                                             repeats=1 if row.extra else group.repeats) for row in group.rows}
            _write(prediction_file, {name: said.to_dict() for name, said in predictions.items()})
        said = json.loads(prediction_file.read_text(encoding="utf-8"))
        group.predictions = {name: Prediction.from_dict(data) for name, data in said.items()}
        group.traces = _measure(group, fleet, out, advance, group.evaluation, group.repeats, prefix="")
        if group.check_calibration_half:
            # Exactness on the other half too; its times are not used.
            group.checks = _measure(group, fleet, out, advance, group.calibration, 1, prefix="check-")
        if not group.emulated:
            advance("recording each stage's own choices on evaluation prompts", 0.0)
            _record(group, fleet)
            _write(out / f"agreement-{kind}.json", [entry.to_dict() for entry in group.evaluation_agreements or []])


def _resolved(row: Row, profile: Profile) -> Row:
    """The row with its ``auto`` lookaheads chosen, from the calibration prompts alone."""
    prompts = recorded(profile, row.pipeline)
    return replace(row, pipeline=choose_lookaheads(row.pipeline, profile, prompts))


def _measure(group: Group, fleet: Fleet, out: Path, advance: Advance, prompts: Sequence[Prompt], repeats: int, *,
             prefix: str) -> dict[str, Trace]:
    """Every row on every prompt, ``repeats`` times over, interleaved, so that a shift of the machine's speed
    touches all; beside each run, its stages' single steps as a yardstick."""
    writers: dict[str, TraceWriter] = {}
    traces: dict[str, Trace] = {}
    agreements = {a.prompt: a for a in group.evaluation_agreements or []}
    try:
        for row in group.rows:
            path = out / "traces" / f"{prefix}{row.name}.jsonl"
            traces[row.name] = _resume(path, fleet, row, group)
            writers[row.name] = TraceWriter(path, traces[row.name])
        for repeat in range(repeats):
            for n, prompt in enumerate(prompts):
                for row in group.rows:
                    number = repeat * len(prompts) + n
                    wanted = not (repeat and row.extra)
                    if wanted and not any(done.prompt == number for done in traces[row.name].prompts):
                        made = fleet.run_probed(
                            row.pipeline, prompt, max_new_tokens=group.max_new_tokens, number=number,
                            repeat=repeat, agreement=agreements.get(prompt.name), sampling=group.sampling,
                            drawn_as=group.numbers[prompt.name])
                        writers[row.name].append(*made)
                        traces[row.name].add(*made)
                    advance(f"measuring {row.pipeline.strategy} {row.pipeline.label}, repeat {repeat + 1}",
                            group.max_new_tokens * ROUGH_TOKEN_S)
    finally:
        for writer in writers.values():
            writer.close()
    return traces


def _resume(path: Path, fleet: Fleet, row: Row, group: Group) -> Trace:
    if path.exists() and path.stat().st_size:
        return load_trace(path)[0]
    options: dict[str, Any] = {"max_new_tokens": group.max_new_tokens, "repeats": group.repeats}
    if group.sampling is None:
        return new_trace(fleet.configure(row.pipeline), emulated=group.emulated, options=options)
    return new_trace(fleet.configure(row.pipeline), options=options | {"sampling": group.sampling.to_dict()},
                     seed=group.sampling.seed)


def _record(group: Group, fleet: Fleet) -> None:
    answers = baseline_answers(group)
    group.evaluation_agreements = record_agreement(
        fleet, [row.pipeline for row in group.rows],
        [Drawn(p, answers[p.name], group.draws(p)) for p in group.evaluation],
        max_new_tokens=group.max_new_tokens)
    made = [p for traces in (group.traces, group.checks) for trace in traces.values() for p in trace.prompts]
    differ = {p.name for p in made if p.tokens != answers[p.name]}
    target = group.rows[0].pipeline.target.name
    for prompt in [*group.evaluation, *group.calibration]:
        if prompt.name in differ:
            group.margins[prompt.name] = fleet.teacher_force(
                target, prompt.tokens, answers[prompt.name], group.draws(prompt)).margins


def baseline_answers(group: Group) -> dict[str, list[int]]:
    """What plain decoding says, by prompt."""
    if group.emulated:
        return {a.prompt: a.tokens[-1].tolist() for a in group.evaluation_agreements or []}
    first = group.rows[0].name
    traces = [traces[first] for traces in (group.traces, group.checks) if first in traces]
    return {p.name: p.tokens for trace in traces for p in trace.prompts if p.repeat == 0}


def finish(groups: Sequence[Group], settings: Settings, seconds: float) -> dict[str, Any]:
    """The report's data, as ``--json`` prints it."""
    drawn = checked(Sampling, settings.sampling, "sampling:").said if settings.sampling else "greedy"
    rows = []
    for group in groups:
        assert group.profile is not None
        answers = baseline_answers(group)
        for row in group.rows:
            made = compare(row, group.predictions[row.name], group.traces[row.name], profile=group.profile,
                           agreements=group.evaluation_agreements or [], answers=answers, margins=group.margins)
            if row.name in group.checks:
                made["identical_calibration_prompts"], made["near_tie_calibration_prompts"] = identity(
                    group.checks[row.name].prompts, answers, group.margins, row.pipeline.target.dtype)
            rows.append(made)
    return {
        "model": settings.model, "dtype": settings.dtype, "calibration_prompts": settings.calibration_prompts,
        "evaluation_prompts": settings.evaluation_prompts, "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats, "sampling": settings.sampling, "drawn": drawn, "host": host(),
        "versions": versions(), "seconds": round(seconds, 1),
        "rows": rows, **summarise(rows),
    }


def _write(path: Path, data: Any) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    scratch.replace(path)


def free_space(out: Path, needed: int = 50_000_000) -> None:
    """Refuse a full disk before anything is measured."""
    free = shutil.disk_usage(out).free
    if free < needed:
        raise InputError(f"--out {out}", f"must have {needed // 1_000_000} MB free", f"{free // 1_000_000} MB")


