"""The compiled engine is the SimPy model: same events, same figures, for everything that it covers."""

from __future__ import annotations

import os
from dataclasses import fields

import numpy as np
from drawn_cases import Drawn, cases
from hypothesis import given, settings

from simulate.compiled import covers, event_log
from simulate.engine import PromptRun
from simulate.totals import Totals

EXAMPLES = int(os.environ.get("PIPESPEC_TWIN_EXAMPLES", "300"))


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
def test_every_event_is_the_simpy_models(drawn: Drawn):
    """Of a random pipeline, profile and prompt, both engines have the same log, line by line, and the same totals."""
    assert covers(drawn.pipeline, drawn.profile, [drawn.recorded] if drawn.recorded else []) is None
    run = PromptRun(drawn.pipeline, drawn.profile, drawn.agreement, seed=drawn.seed, spread=drawn.spread, log=[])
    expected = Totals.of_runs([run.run()])
    events, totals = event_log(drawn.pipeline, drawn.profile, drawn.recorded or drawn.num_tokens, seed=drawn.seed,
                               spread=drawn.spread)
    assert events == run.log
    for item in fields(Totals):
        np.testing.assert_array_equal(getattr(totals, item.name), getattr(expected, item.name), err_msg=item.name)
