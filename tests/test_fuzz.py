"""Whatever a file or an argument holds: a result, or an InputError of one short line; no traceback, no hang.

Documents are drawn in two ways: at random from JSON's and YAML's values with the words of the format among their
keys, and by mutation of valid ones, which reach deeper.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipespec_model.__main__ import main
from pipespec_model.errors import InputError
from pipespec_model.profile import load_profile
from pipespec_model.spec import load_pipeline
from pipespec_model.trace import PromptRecord, StepRecord, Trace, load_trace, save_trace
from simulate.vary import parse_vary

HANG_S = 20
"""For one example, which takes milliseconds: the alarm of this test, no claim about speed."""
LONGEST = 1000  # characters of an error

PIPELINE: dict[str, Any] = {
    "strategy": "pipelined",
    "handshake": "blocking",
    "stages": [{"name": "a", "model": "x", "device": "cpu", "threads": 1}, {"name": "b", "model": "y", "cores": [0]}],
    "links": [{"lookahead": 1, "buffer_tokens": 8, "max_window": 8}],
}
PROFILE: dict[str, Any] = {
    "version": 1,
    "timing_spread": 0.01,
    "neighbour_rate": 0.8,
    "memory_bytes": {"a": 1e9},
    "latency": {
        "a": {"kind": "constant", "seconds": 0.01},
        "b": {
            "step": {"kind": "linear", "base_s": 0.02, "width_s": 0.001, "context_s": 1e-6},
            "prefill": {"kind": "constant", "seconds": 0.02},
        },
    },
    "acceptance": {"a>b": {"kind": "iid", "acceptance_rate": 0.7}},
    "contention": [{"a": 0.9, "b": 0.8}],
    "turns": [{"a": 0.9, "b": 0.8}],
    "slowness": {"a": [1.0, 1.1]},
    "costs": {"*": {"start_s": 1e-4, "handover_s": 1e-5}},
    "agreement": [
        {
            "prompt": "p",
            "prompt_length": 2,
            "names": ["x", "y"],
            "tokens": [[1, 2, 3], [1, 5, 3]],
            "budget": 3,
            "eos": [3],
            "prompt_tokens": [7, 8],
        }
    ],
}
MODELS_JSON: list[Any] = [{"path": "x", "devices": ["cpu"]}, {"path": "y", "dtype": "float32", "quantize": None}]


def words(document: Any) -> Iterator[str]:
    """Every key and every word of a document."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            yield from words(value)
    elif isinstance(document, list):
        for value in document:
            yield from words(value)
    elif isinstance(document, str):
        yield document


