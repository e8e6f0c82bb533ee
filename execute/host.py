"""This machine: its cores, who gets which, and what a report says of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipespec_model.errors import InputError
from pipespec_model.spec import PipelineSpec, StageSpec


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def assign_cores(pipeline: PipelineSpec, *, scripted: bool, cores: Sequence[int] | None = None,
                 ) -> list[tuple[int, ...]]:
    """Cores of each stage, out of ``cores`` (None: this machine's).

    In a pipeline stages that compute get cores of their own, target first, unless they name one, which
    they may share; a chain's stages take
    turns and share them; lookups and scripted stages hardly compute and float.  Raises InputError
    where the threads do not fit.
    """
    cores = available_cores() if cores is None else list(cores)
    stages = [on_core(stage) for stage in pipeline.stages]
    computing = [] if scripted else [s for s in stages if not s.block and s.device.startswith("cpu")]
    for stage in stages:
        if stage.threads > len(cores):
            raise InputError(f"stages[{stage.name}].threads", f"must be <= the {len(cores)} cores here", stage.threads)
        missing = set(stage.cores or ()) - set(cores)
        if stage.cores is not None and stage.threads > len(stage.cores):
            raise InputError(f"stages[{stage.name}].threads", f"must be <= the {len(stage.cores)} cores that it names",
                             stage.threads)
        if missing:
            raise InputError(f"stages[{stage.name}].cores", f"must be among {cores}", list(stage.cores or ()))
    together = pipeline.strategy == "pipelined"
    wanted = sum(stage.threads for stage in computing if stage.cores is None)
    placed: dict[str, tuple[int, ...]] = {}
    pinned = {core for stage in computing for core in stage.cores or ()} if together else set()
    free = [core for core in cores if core not in pinned]
    if together and wanted > len(free):
        raise InputError("threads", f"of the stages that compute together must sum to <= {len(free)} cores", wanted)
    for stage in reversed(computing):
        if stage.cores is not None:
            placed[stage.name] = stage.cores
            continue
        placed[stage.name] = tuple(free[: stage.threads])
        if together:
            free = free[stage.threads :]
    return [placed.get(stage.name, tuple(cores)) for stage in stages]


def place(pipeline: PipelineSpec, *, scripted: bool = False, cores: Sequence[int] | None = None) -> PipelineSpec:
    """The pipeline with every stage's cores filled in."""
    stages = (stage.model_copy(update={"cores": where})
              for stage, where in zip(pipeline.stages, assign_cores(pipeline, scripted=scripted, cores=cores),
                                      strict=True))
    return pipeline.model_copy(update={"stages": tuple(stages)})


def on_core(stage: StageSpec) -> StageSpec:
    """``device: cpu:1`` as ``cores: [1]``."""
    return stage if stage.core is None else stage.model_copy(update={"cores": (stage.core,)})


def host() -> dict[str, Any]:
    """What a report says of this machine."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": model, "cores": len(available_cores()), "system": platform.system(),
            "machine": platform.machine(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    found = {}
    for name in ("pipespec", "torch", "transformers", "numpy", "simpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
