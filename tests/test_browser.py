"""The report opens in a browser as it is: nothing fetched, nothing complained about, everything escaped."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import chain, rows_of, table

from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.trace import Trace
from simulate.run import simulate
from validate.report import write_report

EVIL = "<script>document.title='taken'</script>"


def row(strategy: str, speed: float, origin: str = "measured", **more: Any) -> dict[str, Any]:
    step = {"stage": "s0", "kind": "draft", "measured_count": 30.0, "replayed_count": 31, "measured_s": 0.02,
            "replayed_s": 0.021}
    return {
        "name": f"{strategy}-{origin}", "note": EVIL, "strategy": strategy, "stages": ["s0", EVIL], "lookahead": [2],
        "handshake": "overlapped", "devices": ["cpu", "cpu"], "threads": [1, 1], "cores": 2, "origin": origin,
        "num_prompts": 4, "num_tokens": 96, "measured_tokens_per_s": speed, "measured_interval": [speed - 1, speed + 1],
        "predicted_tokens_per_s": {"closed_form": speed + 3, "renewal": None, "simulation": speed + 0.5},
        "error_percent": {"closed_form": 3.0, "renewal": None, "simulation": 1.1}, "timing_error_percent": 2.5,
        "predicted_interval": [speed - 2, speed + 2], "measured_mean_acceptance_length": 1.8,
        "predicted_mean_acceptance_length": 1.7, "replayed_mean_acceptance_length": 1.8, "identical_prompts": 3,
        "near_tie_prompts": 1, "noise_percent": 0.7, "ttft_s": 0.2, "stage_use": [], "step_times": [step],
        "replayed_tokens_per_s": speed + 0.2, "replayed_ttft_s": 0.19,
        "error_budget": dict.fromkeys(("step_times", "between_steps", "acceptance", "rest", "without_contention",
                                       "at_calibrated_speed", "efficiency"), 0.6),
        "speedup": 1.5 if origin == "measured" else None,
        "speedup_same_devices": 1.1 if origin == "measured" else None, **more}


def trace(origin: str) -> Trace:
    stages, agreement = table(rows_of(list(range(1, 30)), "110"), name=EVIL)
    latency = {s.name: StageLatency(Constant(seconds)) for s, seconds in zip(stages, (0.01, 0.03), strict=True)}
    made = simulate(chain("pipelined", stages), Profile(latency), [agreement])
    made.origin = origin
    return made


@pytest.fixture(params=["full", "bare"])
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """With real and emulated rows, and with the least that a run can give."""
    if request.param == "full":
        rows = [row("autoregressive", 10.0), row("speculative", 12.0), row("pipelined", 15.0),
                row("pipelined", 20.0, "emulated")]
    else:
        rows = [row("autoregressive", 10.0, measured_interval=None, predicted_interval=None, noise_percent=None,
                    speedup=None, speedup_same_devices=None, step_times=[], lookahead=[], stages=["s0"])]
    origins = sorted({r["origin"] for r in rows})
    data = {
        "model": f"a & b {EVIL}", "dtype": "float32", "calibration_prompts": [EVIL], "evaluation_prompts": ["e"],
        "max_new_tokens": 24, "drawn": "greedy", "repeats": 2,
        "host": {"cpu": EVIL, "cores": 2, "system": "Linux", "machine": "x", "python": "3"},
        "versions": {"torch": "1"}, "seconds": 3.0, "rows": rows, "interval_coverage": None,
        "mape_percent": {o: {"closed_form": None, "renewal": None, "simulation": 1.0} for o in origins},
        "timing_mape_percent": dict.fromkeys(origins, 1.0), "timing_worst_percent": dict.fromkeys(origins, 2.0),
        "noise_floor_percent": None if request.param == "bare" else 0.7}
    write_report(data, tmp_path, simulated=trace("simulated"), measured=trace("measured"))
    return tmp_path / "report.html"


class Links(HTMLParser):
    """Everything on a page that a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed"):
            self.found.append(tag)
        for name, value in attrs:
            fetched = name in ("src", "href", "xlink:href", "srcset", "poster", "data", "action")
            if (fetched and value and not value.startswith(("#", "data:"))) or name.startswith("on"):
                self.found.append(f"{tag} {name}={value}")


def test_page_asks_for_nothing(report: Path) -> None:
    """No script, no address that is fetched, no style that imports; names from outside are text."""
    page = report.read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.found == []
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    assert EVIL not in page
    assert "&lt;script&gt;" in page


@pytest.mark.browser
def test_page_opens_without_complaint(report: Path, tmp_path: Path) -> None:
    """A browser shows the page with no console message and no request, and runs nothing of its text."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    log = tmp_path / "net.json"
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--no-first-run", f"--user-data-dir={tmp_path / 'user'}",
         "--enable-logging=stderr", "--v=0", f"--log-net-log={log}", "--dump-dom", report.as_uri()],
        capture_output=True, text=True, check=True, timeout=90)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert re.search(r"<title>pipespec: a &amp; b &lt;script", done.stdout)
    assert "</html>" in done.stdout
    asked = set(re.findall(r'"url":"((?:https?|file|ftp|wss?):[^"]*)"', log.read_text(encoding="utf-8")))
    page_itself = {report.as_uri()}
    own_business = {url for url in asked if "google" in url or "gvt1" in url}
    assert asked - page_itself - own_business == set()
