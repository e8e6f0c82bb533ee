"""Which stage computes on which core."""

from __future__ import annotations

import pytest

from execute import host
from pipespec_model.errors import InputError
from pipespec_model.spec import PipelineSpec


def pipeline(*stages: dict, strategy: str = "pipelined") -> PipelineSpec:
    links = [{"lookahead": 1}] * (len(stages) - 1)
    named = [{"name": f"s{i}", "model": f"m{i}", **stage} for i, stage in enumerate(stages)]
    return PipelineSpec.from_dict({"strategy": strategy, "stages": named, "links": links})


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_cores", lambda: [0, 1])


def test_stages_that_compute_together_get_cores_of_their_own() -> None:
    """The target is placed first; a lookup hardly computes and floats."""
    placed = host.assign_cores(pipeline({"drafter": "prompt-lookup"}, {}, {}), scripted=False)
    assert placed == [(0, 1), (1,), (0,)]


def test_a_chain_takes_turns_on_the_same_cores() -> None:
    """Stages of a synchronous chain may each use every core."""
    placed = host.assign_cores(pipeline({"threads": 2}, {"threads": 2}, strategy="speculative"), scripted=False)
    assert placed == [(0, 1), (0, 1)]


def test_nobody_is_placed_on_a_core_that_is_pinned() -> None:
    """A drafter pinned to core 0 leaves core 1 to the target."""
    assert host.assign_cores(pipeline({"cores": [0]}, {}), scripted=False) == [(0,), (1,)]


@pytest.mark.parametrize(("stages", "words"), [
    (({"threads": 3}, {}), r"stages\[s0\].threads must be <= the 2 cores here, got 3"),
    (({"threads": 2}, {}), "must sum to <= 2 cores, got 3"),
    (({"cores": [0]}, {"threads": 2}), "must sum to <= 1 cores, got 2"),
    (({"cores": [7]}, {}), r"stages\[s0\].cores must be among \[0, 1\], got \[7\]"),
])
def test_what_does_not_fit_is_refused(stages: tuple[dict, ...], words: str) -> None:
    """More threads than cores, and cores that are not there, name stage, rule and value."""
    with pytest.raises(InputError, match=words):
        host.assign_cores(pipeline(*stages), scripted=False)


def test_scripted_stages_hold_no_core() -> None:
    """Five scripted stages fit on two cores: they sleep."""
    assert host.assign_cores(pipeline({}, {}, {}, {}, {}), scripted=True) == [(0, 1)] * 5
