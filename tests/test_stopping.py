"""Stop strings: one text however it is cut into tokens and whoever drafted them, and no character taken back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import STRATEGIES, chain, drive, replays, rows_of, table
from hypothesis import given, settings
from hypothesis import strategies as st

from execute.fleet import Fleet
from execute.prompts import Prompt
from execute.reading import Detokeniser
from execute.retry import run_with_retries
from execute.scripted import Script
from execute.stopping import Stops
from execute.streaming import TextStream, text_of
from pipespec_model.errors import InputError, StageError
from pipespec_model.latency import Constant
from pipespec_model.sampling import Sampling

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def before_first(text: str, strings: Sequence[str]) -> tuple[str, bool]:
    """By definition: the shortest beginning of ``text`` that ends with a stop string, without the longest such."""
    for end in range(len(text) + 1):
        found = [s for s in strings if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@dataclass(frozen=True)
class Bytes:
    """A reader whose tokens are indices into pieces of UTF-8, cut anywhere."""

    pieces: tuple[bytes, ...]

    def __call__(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


@st.composite
def texts_in_pieces(draw: st.DrawFn) -> tuple[str, tuple[bytes, ...]]:
    """Text over few letters, so that stop strings occur and overlap, and its bytes cut into tokens."""
    text = draw(st.text("ab.é€😀", max_size=14))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)))) | {0, len(data)})
    return text, tuple(data[a:b] for a, b in pairwise(cuts))


STRINGS = st.lists(st.text("ab.é€😀", min_size=1, max_size=4), max_size=3)


@QUICK
@given(texts_in_pieces(), STRINGS, st.integers(1, 4))
def test_any_tokens_and_any_strings(cut: tuple[str, tuple[bytes, ...]], strings: list[str], block: int) -> None:
    """Whatever the tokens, the blocks and the strings: all that is shown is the text before the first string, every
    moment shows a beginning of it, and the run stops at the token that completes the string and at no other."""
    text, pieces = cut
    wanted, stops = before_first(text, strings)
    read = Bytes(pieces)
    stream, shown, tokens = TextStream(read, strings), "", list(range(len(pieces)))
    for start in range(0, len(tokens), block):
        shown += stream.add(tokens[start : start + block])
        assert wanted.startswith(shown)
    assert shown + stream.end() == text_of(read, tokens, strings) == wanted
    ends = Stops(tuple(strings), read).ends()
    first = next((token for token in tokens if ends(token)), None)
    whole = [b"".join(pieces[: token + 1]).decode("utf-8", "ignore") for token in tokens]
    assert first == next((token for token in tokens if before_first(whole[token], strings)[1]), None)
    assert (first is not None) == stops


@QUICK
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=8))
def test_bytes_that_are_no_text(pieces: list[bytes]) -> None:
    """Of bytes that are no UTF-8 the stream shows what decoding all of them at once gives, and takes nothing back."""
    read = Bytes(tuple(pieces))
    one = Detokeniser(read)
    assert "".join(one.add(token) for token in range(len(pieces))) + one.end() == read(range(len(pieces)))


def test_what_may_still_be_retracted_is_held_back() -> None:
    """Letter by letter: the longest end that a stop string begins with waits, and so does half a character; at the
    end of the run both are shown."""
    stream = TextStream(Bytes((b"x", b"E", b"N", b"E", b"N", b"y", "é".encode()[:1], "é".encode()[1:], b"E")), ("END",))
    assert [stream.add([token]) for token in range(9)] == ["x", "", "", "EN", "", "ENy", "", "é", ""]
    assert stream.end() == "E"
    cut = TextStream(Bytes((b"ab", b"cEN", b"Dde")), ("END", "zz"))
    assert [cut.add([token]) for token in (0, 1, 2)] == ["ab", "c", ""]
    assert cut.end() == ""


def test_an_empty_stop_string_is_refused() -> None:
    """Nothing would come before it."""
    with pytest.raises(InputError, match="stop must not be empty text"):
        Stops(("a", ""), Bytes(()))


# -- every strategy, with replayed tokens -----------------------------------------------------------------

ANSWER = list(range(100, 140))


@dataclass(frozen=True)
class Alphabet:
    """Token 100 + i is the letters i and i + 1 of a text without repetition: strings span tokens."""

    def __call__(self, tokens: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + 2 * t) + chr(0x4E01 + 2 * t) for t in tokens)


READ = Alphabet()
EOS = (117, 131)


def spanning(position: int) -> str:
    """Complete with the token at ``position``; it began two tokens earlier."""
    return READ(ANSWER[position - 2 : position + 1])[1:-1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [("1",), ("110",), ("0",), ("1110100", "11")], ids=str)
def test_every_strategy_stops_at_the_same_token(strategy: str, rows: tuple[str, ...]) -> None:
    """Wherever in a block a string is complete (in accepted drafts, at the bonus token, after a rejection), behind
    several end-of-sequence ids or past the budget: the answer ends at the earliest of them, the same for all; and all
    drafts are accounted for."""
    stages, agreement = table(rows_of(ANSWER, *rows))
    for at in (2, 3, 4, 5, 6, 7, 12, 17, 18, 30):
        for budget in (5, 40):
            ends = Stops((spanning(at), "never"), READ).ends()
            done = drive(chain(strategy, stages), replays(agreement), (1, 2, 3), budget, eos=EOS, ends=ends,
                         rng=np.random.default_rng(at))
            length = min(at + 1, ANSWER.index(EOS[0]) + 1, budget)
            assert done.tokens == ANSWER[:length], (at, budget)
            assert sum(link["emitted"] for link in done.counters[-1:]) == length
            assert all(link.conserved for link in done.links())


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    stages, _ = table(rows_of(ANSWER, "1", "1"))
    with Fleet(stages, scripts={s.name: Script(Constant(0.001)) for s in stages}) as running:
        yield running


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_stop_and_stream_alike(fleet: Fleet, strategy: str) -> None:
    """Three processes: the streamed text is the text before the string, at each moment a beginning of it, no token
    comes after the one that completes it, and the next prompt knows nothing of the string."""
    stages, agreement = table(rows_of(ANSWER, "110", "1110"))
    wanted = {"max_new_tokens": 30, "agreement": agreement}
    prompt = Prompt("p", "", tokens=(1, 2, 3))
    stops = Stops((spanning(14),), READ)
    stream, shown = TextStream(READ, stops.strings), []
    record, _ = fleet.run_prompt(chain(strategy, stages), prompt, stops=stops,
                                 on_text=lambda tokens: shown.append(stream.add(tokens)), **wanted)
    assert record.tokens == ANSWER[:15]
    assert "".join(shown) + stream.end() == READ(ANSWER)[:25] == before_first(READ(ANSWER), stops.strings)[0]
    assert fleet.run_prompt(chain(strategy, stages), prompt, **wanted)[0].tokens == ANSWER[:30]


class DiesOnce(Fleet):
    """Its target dies when the text has grown to ``at`` tokens."""

    at = 0

    def run_prompt(self, *args: Any, on_text: Any = None, **options: Any) -> Any:
        told: list[int] = []

        def more(tokens: list[int]) -> None:
            on_text(tokens)
            told.extend(tokens)
            if 0 < self.at <= len(told):
                self.at = 0
                raise StageError("killed")

        return super().run_prompt(*args, on_text=more, **options)


@pytest.mark.parametrize("at", [13, 15])
def test_a_retry_knows_of_the_string_s_beginning(at: int) -> None:
    """A string that began before the fault, or that was complete just before it, ends the text all the same."""
    stages, agreement = table(rows_of(ANSWER, "110"))
    with DiesOnce(stages, scripts={s.name: Script(Constant(0.001)) for s in stages}) as fleet:
        fleet.at = at
        record, _ = run_with_retries(
            fleet, chain("pipelined", stages), Prompt("p", "", tokens=(1, 2, 3)), max_new_tokens=30, retries=1,
            agreement=agreement, stops=Stops((spanning(14),), READ))
    assert record.carried >= at
    assert record.tokens == ANSWER[:15]


# -- models -----------------------------------------------------------------------------------------------

PROMPT = (5, 6, 7, 8)


@dataclass(frozen=True)
class Letters:
    """Token i of the tiny models as a letter or two."""

    def __call__(self, tokens: Sequence[int]) -> str:
        return "".join("abc"[t % 3] + "de"[: t % 2] for t in tokens)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.4, "top_k": 9, "seed": 8}],
                         ids=["greedy", "sampled", "top-k"])
def test_models_stop_alike_whatever_the_strategy(runners: dict[str, Any], options: dict[str, Any]) -> None:
    """Greedy or sampled, with any team: the text of the target alone, ended before its first stop string."""
    from execute.sampler import sampler_of
    from pipespec_model.spec import StageSpec

    read = Letters()

    def run(names: Sequence[str], strategy: str, strings: tuple[str, ...], order: int | None) -> list[int]:
        for name in names:
            runners[name].begin(PROMPT, sampler_of(Sampling(**options), PROMPT, number=0, eos=()))
        stages = [StageSpec(name=name, model=name) for name in names]
        return drive(chain(strategy, stages), [runners[name] for name in names], PROMPT, 40,
                     rng=None if order is None else np.random.default_rng(order),
                     ends=Stops(strings, read).ends()).tokens

    whole = run(["target"], "autoregressive", (), None)
    for start in (5, 9, 20):
        strings = (read(whole)[start : start + 6], "zz")
        alone = run(["target"], "autoregressive", strings, None)
        assert 0 < len(alone) < 40
        assert alone == whole[: len(alone)]
        assert text_of(read, alone, strings) == before_first(read(whole), strings)[0]
        for strategy in STRATEGIES:
            assert run(("near", "target"), strategy, strings, start) == alone
            assert run(("mid", "near", "target"), strategy, strings, None) == alone


def test_the_command_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--stop`` ends the printed text, the JSON text and the trace; two strings, the first to occur counts."""
    from execute.__main__ import main

    (tmp_path / "p.yaml").write_text(
        "strategy: speculative\nstages:\n- {name: s, model: tiny-s}\n- {name: m, model: tiny-m}\n"
        "links: [{lookahead: 3}]\n", encoding="utf-8")

    def run(*more: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["run", str(tmp_path / "p.yaml"), "--prompt", "def mean(values):\n", "--max-new-tokens", "48", *more])
        said = capsys.readouterr()
        assert end.value.code in (0, None), said.err
        return said.out

    whole = json.loads(run("--json"))["prompts"][0]
    text = whole["text"]
    string = next(text[i : i + 5] for i in range(len(text) // 3, len(text)) if text.find(text[i : i + 5]) == i)
    wanted, _ = before_first(whole["text"], (string,))
    assert 5 < len(wanted) < len(text)
    stop = ["--stop", "never this", "--stop", string]
    assert run(*stop) == wanted + "\n"
    document = json.loads(run(*stop, "--json", "--out", str(tmp_path / "out")))["prompts"][0]
    assert document["text"] == wanted
    assert document["tokens"] == whole["tokens"][: len(document["tokens"])]
    assert len(document["tokens"]) < 48
    header = json.loads((tmp_path / "out" / "trace.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert header["options"]["stop"] == ["never this", string]
