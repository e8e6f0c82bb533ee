"""Bad input ends with status 2 and exactly one line on stderr: field, rule, value; never a traceback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import CONTEXT, write_tiny_run

from pipespec_model.__main__ import main

Pipespec = Callable[..., str]
ALONE = "strategy: autoregressive\nstages:\n- {{name: target, model: {target}{more}}}\n"
PAIR = "stages:\n- {{name: near, model: {near}}}\n- {{name: target, model: {target}{more}}}\n"


@pytest.fixture
def pipespec(capfd: pytest.CaptureFixture[str]) -> Pipespec:
    """Run a command that must fail in this process; returns its one line."""

    def run(*args: object) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        said = capfd.readouterr()
        return one_line(end.value.code, said.out, said.err)

    return run


def one_line(status: object, out: str, err: str) -> str:
    # What a command says of its progress is no part of the error.
    lines = [line for line in err.splitlines() if not line.startswith(("starting", "calibrating", "calibration round"))]
    assert (status, out, len(lines)) == (2, "", 1), err
    return lines[0]


@pytest.fixture
def made(tiny, tmp_path: Path) -> Callable[..., Path]:
    """``made("a: b")``: a file with this text; names of tiny models in braces become their folders."""

    def write(text: str, name: str = "p.yaml", **more: str) -> Path:
        path = tmp_path / name
        path.write_text(text.format(**{k: str(v) for k, v in tiny.items()}, **{"more": "", **more}), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(("text", "said"), [
    (PAIR + "speed: 3\n", "p.yaml speed is not a known key"),
    ("stages:\n- {{name: a, model: b, latency_s: 3}}\n", "p.yaml stages.0.latency_s is not a known key"),
    (PAIR + "links: [{{lookahead: -1}}]\n", "p.yaml links.0.lookahead must be >= 0 or auto, got -1"),
    (PAIR + "links: [{{lookahead: two}}]\n", "p.yaml links.0.lookahead must be a valid integer"),
    (PAIR + "links: [{{lookahead: 9, max_window: 4}}]\n", "lookahead must be <= min(buffer_tokens, max_window) = 4"),
    ("stages:\n- {{name: a, model: b}}\n", "p.yaml stages must be >= 2 for strategy pipelined, got 1"),
    ("stages: []\n", "p.yaml stages"),
    (PAIR + "strategy: fast\n", "p.yaml strategy must be 'autoregressive', 'speculative' or 'pipelined', got 'fast'"),
    ("stages: [\n", "p.yaml:2 must be YAML"),
    ("", "p.yaml must hold a mapping with the key 'stages', got 'NoneType'"),
    ("[{{devices: [cpu]}}]", "p.yaml: 0 must be an object with the key 'path'"),
])
@pytest.mark.parametrize("command", [["validate"], ["execute", "run", "--prompt", "hi"]], ids=["validate", "execute"])
def test_pipeline_file(pipespec: Pipespec, made, command: list[str], text: str, said: str) -> None:
    """A fault in the pipeline file names file, field, rule and value."""
    assert said in pipespec(*command, made(text))


@pytest.mark.parametrize(("args", "said"), [
    (["validate", "none.yaml"], "none.yaml must be an existing file: check the path"),
    (["validate", "--prompts", "none.txt"], "none.txt must be an existing file: check the path"),
    (["validate", "--tolerance", "x"], "--tolerance"),
    (["validate", "--speed"], "--speed"),
    (["validate", "--dtype", "float8"], "dtype must be"),
    (["validate", "--model", "no/such/model/here"], "no/such/model/here"),
    (["execute", "run", "none.yaml", "--prompt", "hi"], "none.yaml must be an existing file: check the path"),
    (["execute", "run", "p.yaml", "--max-new-tokens", "-1"], "--max-new-tokens"),
    (["execute", "walk"], "walk"),
    (["fly"], "command must be one of validate, execute, simulate, got 'fly'"),
])
def test_command_line(pipespec: Pipespec, tmp_path: Path, monkeypatch, args: list[str], said: str) -> None:
    """A fault in the arguments names the argument and the value, before any model is fetched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path / "empty"))
    assert said in pipespec(*args)


@pytest.mark.parametrize(("more", "said"), [
    (", threads: 999", r"stages[target].threads must be <= the"),
    (", cores: [998]", r"stages[target].cores must be among"),
])
def test_what_is_not_here(pipespec: Pipespec, made, tmp_path: Path, more: str, said: str) -> None:
    """Cores that this machine lacks are named, before anything is measured."""
    path = made(PAIR, more=more)
    prompts = made("w1 w2\nw3 w4\n", "prompts.txt")
    assert said in pipespec("validate", path, "--prompts", prompts, "--out", tmp_path / "out")


