"""The output folder of ``execute run``: the resolved pipeline and a trace that grows by a prompt at a time.

A run that was cut short can be taken up: what its trace holds is not generated again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pipespec_model.cli import make_folder
from pipespec_model.errors import InputError
from pipespec_model.spec import PipelineSpec, dump_pipeline
from pipespec_model.trace import Trace, TraceWriter, load_trace

from .prompts import Prompt


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts' tokens and names: a run is taken up with the same ones."""
    return hashlib.sha256(repr([(prompt.name, prompt.tokens) for prompt in prompts]).encode()).hexdigest()


def open_trace(out: Path, spec: PipelineSpec, trace: Trace, *, resume: bool) -> TraceWriter:
    """Begin a trace in ``out``, or with ``resume`` go on with the one there, whose prompts are added to ``trace``.

    spec : the resolved pipeline
    trace : its header; steps of what was kept stay on disk
    Raises InputError where that trace is of another pipeline, of other prompts or options.
    """
    make_folder(out)
    path = out / "trace.jsonl"
    if resume and path.exists() and path.stat().st_size:
        kept, _ = load_trace(path)
        if (kept.pipeline, kept.options) != (trace.pipeline, trace.options):
            raise InputError(str(path), "must be of the same pipeline, prompts and options",
                             mend="give another folder, or leave --resume out")
        trace.prompts = kept.prompts
    else:
        path.unlink(missing_ok=True)
    dump_pipeline(spec, out / "pipeline.yaml")
    return TraceWriter(path, trace)
