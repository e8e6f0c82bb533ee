"""Predict published runs whose files are not in the folder: their totals alone are known from the published tables.

    python scripts/published_unseen.py DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipespec_model.spec import Strategy
from validate.published.calibration import Calibration
from validate.published.files import published_pipeline, read_folder
from validate.published.predict import NEIGHBOUR_RATES, percent
from validate.published.replay import agreements, run

UNSEEN: tuple[tuple[Strategy, tuple[str, ...], int, float], ...] = (
    ("pipelined", ("1B", "70B"), 5, 54.9), ("pipelined", ("1B", "8B", "70B"), 5, 48.8),
    ("speculative", ("1B", "8B", "70B"), 8, 90.1))
"""Strategy, models, L (labelled or taken), milliseconds a token as published."""


def main() -> None:
    files, _ = read_folder(Path(sys.argv[1]))
    calibration = Calibration.of(files)
    by_size = {size: stage for file in files for stage in file.stages for size in ("70B", "8B", "1B")
               if f"-{size}" in stage.model}
    for strategy, sizes, label, measured in UNSEEN:
        pipeline = published_pipeline(strategy, [by_size[size] for size in sizes], label)
        indices = sorted(calibration.known_prompts(pipeline))

        def error(*, neighbour: float | None = None, pipeline=pipeline, indices=indices, measured=measured, **options):
            made = agreements(pipeline, calibration, indices, wrong_alike_rate=neighbour, **options)
            return percent(run(pipeline, calibration, made, neighbour_rate=neighbour).ms_per_token, measured)

        found = error()
        print(f"{{{','.join(sizes)}}} {strategy}, L = {label}: published {measured}, predicted "
              f"{measured * (1 + found / 100):.1f} ({found:+.1f}%; unknown positions refused "
              f"{error(unknown='all 0'):+.1f}%, agreed to {error(unknown='all 1'):+.1f}%; both wrong alike at "
              + ", ".join(f"{rate:g}: {error(neighbour=rate):+.1f}%" for rate in NEIGHBOUR_RATES) + ")")


if __name__ == "__main__":
    main()
