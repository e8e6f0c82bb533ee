"""What a sweep varies: a dotted path to a field of pipeline or profile, and the values that it takes.

``links.0.lookahead=0..16`` counts, ``links.*.acceptance_rate=0.05..0.95:19`` is 19 evenly spaced numbers,
``handshake=overlapped,blocking`` a list.  ``*`` is every link or stage; a stage may be named.  :data:`FIELDS`
says what can be varied; anything else is refused with the nearest name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import yaml

from pipespec_model.errors import InputError
from pipespec_model.profile import Costs
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec

MOST_VALUES = 1_000_000  # of one range
Value = float | int | str | bool
"""What a field can be set to."""

COST_FIELDS = tuple(item.name for item in fields(Costs))
FIELDS = {
    "strategy": "autoregressive (the target alone), speculative or pipelined",
    "handshake": "overlapped or blocking",
    "depth": "number of stages: the target and those just before it",
    "neighbour_rate": "agreement of neighbours off the target's path",
    **{f"links.*.{name}": "of the pipeline file" for name in LinkSpec.model_fields},
    "links.*.acceptance_rate": "every draft of that pair is accepted with this probability",
    **{f"stages.*.{name}": "of the pipeline file" for name in StageSpec.model_fields if name not in ("name", "cores")},
    "stages.*.latency": "seconds of every step, whatever its width",
    "stages.*.latency_factor": "times the profile's step times",
    "stages.*.contention": "rate of progress while all stages compute",
    **{f"stages.*.{name}": "seconds between steps" for name in COST_FIELDS},
}


@dataclass(frozen=True)
class Axis:
    """One varied field.

    values : what a grid takes
    span : lowest and highest, where any number between them makes sense too (a Latin hypercube's)
    """

    path: str
    values: tuple[Value, ...]
    span: tuple[float, float] | None = None

    @property
    def column(self) -> str:
        """The path as a column's name, seconds marked: ``links.*.lookahead`` → ``links_all_lookahead``."""
        name = self.path.replace("*", "all").replace(".", "_")
        return name + "_s" if name.endswith("_latency") else name


def axis(path: str, values: str | Sequence[Value]) -> Axis:
    """An axis from a text as on the command line, or from the values themselves."""
    if not isinstance(values, str):
        found = tuple(item.item() if isinstance(item, np.generic) else item for item in values)
        _distinct(f"--vary {path}", found)
        return Axis(path, found)
    return Axis(path, *parse_values(f"--vary {path}", values))


def parse_values(option: str, text: str) -> tuple[tuple[Value, ...], tuple[float, float] | None]:
    """The values of a range or a list, and a range's ends where any number between them makes sense."""
    found, span = _range(option, text) if ".." in text else (
        tuple(_scalar(part) for part in text.split(",") if part.strip()), None)
    _distinct(option, found)
    return found, span


def _distinct(option: str, values: Sequence[Value]) -> None:
    if not values:
        raise InputError(option, "must have at least one value")
    if len(set(values)) < len(values):
        raise InputError(option, "must not name a value twice", list(values))


def parse_vary(text: str) -> Axis:
    """``PATH=VALUES``."""
    path, mark, values = text.partition("=")
    if not mark:
        raise InputError("--vary", "must be FIELD=VALUES", text, "e.g. links.0.lookahead=0..16")
    return axis(path.strip(), values.strip())


def axes_of(vary: Mapping[str, str | Sequence[Value]] | Sequence[Axis]) -> tuple[Axis, ...]:
    made = tuple(axis(*item) for item in vary.items()) if isinstance(vary, Mapping) else tuple(vary)
    paths = [item.path for item in made]
    if not made:
        raise InputError("--vary", "must be given at least once", mend="e.g. --vary links.0.lookahead=0..16")
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"--vary {path}", "must be given once")
    return made


def _range(option: str, text: str) -> tuple[tuple[Value, ...], tuple[float, float] | None]:
    ends, _, count = text.partition(":")
    low, high = (_scalar(part) for part in (ends.split("..", 1)))
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, int | float) or not abs(end) < 1e300:
            raise InputError(option, "must have numbers at both ends of a range", text)
    if low > high:  # type: ignore[operator]  # both are numbers, as just checked
        raise InputError(option, "must not be an empty range", text, "write the smaller end first")
    whole = isinstance(low, int) and isinstance(high, int)
    wanted = count.strip() or str(int(high - low) + 1)  # type: ignore[operator]
    if wanted.isdecimal() and int(wanted[:20]) > MOST_VALUES:
        raise InputError(option, f"must have at most {MOST_VALUES:,} values", text)
    if not count:
        if not whole:
            raise InputError(option, "must say how many points", text, f"e.g. {ends}:10")
        return tuple(range(low, high + 1)), None  # type: ignore[arg-type,operator]  # whole numbers
    if not count.strip().isdecimal() or int(count) < 1:
        raise InputError(option, "must have a whole number >= 1 of points", text)
    points = np.linspace(float(low), float(high), int(count))
    if whole and np.array_equal(points, np.rint(points)):
        return tuple(int(x) for x in points), None
    # Twelve digits: a step of 0.05 shall be called so in a table.
    return tuple(float(f"{x:.12g}") for x in points), (float(low), float(high))


def _scalar(text: str) -> Value:
    text = text.strip()
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # also the 99th of a month, and a number of thousands of digits
        value = text
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 takes 1e-3 for a word
        except ValueError:
            return value
    return value if isinstance(value, bool | int | float) else text


def targets(path: str, spec: PipelineSpec) -> tuple[str, tuple[int, ...]]:
    """The field that a path names and the stages or links of ``spec`` that it belongs to.

    Raises InputError with the nearest known field, or with what may stand where the index does.
    """
    head, _, rest = path.partition(".")
    where, _, name = rest.rpartition(".")
    pattern = f"{head}.*.{name}" if head in ("links", "stages") and where else path
    if pattern not in FIELDS:
        raise InputError(f"--vary {path}", "is not a known field", mend=_nearest(pattern, where))
    if head not in ("links", "stages"):
        return path, ()
    names = [stage.name for stage in spec.stages] if head == "stages" else [
        f"{a.name}>{b.name}" for a, b in pairwise(spec.stages)]
    if where == "*" and names:
        return name, tuple(range(len(names)))
    if where in names:
        return name, (names.index(where),)
    if where.isdecimal() and int(where) < len(names):
        return name, (int(where),)
    known = ", ".join([*(str(i) for i in range(len(names))), *names, "*"]) if names else "none: there is one stage"
    raise InputError(f"--vary {path}: {where}", f"must be one of {known}")


def _nearest(pattern: str, where: str) -> str:
    close = difflib.get_close_matches(pattern, FIELDS, n=1, cutoff=0.5)
    if not close:
        return f"known are {', '.join(FIELDS)}"
    return f"did you mean {close[0].replace('*', where or '*')}?"
