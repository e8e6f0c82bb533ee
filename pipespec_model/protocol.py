"""The rules of one stage, without time and without a model.

The simulator and the executor both drive this state machine: a driver hands it messages, asks it
for the next step, runs that step (in simulated or in real time) and tells it the tokens that came
out.  One class serves every position: a drafter has no upstream, a target no downstream.

Both kinds of message are *snapshots* of everything the receiver has not yet acknowledged, so a
message that is lost, doubled or overtaken can delay a stage but never mislead it:

* ``Drafts`` go downstream: what the sender holds beyond the last verdict that it knows.
* ``Verdict`` goes upstream: the sender's own tokens from the position the receiver has acknowledged.

A rejection or a rollback raises the link's epoch; a receiver drops and counts older messages.
A fully accepted window raises nothing: its bonus token travels upstream, and a drafter that had
already drafted past it keeps what agrees.  Whoever compares, compares tokens.

That is the ``overlapped`` handshake.  With ``blocking``, the published implementation's, a verdict in a
pipeline is also a *request*: its sender waits for the drafts that answer it, a receiver answers between
steps (a middle stage asks its own upstream before it goes on), and whoever finds no difference changes
nothing, even when the downstream is longer; so a bonus token is drafted again, perhaps wrongly.  In a
chain, ``blocking`` means that last rule, a first round of prefills alone, and that all stages hear of a
round from the target: a draft that the middle stage refused may stand.  No published drafter stops at the
end of sequence.  Where a published stage could go on for ever with nothing to offer (no lookup match),
ours takes the longer sequence and says *final*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .lookup import PromptLookup
from .messages import Counters, Drafts, Step, Verdict
from .spec import PipelineSpec


@dataclass(slots=True)
class Stage:
    """Stage ``index`` of ``pipeline`` while it generates for one prompt.

    ``sequence`` starts empty; the target's is the answer.  Driver's loop::

        while not stage.done:
            for message in arrived: stage.receive(message)
            step = stage.next_step()
            send(stage.take_outbox())
            if step is None: wait for a message
            else: stage.finish(step, tokens that came out)
    """

    pipeline: PipelineSpec
    index: int
    prompt_length: int
    budget: int
    eos: frozenset[int] = frozenset()
    prompt: tuple[int, ...] = ()  # its tokens; a hybrid looks them up
    ends: Callable[[int], bool] | None = None  # a target's: whether the text ends with a token, beside ``eos``
    sequence: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    counters: Counters = field(default_factory=Counters)
    done: bool = False

    # What the stage is: asked at every step, so not worked out anew.
    is_drafter: bool = field(init=False)
    is_target: bool = field(init=False)
    has_upstream: bool = field(init=False)
    synchronous: bool = field(init=False)
    blocking: bool = field(init=False)
    requesting: bool = field(init=False)  # whether a verdict waits for its answer
    _block: bool = field(init=False)

    cached: int = 0
    _rolled_back: bool = False
    _started: bool = False
    _exhausted: bool = False
    _has_turn: bool = True
    # Link downstream: what the downstream is known to have decided.
    _epoch_down: int = 0
    _known_down: int = 0  # up to here both hold the same
    _booked_down: int = 0  # up to here the counters tell what became of the drafts
    _length_down: int = 0
    _request: Verdict | None = None
    _seen_verdict: int = 0
    _sent_drafts: int = 0
    _announced: bool = False
    # Link upstream.
    _epoch_up: int = 0
    _acknowledged: int = 0
    _seen_drafts: int = 0
    _sent_verdicts: int = 0
    _upstream_final: bool = False
    _upstream_length: int = 0
    _answered: int = 0
    _outbox_up: list[Verdict] = field(default_factory=list)
    _outbox_down: Drafts | None = None
    _lookup: PromptLookup | None = None

    def __post_init__(self) -> None:
        self.is_target = self.index == len(self.pipeline.stages) - 1
        self.is_drafter = self.index == 0 and not self.is_target
        self.has_upstream = self.index > 0
        self.synchronous = self.pipeline.strategy == "speculative"
        self.blocking = self.pipeline.handshake == "blocking"
        self.requesting = self.blocking and not self.synchronous
        self._has_turn = self.index == 0 or not self.synchronous
        # Blocking: of the downstream's own first token no request will tell.
        self._length_down = int(self.requesting)
        if self.blocking and not self.is_target:
            self.eos = frozenset()
        spec = self.pipeline.stages[self.index]
        self._block = spec.block
        if spec.hybrid and self.prompt:
            # Only long matches: on a short one the model is right more often.
            self._lookup = PromptLookup(spec.max_ngram, spec.max_ngram)
            self._lookup.begin(self.prompt)
        self.done = self.budget <= 0

    # -- what the stage is ------------------------------------------------------------------

    @property
    def num_verdicts(self) -> int:
        """Serial of the newest verdict that was booked; it changes when a chain's next round begins."""
        return self._seen_verdict

    @property
    def _prefill_round(self) -> bool:
        """A published chain begins with a round of one token a stage, which the target's replaces."""
        return self.blocking and self.synchronous and not self._seen_verdict

    # -- what to do next --------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """The step to run now, or None: wait for a message."""
        if self.requesting and not self._handshake():
            return None
        if self.done or not self._has_turn or self._cannot_go_on():
            self._announce_if_stuck()
            return None
        room = self._room()
        if room < 1 or (self.has_upstream and not self._enough_drafts()):
            return None
        window: tuple[int, ...] = ()
        alone = self._decodes_plainly() or (self.blocking and not self._started)
        if self.has_upstream and not alone:
            window = self.drafts[: min(room - 1, self.pipeline.links[self.index - 1].max_window)]
        held = self.prompt_length + len(self.sequence)
        epoch = self._epoch_up if self.has_upstream else self._epoch_down
        if self._lookup and self._started and (found := self._lookup.propose(self.sequence, room)):
            return Step("lookup", len(self.sequence), self.cached, 0, (), len(found), epoch, False, tuple(found))
        if self._block:
            kind = "draft"
        elif not self._started:
            kind = "prefill"
        else:
            kind = "draft" if self.is_drafter else "verify" if window else "decode"
        return Step(
            kind=kind, position=len(self.sequence), cached=self.cached,
            width=0 if self._block else held - self.cached + len(window),
            drafts=window, limit=room if self._block else 1, epoch=epoch, rolled_back=self._rolled_back,
        )

    def _handshake(self) -> bool:
        """Answer the request that waits; returns whether this stage waits for no answer itself."""
        if self.done or self._answered < self._sent_verdicts:
            return self.done
        request, self._request = self._request, None
        if request is None:
            return True
        self._reconcile(request)
        self._offer(final=False)
        if self.has_upstream:
            self._tell_upstream(turn=True)
        return not self.has_upstream

    def _room(self) -> int:
        """Tokens that one more step may add: token budget, buffer and, in turn, the lookahead."""
        room = self.budget - len(self.sequence)
        if self.is_target:
            return room
        link = self.pipeline.links[self.index]
        ahead = len(self.sequence) - self._length_down
        allowed = link.buffer_tokens
        if self.synchronous and (self.is_drafter or self._decodes_plainly()):
            allowed = 1 if self._prefill_round else link.lookahead
        # The last token of the budget is always the target's own.
        return min(room - 1, allowed - ahead)

    def _enough_drafts(self) -> bool:
        if self.synchronous:
            return self._batch_waits() or self._decodes_plainly()
        if not self._started or self._batch_waits():
            return True
        wanted = self.pipeline.links[self.index - 1].lookahead
        # Near the end of the budget a full window cannot be used, so none is waited for.
        wanted = min(wanted, max(self.budget - 1 - len(self.sequence), 0))
        # Blocking counts what upstream holds, whether or not it continues this stage's tokens.
        ahead = self._upstream_length - len(self.sequence) if self.blocking else len(self.drafts)
        return ahead >= wanted

    def _batch_waits(self) -> bool:
        """Upstream said *final* about exactly what this stage holds (blocking: it was asked)."""
        return self._upstream_final and (self.blocking or self._acknowledged == len(self.sequence))

    def _decodes_plainly(self) -> bool:
        """A middle stage of a chain that has verified this round's batch goes on alone."""
        return self.synchronous and self.has_upstream and self._has_turn and not self._upstream_final

    def _cannot_go_on(self) -> bool:
        if self.is_target:
            return False
        ended = bool(self.sequence) and self.sequence[-1] in self.eos
        full = len(self.sequence) >= self.budget - 1
        # In a chain, having no room ends the stage's part of the round; in a pipeline it waits.
        return ended or full or self._exhausted or (self.synchronous and self._room() < 1)

    def _announce_if_stuck(self) -> None:
        """Tell a waiting verifier, once per state, that no more drafts will come."""
        if self.done or self.is_target or not self._has_turn or self._announced or not self._cannot_go_on():
            return
        self._announced = True
        self._offer(final=True)
        if self.synchronous:
            self._has_turn = False

    # -- what came of a step ------------------------------------------------------------------

    def finish(self, step: Step, choices: Sequence[int]) -> int:
        """Book a finished step; returns the number of accepted drafts.

        choices : for a draft step the proposed tokens (perhaps none); otherwise the stage's greedy
            choice after the last held token and after each draft, ``len(step.drafts) + 1`` of them.
        """
        first, self._started = not self._started, True
        self._rolled_back = self._rolled_back and step.kind == "lookup"
        self.counters.steps += 1
        if self.is_drafter:
            return self._finish_draft(step, choices)
        drafts = step.drafts
        accepted = 0
        ended = False
        while not ended and accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            ended = self._ends(drafts[accepted])
            accepted += 1
        emitted = list(drafts[:accepted]) if ended else [*drafts[:accepted], choices[accepted]]
        rejected = not ended and accepted < len(drafts)
        self.cached = self.prompt_length + len(self.sequence) + accepted
        self.sequence += emitted
        count = self.counters
        count.proposed += accepted if ended else len(drafts)  # what lies past the end is nobody's
        count.accepted += accepted
        count.rejected += rejected
        count.emitted += len(emitted)
        count.drafted += 0 if self.is_target else len(emitted)
        self._announced = False
        if self.has_upstream:
            waiting = self.drafts
            self.drafts = () if rejected else self._beyond(waiting, emitted)
            self._epoch_up += rejected
            if self.synchronous:
                self._upstream_final = False
        if self.is_target:
            self.done = ended or self._ends(emitted[-1]) or len(self.sequence) >= self.budget
        if self.has_upstream:
            # Blocking: after prefill both first tokens are simply there, and may differ; and in a
            # chain only the target speaks.
            if not (first if self.requesting else self.blocking and not self.is_target):
                self._tell_upstream(turn=self.is_target or not self.synchronous)
            if self.is_target and self.synchronous:
                self._has_turn = False
        if not self.is_target and not self.synchronous:
            self._offer(final=False)
        return accepted

    def _ends(self, token: int) -> bool:
        """Whether the text ends with a token that this stage commits to; asked once of each, in order."""
        return token in self.eos or (self.ends is not None and self.ends(token))

    def _finish_draft(self, step: Step, tokens: Sequence[int]) -> int:
        kept = list(tokens[: step.limit])
        for i, token in enumerate(kept):
            if token in self.eos:
                kept = kept[: i + 1]
                break
        if step.width:
            self.cached = self.prompt_length + len(self.sequence)
        self.sequence += kept
        self._exhausted = len(kept) < step.limit and not (kept and kept[-1] in self.eos)
        self._announced = False
        self.counters.drafted += len(kept)
        self.counters.emitted += len(kept)
        if kept and not self.synchronous:
            self._offer(final=False)
        return 0

    @staticmethod
    def _beyond(drafts: tuple[int, ...], tokens: Sequence[int]) -> tuple[int, ...]:
        """What of ``drafts`` lies beyond ``tokens``, provided that it continues them."""
        n = len(tokens)
        return drafts[n:] if drafts[:n] == tuple(tokens) else ()

    # -- messages -------------------------------------------------------------------------------

    def receive(self, message: Drafts | Verdict) -> None:
        """Book a message; stale ones are counted and change nothing."""
        if self.done:
            return
        if isinstance(message, Drafts):
            self._on_drafts(message)
        else:
            self._on_verdict(message)

    def _on_drafts(self, message: Drafts) -> None:
        if message.epoch < self._epoch_up or message.serial <= self._seen_drafts:
            self.counters.stale += 1
            return
        self._seen_drafts = message.serial
        self._acknowledged = message.start
        self._upstream_length = message.start + len(message.tokens)
        self._answered = message.answers
        self.drafts = self._beyond(message.tokens, self.sequence[message.start :])
        self._upstream_final = message.final
        if self.synchronous and message.final:
            self._has_turn = True

    def _on_verdict(self, message: Verdict) -> None:
        if message.serial <= max(self._seen_verdict, self._request.serial if self._request else 0):
            self.counters.stale += 1
        elif self.requesting:
            if self._request is not None:  # only after the end: a stage asks once, then waits
                self._reconcile(self._request)
            self._request = message
        else:
            self._reconcile(message)

    def _reconcile(self, message: Verdict) -> None:
        """Take over what the downstream decided, from the first difference."""
        self._seen_verdict = message.serial
        self._epoch_down = message.epoch
        end = message.start + len(message.tokens)
        held = self.sequence[message.start : end]
        same = 0
        while same < len(held) and held[same] == message.tokens[same]:
            same += 1
        first = message.start + same
        known = self._booked_down
        self._length_down = end if message.length is None else message.length
        if self.blocking and first == len(self.sequence) and not self._exhausted:
            end = first  # no difference as far as this stage goes
        # A downstream that was itself rolled back may hold less than before, and agree: booked is booked.
        self._booked_down = end if first < end else max(end, known)
        self._known_down = min(end, self._length_down)
        if first < end:
            self._adopt(first, message.tokens[same:], known)
        else:
            self.counters.kept += max(0, end - known)
        if self.synchronous and message.turn:
            if self.has_upstream:
                decided = [*self.sequence[: message.start], *message.tokens]
                self._tell_upstream(turn=True, decided=decided if self.blocking else None)
            else:
                self._has_turn = True
        self._announced = False

    def _adopt(self, first: int, tokens: tuple[int, ...], known: int) -> None:
        """Replace everything from position ``first`` by the downstream's tokens."""
        cut = len(self.sequence) - first
        self.counters.kept += max(0, first - known)
        self.counters.cut += len(self.sequence) - max(first, known) if cut else 0
        self._exhausted = False
        if cut:
            del self.sequence[first:]
            self._rolled_back = self.cached > self.prompt_length + first
            self.cached = min(self.cached, self.prompt_length + first)
        self.sequence += tokens
        if not self.has_upstream:
            return
        self.drafts = () if cut else self._beyond(self.drafts, tokens)
        if cut:
            self._epoch_up += 1
            self._acknowledged = min(self._acknowledged, first)
        if not self.blocking:
            self._tell_upstream(turn=not self.synchronous)

    def _tell_upstream(self, *, turn: bool, decided: list[int] | None = None) -> None:
        """Say what this stage holds, or pass on what the target ``decided``, perhaps more."""
        start = min(self._acknowledged, len(self.sequence))
        self._sent_verdicts += 1
        tokens = tuple((self.sequence if decided is None else decided)[start:])
        length = None if decided is None else len(self.sequence)
        self._outbox_up.append(Verdict(self._epoch_up, self._sent_verdicts, start, tokens, turn, length))

    def _offer(self, *, final: bool) -> None:
        self._sent_drafts += 1
        start = self._known_down
        self._outbox_down = Drafts(
            self._epoch_down, self._sent_drafts, start, tuple(self.sequence[start:]), final, self._seen_verdict
        )

    def take_outbox(self) -> tuple[list[Verdict], Drafts | None]:
        """Messages to send now: all verdicts upstream, only the newest drafts downstream."""
        up, down = self._outbox_up, self._outbox_down
        self._outbox_up, self._outbox_down = [], None
        return up, down

    def settle(self) -> None:
        """After the end: book the request that waits, and pass it on."""
        if self._request is not None:
            request, self._request = self._request, None
            self._reconcile(request)
            if self.has_upstream:
                self._tell_upstream(turn=True)

    def close(self) -> Counters:
        """The counters, once the prompt has ended and every message has been received."""
        if not self.is_target:
            self.counters.undecided = max(0, len(self.sequence) - self._booked_down)
        return self.counters
