"""Which processes a set of pipelines needs, and how one is started and ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Mapping
from multiprocessing.process import BaseProcess

from pipespec_model.errors import InputError
from pipespec_model.spec import PipelineSpec, StageSpec


def processes_for(pipelines: Mapping[str, PipelineSpec]) -> list[StageSpec]:
    """One process a stage name, whatever its threads and cores, which each pipeline sets anew."""
    found: dict[str, StageSpec] = {}
    for name, spec in pipelines.items():
        for stage in spec.stages:
            first = found.setdefault(stage.name, stage)
            if _loaded(first) != _loaded(stage):
                raise InputError(f"{name}: stage {stage.name!r}", "must be the same in all pipelines",
                                 stage.choice_key, "rename one of the two")
    return list(found.values())


def shared_processes(stages: Iterable[StageSpec]) -> list[list[StageSpec]]:
    """The stages of each process: one, or a model and the layer-skipping drafters that use its weights.

    Raises InputError for such a drafter without its model, or with two of them.
    """
    stages = list(stages)
    groups = {stage.name: [stage] for stage in stages if not stage.clasp}
    for stage in stages:
        if stage.clasp:
            whole = [other.name for other in stages if other.drafter == "model" and other.quantize is None
                     and (other.model, other.dtype, other.device) == (stage.model, stage.dtype, stage.device)]
            if len(whole) != 1:
                raise InputError(f"stage {stage.name!r} with drafter clasp", "must have one stage with the whole model "
                                 "beside it", ", ".join(whole) or "none")
            groups[whole[0]].append(stage)
    return list(groups.values())


def _loaded(stage: StageSpec) -> StageSpec:
    """What of a stage decides what its process loads."""
    device = "cpu" if stage.core is not None else stage.device
    return stage.model_copy(update={"threads": 1, "cores": None, "device": device})


def start(process: BaseProcess) -> None:
    """Ctrl-C reaches the whole process group; a child that starts meanwhile inherits not to mind."""
    if threading.current_thread() is not threading.main_thread():
        process.start()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def end_process(process: BaseProcess) -> None:
    """Wait a little for a process that was told to end, then kill it."""
    if process.pid is None:
        return
    process.join(timeout=2)
    if process.is_alive():
        process.kill()
        process.join()
