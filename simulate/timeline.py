"""A trace as a picture: a drawn timeline, and Chrome-trace JSON that opens in Perfetto.

The same for simulated and measured traces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipespec_model.errors import InputError
from pipespec_model.trace import StepRecord, Trace

# Okabe-Ito colours: told apart by colour-blind readers and in grey.
COLOURS = {"prefill": "#999999", "draft": "#56B4E9", "decode": "#E69F00", "verify": "#009E73",
           "optimise": "#CC79A7", "give": "#000000", "take": "#000000"}
WORDS = {"prefill": "prefill", "draft": "draft", "decode": "plain step", "verify": "verify drafts",
         "optimise": "choose layers", "give": "hand over entries", "take": "take entries"}


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Chrome-trace events: a span a step (process = device, thread = stage), an instant a rollback.

    Prompts follow each other on one time axis.  Times are microseconds.
    """
    stages = trace.pipeline["stages"]
    devices = sorted({stage["device"] for stage in stages})
    events: list[dict[str, Any]] = []
    for i, stage in enumerate(stages):
        pid = devices.index(stage["device"])
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": stage["device"]}})
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": i, "args": {"name": stage["name"]}})
    offset = 0.0
    for prompt in trace.prompts:
        for step in (s for s in trace.steps if s.prompt == prompt.prompt and s.start_s is not None):
            pid = devices.index(stages[step.stage]["device"])
            at = round((offset + (step.start_s or 0.0)) * 1e6, 3)
            events.append({
                "ph": "X", "name": step.kind, "cat": trace.origin, "pid": pid, "tid": step.stage, "ts": at,
                "dur": round(step.duration_s * 1e6, 3),
                "args": {"prompt": prompt.name, "position": step.position, "width": step.width,
                         "accepted": step.accepted, "emitted": step.emitted, "epoch": step.epoch}})
            if step.rolled_back:
                events.append({"ph": "i", "name": "rollback", "s": "t", "pid": pid, "tid": step.stage, "ts": at})
        offset += prompt.total_s
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin": trace.origin}}


def save_chrome_trace(trace: Trace, path: str | Path) -> None:
    Path(path).write_text(json.dumps(chrome_trace(trace)), encoding="utf-8")


def draw(axes: Any, trace: Trace, *, prompt: int, until_s: float) -> None:
    """Draw one prompt's steps up to ``until_s`` on matplotlib axes, target at the top."""
    stages = trace.pipeline["stages"]
    seen: set[str] = set()
    for step in (s for s in trace.steps if s.prompt == prompt and s.start_s is not None):
        start = step.start_s or 0.0
        if start >= until_s:
            continue
        label = None if step.kind in seen else WORDS.get(step.kind, step.kind)
        seen.add(step.kind)
        axes.barh(step.stage, min(step.duration_s, until_s - start) * 1e3, left=start * 1e3, height=0.72,
                  color=COLOURS.get(step.kind, "#CCCCCC"), edgecolor="white", linewidth=0.6, label=label)
        if step.stage == len(stages) - 1 and step.emitted and step.duration_s > 0.012 * until_s:
            axes.text((start + step.duration_s / 2) * 1e3, step.stage, str(step.emitted), ha="center",
                      va="center", fontsize=7, color="white", clip_on=True)
        if step.rolled_back:
            axes.plot(start * 1e3, step.stage - 0.46, marker="^", color="#D55E00", markersize=5, clip_on=True,
                      label=None if "rollback" in seen else "after a rollback")
            seen.add("rollback")
    axes.set_yticks(range(len(stages)), [stage["name"] for stage in stages])
    axes.set_ylim(-0.7, len(stages) - 0.4)
    axes.set_xlim(0, until_s * 1e3)
    axes.spines[["top", "right"]].set_visible(False)


def save_timeline(traces: Sequence[Trace], path: str | Path, *, prompt: int = 0, num_tokens: int = 16) -> None:
    """One panel a trace, one time axis: the first ``num_tokens`` tokens of the ``prompt``-th prompt."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(traces), 1, figsize=(9, 0.9 + 1.5 * len(traces)), sharex=True, squeeze=False)
    spans = []
    for trace in traces:
        if not 0 <= prompt < len(trace.prompts):
            raise InputError("prompt", f"must be in [0, {len(trace.prompts) - 1}]", prompt)
        spans.append(span_s(trace, trace.prompts[prompt].prompt, num_tokens))
    for axes, trace in zip(panels[:, 0], traces, strict=True):
        draw(axes, trace, prompt=trace.prompts[prompt].prompt, until_s=max(spans))
        axes.set_title(trace.origin, loc="left", fontsize=9)
    panels[-1, 0].set_xlabel("milliseconds since the request (numbers: tokens that a target step emitted)")
    handles: dict[str, Any] = {}
    for axes in panels[:, 0]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="upper right", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def span_s(trace: Trace, prompt: int, num_tokens: int) -> float:
    """When the target held ``num_tokens`` tokens (or ended)."""
    target = len(trace.pipeline["stages"]) - 1
    steps: list[StepRecord] = [s for s in trace.steps if s.prompt == prompt and s.stage == target]
    for step in steps:
        if step.position + step.emitted >= num_tokens:
            return (step.start_s or 0.0) + step.duration_s
    return max(((s.start_s or 0.0) + s.duration_s for s in steps), default=1e-3)