def test_model_that_cannot_be_loaded(pipespec: Pipespec, made, tmp_path: Path) -> None:
    """A drafter that is not there is named."""
    path = made(PAIR.replace("{near}", str(tmp_path / "gone")))
    assert "gone' cannot be loaded (" in pipespec("execute", "run", path, "--prompt", "w1 w2")


def test_models_with_other_tokens(pipespec: Pipespec, made, tiny, tmp_path: Path) -> None:
    """Two models that read an id differently are refused, naming the first such id."""
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny["near"].iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            text = text.replace(b'"w8"', b'"x"').replace(b'"w9"', b'"w8"').replace(b'"x"', b'"w9"')
        (other / file.name).write_bytes(text)
    said = pipespec("execute", "run", made(PAIR.replace("{near}", str(other))), "--prompt", "w1 w2")
    assert "id 8 is 'w9' there and 'w8' in the target" in said


def test_prompts(pipespec: Pipespec, made, tmp_path: Path) -> None:
    """An empty line, a single prompt to validate on and a prompt that does not fit are named."""
    path = made(PAIR)
    out = tmp_path / "out"
    assert "e.txt:2 must not be an empty prompt" in pipespec("validate", path, "--prompts", made("a\n\nb\n", "e.txt"))
    said = pipespec("validate", path, "--prompts", made("w1\n", "one.txt"), "--out", out)
    assert "prompts must be at least 2" in said
    said = pipespec("execute", "run", made(ALONE, "a.yaml"), "--prompt", "w5 " * CONTEXT, "--max-new-tokens", 8)
    assert f"plus 8 new tokens must fit the context of stage 'target' ({CONTEXT} tokens), got {CONTEXT + 8}" in said
    assert "prompt 'prompt' must not be empty" in pipespec("execute", "run", path, "--prompt", " ")
    assert "--prompt or --prompts must be given, one of the two" in pipespec("execute", "run", path)


@pytest.mark.parametrize("command", ["validate", "execute"])
def test_out_that_is_a_file(pipespec: Pipespec, tiny, made, tmp_path: Path, command: str) -> None:
    """``--out`` that is a file is named and left as it is."""
    out = tmp_path / "out"
    out.write_text("mine", encoding="utf-8")
    args = write_tiny_run(tiny, tmp_path)
    if command == "execute":
        args = ["execute", "run", str(made(ALONE)), "--prompt", "w1 w2", "--out", str(out)]
    assert f"--out {out} must be a writable folder" in pipespec(*args)
    assert out.read_text(encoding="utf-8") == "mine"


def test_out_that_holds_another_run(pipespec: Pipespec, tiny, tmp_path: Path) -> None:
    """``--out`` with another run's results, or a damaged mark of one, is refused, not mixed."""
    args = write_tiny_run(tiny, tmp_path)
    (tmp_path / "out").mkdir()
    for mark in ("{}", "{"):
        (tmp_path / "out" / "run.json").write_text(mark, encoding="utf-8")
        assert "must be empty or hold the same run: give another folder" in pipespec(*args)


def in_a_process(args: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipespec_model", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False) if os.getuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_out_that_is_not_writable(pipespec: Pipespec, tiny, tmp_path: Path) -> None:
    """``--out`` on a read-only file system is named."""
    args = write_tiny_run(tiny, tmp_path)
    with mounted(tmp_path / "out", "ro"):
        assert f"--out {tmp_path / 'out'} must be a writable folder (Read-only file system)" in pipespec(*args)


@pytest.mark.parametrize("command", ["validate", "execute"])
def test_full_disk(tiny, made, tmp_path: Path, command: str) -> None:
    """A disk without room under ``--out`` is one line, also from a process of its own."""
    args = write_tiny_run(tiny, tmp_path)
    with mounted(tmp_path / "out", "size=64k") as out:
        if command == "execute":
            args = ["execute", "run", str(made(ALONE)), "--prompt", "w1 w2", "--out", str(out), "--max-new-tokens=200"]
            (out / "fill").write_bytes(b"x" * 48 * 1024)
        done = in_a_process(args)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert ("must have 50 MB free" if command == "validate" else "No space left on device") in lines[0]


def test_nothing_but_the_line_from_a_process(made, tmp_path: Path) -> None:
    """From the shell too: status 2, nothing on stdout, one line, though a stage process found the fault."""
    path = made(ALONE, more=", device: tpu")
    done = in_a_process(["execute", "run", str(path), "--prompt", "w1 w2", "--out", str(tmp_path / "o")])
    said = one_line(done.returncode, done.stdout, done.stderr)
    assert said.startswith("pipespec execute: ")
    assert "stages[target].device must be one of cpu" in said
    assert "got 'tpu'" in said
