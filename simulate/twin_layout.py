"""What the compiled engine keeps in memory: one flat record a pipeline, stage, prompt, case, message.

The names are those of the classes they mirror: ``STAGE`` of ``pipespec_model.protocol.Stage`` and the process that
drives it in ``simulate.engine``, ``MESSAGE`` of ``pipespec_model.messages``.  All fields are 64-bit; truth values are 0
and 1; times are nanoseconds.

Tokens are held as *a prefix of the target's path and a tail off it*: ``path`` counts the leading tokens that are the
target's own, and those behind them lie in a *branch*, a ring of tokens indexed by position.  A branch only ever grows
at its tip, and whoever goes on along it shares it; whoever leaves it copies what lies behind and goes on alone.  So a
message is a few numbers, whatever its length, and so is comparing two of them where both are on one branch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipespec_model.messages import Counters

from .twin_memory import records_at

NEVER = 2**62
COUNTERS = tuple(Counters.__dataclass_fields__)


def _record(integers: str, floats: str = "") -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in floats.split()],
                    align=True)


PLAN = _record("num_stages first_stage chain blocking num_rates rates acceptance spread", "neighbour_rate")
"""A pipeline with its profile.  ``rates``: place in ``numbers`` of the rates of every set of computing stages
(``num_rates`` 0: all 1); ``acceptance``: place of the links' models."""

SPEC = _record("block buffer_tokens lookahead_down lookahead_up max_window "
               "start_ns turnaround_ns handover_ns finish_ns step prefill", "rollback_s turn_rate")
"""What a stage of a plan is.  ``lookahead_up`` and ``max_window`` are its upstream link's, ``buffer_tokens`` and
``lookahead_down`` its downstream link's; ``step`` and ``prefill``: places of latency models in ``numbers``."""

PROMPT = _record("prompt_length budget num_tokens rows eos num_eos", "goes_on_rate")
"""A prompt.  ``rows``: place of its recorded choices in ``rows`` (-1: made up as it goes), ``goes_on_rate`` as in
``Replay``."""

CASE = _record("plan prompt seed number slowness")
"""A run: prompt ``number`` and ``seed`` choose its luck; ``slowness``: place of its stages' in ``numbers``
(-1: all 1)."""

STAGE = _record(
    "length path branch cached rolled_back started exhausted has_turn done "
    # link downstream, link upstream
    "epoch_down known_down booked_down length_down has_request seen_verdict sent_drafts announced "
    "epoch_up acknowledged seen_drafts sent_verdicts upstream_final upstream_length answered "
    # drafts that wait: they continue the sequence, and so does their path
    "num_drafts draft_path draft_branch "
    # the step that runs
    "kind position window limit width context step_rolled_back num_proposed "
    # the process: what it waits for, and that event's place in the order of events
    "mode due priority order ready num_steps busy_ns started_ns usual_ns " + " ".join(COUNTERS),
    "work_left rate")

MESSAGE = _record("due order epoch serial start end path branch flag extra")
"""``Drafts`` (``flag``: final, ``extra``: answers) or ``Verdict`` (``flag``: turn, ``extra``: length or -1)."""

QUEUE = _record("head arrived sent tail")
"""Messages of one direction to one stage: received up to ``head``, arrived up to ``arrived``, …; they never wrap round,
their slots do."""

WORLD = _record(
    # of the plan and the prompt
    "num_stages chain blocking num_rates rates acceptance spread "
    "prompt_length budget num_tokens made_up end_tokens num_eos "
    # the clock
    "now order since in_flight frontier problem num_events first_token_ns computing computed_last "
    # addresses, and the sizes of rings less one
    "stages specs queues messages branches tips runs rows proposal words numbers eos log log_size "
    "slowness ring_mask branch_mask slot_mask row_mask row_stride num_branches",
    "neighbour_rate goes_on_rate")
"""Everything that a run reads or changes, by value or by address:

stages : STAGE ``[stage]``; specs : SPEC ``[stage]``; slowness : ``[stage]``
branches : tokens off the target's path, by position modulo ring ``[branch, ring]``; tips : their ends ``[branch]``
num_branches : made so far; a branch's number modulo their ring is its place
queues : QUEUE ``[direction, receiver]``; messages : MESSAGE ``[direction, receiver, slot]``, the last slot a request
rows : recorded choices ``[stage, position]``, or the ring of made-up ones; ``row_mask`` is all ones or the ring's
runs : of made-up choices, agreements since the last disagreement of each link ``[stage]``
proposal : of a lookup ``[ring]``
words : states of the counter-based generator ``[stage, purpose]``
"""

stage_at, spec_at, queue_at, message_at = map(records_at, (STAGE, SPEC, QUEUE, MESSAGE))
World = Any
"""A WORLD record in compiled code."""

# What a stage's process waits for.
WAIT, WOKEN, READY, COMPUTING, COMPUTED, ENDED = 0, 1, 2, 3, 4, 5
DRAFTS, VERDICTS = 0, 1  # directions
PREFILL, DRAFT, VERIFY, DECODE = 0, 1, 2, 3
EVENTS = ("start prefill", "start draft", "start verify", "start decode", "end", "send up", "send down", "arrive")
END, SEND_UP, SEND_DOWN, ARRIVE = 4, 5, 6, 7
# Problems: a ring too small (run again with larger ones), or a state that the rules exclude.
RING, EXCLUDED = 1, 2
