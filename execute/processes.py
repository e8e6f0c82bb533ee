"""Which processes a set of pipelines needs, and how one is started and ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterable, Mapping
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


def stages_apart(pipelines: Iterable[PipelineSpec]) -> frozenset[str]:
    """Names of the layer-skipping drafters that need a process of their own: those of pipelines.

    Raises InputError for one that works in a chain too.
    """
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for spec in pipelines:
        for stage in spec.stages[:-1]:
            if stage.clasp:
                found[spec.strategy == "pipelined"].add(stage.name)
    for name in found[True] & found[False]:
        raise InputError(f"stage {name!r} with drafter clasp", "must be pipelined in all pipelines or in none", name,
                         "rename one of the two")
    return frozenset(found[True])


def shared_processes(stages: Iterable[StageSpec], apart: Collection[str] = ()) -> list[list[StageSpec]]:
    """The stages of each process: one, or a model and the layer-skipping drafters that use its weights.

    apart : names of such drafters that have a process and weights of their own
    Raises InputError for one without its model, or that shares a process with two of them.
    """
    stages = list(stages)
    groups = {stage.name: [stage] for stage in stages if not stage.clasp or stage.name in apart}
    for stage in stages:
        if stage.clasp:
            whole = whole_models(stage, stages)
            if stage.name in apart and whole:
                continue
            whole = [name for name in whole if groups[name][0].device == stage.device]
            if len(whole) != 1:
                raise InputError(f"stage {stage.name!r} with drafter clasp", "must have one stage with the whole model "
                                 "beside it", ", ".join(whole) or "none")
            groups[whole[0]].append(stage)
    return list(groups.values())


def whole_models(drafter: StageSpec, stages: Iterable[StageSpec]) -> list[str]:
    """Names of the stages that a layer-skipping drafter can draft for."""
    return [stage.name for stage in stages if stage.drafter == "model" and stage.quantize is None
            and (stage.model, stage.dtype) == (drafter.model, drafter.dtype)]


def _loaded(stage: StageSpec) -> StageSpec:
    """What of a stage decides what its process loads."""
    device = "cpu" if stage.core is not None else stage.device
    return stage.model_copy(update={"threads": 1, "cores": None, "device": device})


def start(process: BaseProcess, *, deaf_to: Collection[signal.Signals] = (signal.SIGINT,)) -> None:
    """Ctrl-C reaches the whole process group; a child that starts meanwhile inherits not to mind."""
    if threading.current_thread() is not threading.main_thread():
        process.start()
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in deaf_to}
    try:
        process.start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_process(process: BaseProcess, *, now: bool = False) -> None:
    """Wait a little for a process that was told to end, or not at all, then kill it."""
    if process.pid is None:
        return
    process.join(timeout=0 if now else 2)
    if process.is_alive():
        process.kill()
        process.join()
