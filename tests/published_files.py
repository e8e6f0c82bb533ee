"""Result files in the published schema, made by our own simulator, so that the importer is tested everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipespec_model.acceptance import Markov
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.latency import Affine, Constant
from pipespec_model.profile import Costs, Profile, StageLatency
from pipespec_model.spec import StageSpec
from simulate.run import simulate
from validate.published.files import BUFFER_TOKENS, STRATEGIES, published_pipeline

SMALL, MEDIUM, LARGE = (
    StageSpec(name=f"Llama-{size}-Instruct", model=f"meta-llama/Llama-{size}-Instruct", device=device, dtype="float16")
    for size, device in (("1B", "cuda:0"), ("8B", "cuda:1"), ("70B", "cuda:2,cuda:3")))
TIMES = {SMALL.name: Affine(0.011, 0.011, 0.0), MEDIUM.name: Affine(0.022, 0.024, 0.0),
         LARGE.name: Affine(0.120, 0.425, 0.0005)}
PREFILL_S = {SMALL.name: 0.012, MEDIUM.name: 0.025, LARGE.name: 0.43}
ROLLBACK_S = {SMALL.name: 0.001, MEDIUM.name: 0.002, LARGE.name: 0.0}
WATTS = {"idle": 60.0, "busy": 150.0}
LABELS = {value: key for key, value in STRATEGIES.items()}


def truth(stages: Sequence[StageSpec] = (SMALL, MEDIUM, LARGE), *, num_prompts: int = 3,
          num_tokens: int = 130) -> list[Agreement]:
    """Choices of the stages along the last one's output; the last token ends it.

    All agree on the first token: a published chain replaces the drafters' own, so no file tells of them.
    """
    names = [stage.choice_key for stage in stages]
    made = [synthetic(names, [Markov(0.94, 0.75), Markov(0.95, 0.8)][: len(stages) - 1], num_tokens=num_tokens + 9 * i,
                      seed=3, prompt=i) for i in range(num_prompts)]
    for agreement in made:
        agreement.tokens[:, 0] = agreement.tokens[-1, 0]
    return [Agreement(a.prompt, 0, a.names, a.tokens, budget=a.num_tokens + BUFFER_TOKENS, eos=(a.num_tokens,))
            for a in made]


def profile() -> Profile:
    return Profile({name: StageLatency(TIMES[name], Constant(PREFILL_S[name])) for name in TIMES},
                   costs={name: Costs(rollback_s=ROLLBACK_S[name]) for name in TIMES}, neighbour_rate=0.8)


def run_data(strategy: str, stages: Sequence[StageSpec], lookahead: int, made: Sequence[Agreement], *,
             label: int | None = None) -> dict[str, Any]:
    """What the published code would have written of a run: ``lookahead`` is its L, ``label`` what it says."""
    names = [stage.choice_key for stage in stages]
    pipeline = published_pipeline(STRATEGIES[strategy], stages, lookahead)
    trace = simulate(pipeline, profile(), [agreement.select(names) for agreement in made])
    results = []
    for prompt in trace.prompts:
        steps = [[s for s in trace.steps if s.prompt == prompt.prompt and s.stage == i and s.kind != "prefill"]
                 for i in range(len(stages))]
        metrics: dict[str, Any] = {"total_time": prompt.total_s, "tokens_generated": len(prompt.tokens),
                                   "time_per_token": prompt.total_s / len(prompt.tokens)}
        if strategy == "greedy":
            metrics["token_times"] = [step.duration_s for step in steps[0]]
        else:
            rounds = [_rounds(found, strategy) if 0 < i < len(stages) - 1 else [[step] for step in found]
                      for i, found in enumerate(steps)]
            if strategy == "async-chain":
                rounds[-1] = rounds[-1][:-1]
            metrics["model_times"] = [[sum(step.duration_s for step in turn) for turn in found] for found in rounds]
            # Past an accepted end of sequence the published chain adds its own token all the same.
            metrics["accepted_tokens"] = [[max(turn[0].emitted, turn[0].accepted + 1) for turn in found]
                                          for found in rounds[1:]]
        busy = {stage.name: sum(step.duration_s for step in found) for stage, found in zip(stages, steps, strict=True)}
        watts = [49.0] * 4
        for stage in stages:
            for gpu in (int(device[-1]) for device in stage.device.split(",")):
                watts[gpu] = WATTS["idle"] + WATTS["busy"] * busy[stage.name] / prompt.total_s
        results.append({"sample_index": prompt.prompt, "strategy": strategy, "metrics": metrics,
                        "gpustats": [{"timestamp": 0.0, "gpu_powers": watts}]})
    configs = [{"path": stage.model, "devices": stage.device.split(","), "dtype": stage.dtype} for stage in stages]
    return {"metadata": {"strategy": strategy, "lookahead": lookahead if label is None else label,
                         "model_configs": configs, "dataset": "made up", "num_samples": len(made)}, "results": results}


def _rounds(steps: Sequence[Any], strategy: str) -> list[list[Any]]:
    """A middle stage's steps; of a chain those of one round together: a verification and what it decoded after."""
    if strategy == "async-chain":
        return [[step] for step in steps]
    out: list[list[Any]] = []
    for step in steps:
        if step.rolled_back or step.kind == "verify" or not out:
            out.append([])
        out[-1].append(step)
    return out


def write_run(folder: Path, strategy: str, stages: Sequence[StageSpec], lookahead: int, made: Sequence[Agreement],
              **more: Any) -> Path:
    """Write a run under the published name for it."""
    names = "-".join(stage.name for stage in stages)
    path = folder / f"{strategy}_{names}_{lookahead}.json"
    path.write_text(json.dumps(run_data(strategy, stages, lookahead, made, **more)), encoding="utf-8")
    return path


def write_folder(folder: Path, made: Sequence[Agreement] | None = None) -> Path:
    """A whole study: every model alone, two or three synchronous files of each pair, four pipelined ones."""
    made = made or truth()
    for stage in (SMALL, MEDIUM, LARGE):
        write_run(folder, "greedy", [stage], 0, made)
    for lookahead in (3, 6, 10):
        write_run(folder, "chain", [SMALL, LARGE], lookahead, made)
    for lookahead in (4, 8):
        write_run(folder, "chain", [MEDIUM, LARGE], lookahead, made)
        write_run(folder, "chain", [SMALL, MEDIUM], lookahead, truth((SMALL, MEDIUM)))
    for lookahead in (1, 6):
        write_run(folder, "async-chain", [SMALL, LARGE], lookahead, made)
    write_run(folder, "async-chain", [MEDIUM, LARGE], 5, made, label=0)
    write_run(folder, "async-chain", [SMALL, MEDIUM, LARGE], 4, made)
    return folder
