"""The random pipelines of scripts/decomposition_errors.py, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[1] / "scripts" / "decomposition_errors.py"


def script() -> ModuleType:
    if SCRIPT.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[SCRIPT.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[SCRIPT.stem]
