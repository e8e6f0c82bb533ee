"""A pair and a chain of three with assumed times, shared by the tests of sweeps, plans and pictures."""

from __future__ import annotations

import json
from pathlib import Path

from pipespec_model.acceptance import IID
from pipespec_model.latency import Affine, Constant
from pipespec_model.profile import Profile, StageLatency, save_profile
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec, dump_pipeline

STAGES = tuple(StageSpec(name=name, model=f"model-{name}", device=f"gpu:{i}")
               for i, name in enumerate(("small", "middle", "large")))
CHAIN = PipelineSpec(stages=STAGES, links=(LinkSpec(lookahead=1), LinkSpec(lookahead=1)))
PAIR = PipelineSpec(stages=(STAGES[0], STAGES[2]), links=(LinkSpec(lookahead=1),))
PROFILE = Profile(
    {"small": StageLatency(Constant(0.01)), "middle": StageLatency(Constant(0.03)),
     "large": StageLatency(Affine(one_s=0.1, base_s=0.1, per_token_s=0.001))},
    {"small>middle": IID(0.8), "middle>large": IID(0.85), "small>large": IID(0.7)}, source="by hand")


def written(folder: Path, spec: PipelineSpec = PAIR) -> list[str]:
    """The pipeline and the profile as files in ``folder``; the arguments that name them."""
    dump_pipeline(spec, folder / "pipeline.yaml")
    save_profile(PROFILE, folder / "profile.json")
    return [str(folder / "pipeline.yaml"), "--profile", str(folder / "profile.json")]


def lines(folder: Path) -> list[dict]:
    """The rows on disk, in the order in which they were written."""
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
