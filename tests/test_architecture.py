"""Import rules of the packages: who may know whom, and what starts without loading torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipespec_model", "simulate", "execute", "validate")
FORBIDDEN = {
    "pipespec_model": {"simulate", "execute", "validate", "torch", "transformers", "simpy"},
    "simulate": {"execute", "validate", "torch", "transformers"},
    "execute": {"simulate", "validate", "simpy"},
    "validate": set(),
}


def imported(source: str) -> set[str]:
    """Top-level names of every import, at module level or inside a function.

    Relative imports stay inside the package, so they name nothing.
    """
    out: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            out |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            out.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            out.add("a parent package")
    return out


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str):
    """The model knows none of the others, and the simulator and the executor never know each other,
    not even lazily."""
    found = {path.name: imported(path.read_text(encoding="utf-8")) for path in files(package)}
    assert len(found) > 3
    for name, names in found.items():
        assert not names & (FORBIDDEN[package] | {"a parent package"}), name


def test_the_rule_finds_a_lazy_import():
    """Negative control: an import inside a function is seen."""
    assert imported("def f():\n    from simulate.engine import PromptRun\n    import torch.nn") == {"simulate", "torch"}
    assert imported("from ..execute import fleet") == {"a parent package"}


def test_only_the_console_script_maps_commands_to_packages():
    """import_module by name occurs in pipespec_model/__main__.py alone."""
    users = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in files(package)
             if "import_module" in path.read_text(encoding="utf-8")}
    assert users == {"pipespec_model/__main__.py"}


def test_no_star_imports_and_no_utils():
    """Every imported name is written out, and no module is called utils."""
    for package in PACKAGES:
        for path in files(package):
            assert path.name != "utils.py"
            stars = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                     if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)]
            assert not stars, path


@pytest.mark.parametrize("module", ["pipespec_model", "simulate"])
def test_every_module_imports_without_torch(module: str):
    """No module of the model or the simulator loads torch, transformers or matplotlib at import."""
    names = [f"{module}.{path.stem}" for path in files(module) if path.stem != "__init__"]
    loaded = loads(f"import {', '.join(names)}")
    assert not loaded & {"torch", "transformers", "matplotlib"}


@pytest.mark.parametrize("statement", ["import execute.worker", "import execute.scripted, pipespec_model.lookup"])
def test_a_scripted_stage_process_never_loads_torch(statement: str):
    """What a scripted or lookup stage imports is free of torch."""
    assert not loads(statement) & {"torch", "transformers"}


def test_the_published_study_never_loads_torch():
    """No module of validate.published imports torch, transformers or the executor."""
    names = [f"validate.published.{path.stem}" for path in files("validate") if path.parent.name == "published"]
    assert not loads(f"import {', '.join(names)}") & {"torch", "transformers", "execute"}


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["simulate", "--help"]])
def test_help_answers_without_what_is_slow_to_load(args: list[str]):
    """The console script prints its help and exits with 0 before torch, numba, pandas or matplotlib is loaded."""
    call = f"""
from pipespec_model.__main__ import main
try:
    main({args!r})
except SystemExit as end:
    assert end.code in (0, None), end.code
"""
    assert not loads(call) & {"torch", "transformers", "numba", "pandas", "joblib", "matplotlib"}


def test_an_unknown_command_is_one_line_and_exit_code_2():
    """A mistyped command names what there is, on stderr, without a traceback."""
    done = subprocess.run([sys.executable, "-m", "pipespec_model", "simulat"], capture_output=True, text=True,
                          cwd=ROOT, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pipespec: command must be one of validate, execute, simulate, got 'simulat'\n"


def loads(code: str) -> set[str]:
    """Top-level modules that are loaded after ``code`` has run in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('LOADED', *sorted({{n.split('.')[0] for n in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rsplit("LOADED", 1)[1].split())