WORDS = sorted(
    {
        *words([PIPELINE, PROFILE, MODELS_JSON]),
        "auto",
        "empirical",
        "markov",
        "table",
        "roofline",
        "scaled",
        "kind",
        "drafter",
        "clasp",
        "quantize",
        "dtype",
        "kept_layers",
        "max_ngram",
        "type",
        "header",
    }
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=6),
    st.sampled_from([2**70, -(2**70), 1e308, -0.0, 10**400, "\x00", "\ud800", "a>b", "a" * 3000]),
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=12,
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every container in a document with each of its keys."""
    found = []
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        found += [(document, key), *places(value)]
    return found


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """A valid document with one to three changes."""
    document = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        found = places(document)
        if not found:
            return document
        container, key = draw(st.sampled_from(found))
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename", "double"]))
        if change == "replace":
            container[key] = draw(DOCUMENTS)
        elif change == "remove":
            del container[key]
        elif change == "rename" and isinstance(container, dict):
            container[draw(st.sampled_from(WORDS))] = container.pop(key)
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
    return document


@pytest.mark.parametrize(
    "text",
    [
        "links.0.lookahead=1..9999999999",
        "links.0.acceptance_rate=0..1:" + "9" * 30,
        "links.0.acceptance_rate=-1e308..1e308:3",
        "links.0.lookahead=0..0x" + "f" * 400,
        "links.0.lookahead=1..2:²",
    ],
)
def test_ranges_made_to_harm(text: str) -> None:
    """A range that would fill the memory, or that no float holds, is refused."""
    with alarm(), pytest.raises(InputError):
        parse_vary(text)


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """A failure instead of a hang."""

    def late(*_: Any) -> None:
        raise AssertionError("took too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def survives(load: Any, path: Path) -> None:
    said = ""
    with alarm():
        try:
            load(path)
        except InputError as error:
            said = str(error)
    assert len(said) <= LONGEST + len(str(path)), said[:200]


def write(document: Any, folder: Path, *, as_yaml: bool) -> Path:
    path = folder / ("d.yaml" if as_yaml else "d.json")
    text = yaml.safe_dump(document, allow_unicode=True) if as_yaml else json.dumps(document)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


LOADERS = {"pipeline": load_pipeline, "profile": load_profile}
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@QUICK
@given(document=DOCUMENTS, as_yaml=st.booleans())
def test_any_document(load: Any, folder: Path, document: Any, as_yaml: bool) -> None:
    """A document of any shape is loaded or refused."""
    survives(load, write(document, folder, as_yaml=as_yaml))


@pytest.mark.parametrize("valid", [PIPELINE, PROFILE, MODELS_JSON], ids=["pipeline", "profile", "models.json"])
@QUICK
@given(data=st.data(), as_yaml=st.booleans())
def test_a_valid_document_changed(folder: Path, valid: Any, data: st.DataObject, as_yaml: bool) -> None:
    """A valid document with any part replaced, removed, renamed or doubled is loaded or refused."""
    load = load_profile if valid is PROFILE else load_pipeline
    survives(load, write(data.draw(mutated(valid)), folder, as_yaml=as_yaml))


@pytest.mark.parametrize("load", [load_pipeline, load_profile, load_trace])
@pytest.mark.parametrize("suffix", ["json", "yaml"])
@QUICK
@given(
    content=st.one_of(st.binary(max_size=60), st.text("[]{}:,-&*!|>'\"#%@ \n\t0e.nabx~?<", max_size=40).map(str.encode))
)
def test_any_bytes(load: Any, suffix: str, folder: Path, content: bytes) -> None:
    """Any bytes are loaded or refused."""
    path = folder / f"b.{suffix}"
    path.write_bytes(content)
    survives(load, path)


def valid_trace(folder: Path) -> list[Any]:
    steps = [StepRecord(0, i, "decode", 0.0, 0.5, 0, 3, 1, 0, 0, 1, 0) for i in (0, 1)]
    record = PromptRecord(0, "p", 3, [1], 1.0, 1.0, [{"drafted": 2}, {}], margins=[0.5])
    path = folder / "valid.jsonl"
    save_trace(Trace("measured", PIPELINE, steps=steps, prompts=[record], probes=steps[:1]), path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@QUICK
@given(data=st.data(), cut=st.integers(0, 2000))
def test_a_trace_changed(folder: Path, data: st.DataObject, cut: int) -> None:
    """A trace with any part changed, and cut anywhere, is read or refused."""
    lines = data.draw(mutated(valid_trace(folder)))
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines)[: -cut or None], encoding="utf-8")
    survives(load_trace, path)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 5000,
        "9" * 5000,
        "- " * 5000,
        BOMB,
        "stages: &a [*a]",
        "2001-99-99",
        "? [a]\n: b",
        "1: 2",
        "!!python/object/apply:os.system ['true']",
        "stages: 0x" + "f" * 5000,
        '"\\ud800"',
        "null",
        "&a {stages: *a}",
    ],
    ids=range(14),
)
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_documents_made_to_harm(load: Any, suffix: str, text: str, tmp_path: Path) -> None:
    """Depth, digits, aliases that multiply and tags that call are refused like any other fault."""
    path = tmp_path / f"d.{suffix}"
    path.write_text(text, encoding="utf-8")
    with alarm(), pytest.raises(InputError) as caught:
        load(path)
    assert len(str(caught.value)) <= LONGEST + len(str(path))


# -- arguments ------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 4).map(str),
    st.floats().map(repr),
    st.sampled_from(["", "-", "1e", "nan", "inf", "1_0", "0x3", "99999999999999999999", "½", "--", "1.5"]),
)
FIELDS = [
    "links.0.lookahead",
    "links.*.acceptance_rate",
    "stages.a.latency",
    "stages.*.threads",
    "links.0.max_window",
    "stages.9.latency",
    "strategy",
    "links",
    "",
    "links.0",
    "neighbour_rate",
    "a.b.c",
]
VALUES = st.one_of(
    NUMBERS,
    st.builds("{}..{}:{}".format, NUMBERS, NUMBERS, NUMBERS),
    st.text("[]{},:.=-0123abc ", max_size=8),
    st.builds("{}..{}".format, NUMBERS, NUMBERS),
    st.sampled_from(["[1,2]", "auto", "0..1e3:3", "1..9999999999"]),
)
VARY = st.builds("{}{}{}".format, st.sampled_from(FIELDS), st.sampled_from(["=", "=", "=", "", ":", "=="]), VALUES)


def run_pipespec(*args: str) -> None:
    """A command in this process: done, or status 2 and one line on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with alarm(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(list(args))
    assert end.value.code in (0, 2), args
    if end.value.code == 2:
        said = [line for line in err.getvalue().splitlines() if line.startswith("pipespec")]
        assert len(said) == 1, err.getvalue()
        assert "Traceback" not in err.getvalue()


@pytest.fixture(scope="module")
def files(folder: Path) -> tuple[str, str]:
    pipeline, profile = folder / "p.yaml", folder / "p.json"
    pipeline.write_text(yaml.safe_dump(PIPELINE), encoding="utf-8")
    profile.write_text(json.dumps({**PROFILE, "agreement": []}), encoding="utf-8")
    return str(pipeline), str(profile)


SMALL = {"--num-prompts": "1", "--num-tokens": "4", "--replications": "2"}
SOME = settings(QUICK, max_examples=25)


@SOME
@given(
    changed=st.dictionaries(
        st.sampled_from(["--num-prompts", "--num-tokens", "--replications", "--seed", "--engine", "--speed", "--out"]),
        NUMBERS,
        max_size=2,
    )
)
def test_any_argument_of_run(
    files: tuple[str, str], changed: dict[str, str], folder: Path, monkeypatch_module: pytest.MonkeyPatch
) -> None:
    """``simulate run`` with any words for its options."""
    monkeypatch_module.chdir(folder)
    run_pipespec(
        "simulate",
        "run",
        files[0],
        "--profile",
        files[1],
        *(part for pair in {**SMALL, **changed}.items() for part in pair),
    )


@SOME
@given(
    vary=st.lists(VARY, min_size=1, max_size=2),
    design=st.sampled_from(["grid", "zip", "lhs", "x"]),
    points=st.one_of(st.none(), NUMBERS),
)
def test_any_argument_of_sweep(
    files: tuple[str, str],
    vary: list[str],
    design: str,
    points: str | None,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """``simulate sweep`` with any words for what varies."""
    given_points = ["--points", points] if points is not None else []
    run_pipespec(
        "simulate",
        "sweep",
        files[0],
        "--profile",
        files[1],
        "--design",
        design,
        *given_points,
        "--jobs",
        "1",
        "--num-tokens",
        "4",
        "--replications",
        "2",
        "--engine",
        "analytic",
        "--out",
        str(tmp_path_factory.mktemp("sweep")),
        *(part for text in vary for part in ("--vary", text)),
    )


@SOME
@given(
    changed=st.dictionaries(
        st.sampled_from(
            [
                "--devices",
                "--target",
                "--objective",
                "--memory",
                "--serial-share",
                "--idle-watts",
                "--acceptance-sd",
                "--time-sd",
                "--seed",
            ]
        ),
        NUMBERS,
        max_size=2,
    )
)
def test_any_argument_of_plan(files: tuple[str, str], changed: dict[str, str]) -> None:
    """``simulate plan`` with any words for its options."""
    asked = {"--devices": "2", "--num-tokens": "8", **changed}
    run_pipespec("simulate", "plan", files[1], *(part for pair in asked.items() for part in pair))


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
