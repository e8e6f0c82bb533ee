"""Hold roofline estimates against measured step times.

    python scripts/estimate_errors.py published DIR         the published PipeSpec runs (docs/published-runs.md)
    python scripts/estimate_errors.py compiled              gpt-fast's published table, copied below
    python scripts/estimate_errors.py here [--repeats 40]   this machine and the built-in model, one thread

Each row is a measured step beside its estimate.  A row marked "fitted" gave a runtime of devices.json its constant.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipespec_model.devices import Device, Runtime, device, runtime
from pipespec_model.roofline import Estimate
from pipespec_model.shape import ModelShape, read_shape

LLAMA = {"1B": ModelShape(16, 2048, 8192, 32, 8, 64, 128256, tied_head=True),
         "8B": ModelShape(32, 4096, 14336, 32, 8, 128, 128256), "70B": ModelShape(80, 8192, 28672, 64, 8, 128, 128256)}
LLAMA_2 = {"7B": ModelShape(32, 4096, 11008, 32, 32, 128, 32000), "70B": ModelShape(80, 8192, 28672, 64, 8, 128, 32000)}
# Tokens per second at batch 1 on one A100-80GB: README of gpt-fast, "Benchmarks".  Its 4 bits have a 16-bit scale and
# a 16-bit zero point in every group of 32: 5 bits a weight.
GPT_FAST = [("Llama-2-7B", LLAMA_2["7B"], 16, 104.9), ("Llama-2-7B", LLAMA_2["7B"], 8, 155.58),
            ("Llama-2-7B", LLAMA_2["7B"], 5, 196.80), ("Llama-3.1-8B", LLAMA["8B"], 16, 93.89),
            ("Llama-3.1-8B", LLAMA["8B"], 8, 137.64), ("Llama-2-70B", LLAMA_2["70B"], 8, 19.13),
            ("Llama-2-70B", LLAMA_2["70B"], 5, 25.25), ("Llama-3.1-70B", LLAMA["70B"], 8, 18.04)]
CONTEXT = 256


def row(name: str, measured_s: float, estimates: dict[str, float], note: str = "") -> None:
    said = "".join(f"  {by} {1e3 * seconds:8.2f} ({100 * (seconds / measured_s - 1):+4.0f}%)"
                   for by, seconds in estimates.items())
    print(f"{name:28} {1e3 * measured_s:8.2f} ms{said}  {note}")


def published(folder: Path) -> None:
    """Greedy and verifying steps; their device is taken for the 80 GB model."""
    from validate.published.calibration import Calibration
    from validate.published.files import read_folder

    files, _ = read_folder(folder)
    known = Calibration.of(files)
    on = device("a100-80gb")
    for key, times in known.greedy.items():
        size = next(name for name in LLAMA if f"-{name}-" in key)
        bits = 4.5 if "4bit" in key else 16
        made = {by: Estimate(LLAMA[size], on, runtime(by), bits).latency for by in ("ideal", "eager")}
        row(f"{size} {bits} bits, 1 token", times.step_s + times.wait_s,
            {by: latency.mean_s(1, CONTEXT) for by, latency in made.items()}, "fitted: eager" if size == "1B" else "")
    for (_, target), times in known.pairs.items():
        size = next(name for name in LLAMA if f"-{name}-" in target)
        bits = 4.5 if "4bit" in target else 32 if "float32" in target else 16
        made = {by: Estimate(LLAMA[size], on, runtime(by), bits).latency for by in ("ideal", "eager")}
        # Measured, a step of two tokens or twenty takes the same.
        row(f"{size} {bits} bits, 2 tokens", times.verify.mean_s(2, 0),
            {by: latency.mean_s(2, CONTEXT) for by, latency in made.items()})


def compiled() -> None:
    for name, shape, bits, speed in GPT_FAST:
        made = {by: Estimate(shape, device("a100-80gb"), runtime(by), bits).latency for by in ("ideal", "compiled")}
        row(f"{name} {bits} bits", 1 / speed, {by: latency.mean_s(1, 100) for by, latency in made.items()},
            "fitted: compiled" if (name, bits) == ("Llama-2-7B", 16) else "")


def here(repeats: int) -> None:
    """Peaks measured by a matrix times a vector as large as the model, and by a square product."""
    import torch

    from execute.torch_runner import TorchRunner
    from execute.zoo import BUILT_IN, built_in_folder
    from pipespec_model.messages import Step
    from pipespec_model.spec import StageSpec

    torch.set_num_threads(1)
    matrix, vector, square = torch.rand(16384, 8192), torch.rand(8192), torch.rand(1536, 1536)
    bandwidth = matrix.numel() * 4 / fastest(lambda: matrix @ vector, 20)
    flops = 2 * 1536**3 / fastest(lambda: square @ square, 8)
    print(f"one thread: {bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s")
    mine = Device("this machine", bandwidth, flops, 8e9, "measured")
    said = Estimate(read_shape(built_in_folder()), mine, Runtime(1, 0, 0, "ideal"), 32).latency
    runner = TorchRunner(StageSpec(name="built-in", model=BUILT_IN))
    rng = np.random.default_rng(0)
    prompt = rng.integers(100, 40_000, CONTEXT + 1).tolist()
    runner.begin(prompt)
    runner.run([], Step("prefill", 0, 0, len(prompt), (), 1, 0, False))
    for width in (1, 2, 4, 8, 16):
        drafts = tuple(prompt[: width - 1])
        step = Step("decode", 0, CONTEXT, 1, drafts, width, 0, False)
        row(f"built-in, {width} tokens", fastest(lambda step=step: runner.run([], step), repeats),
            {"ideal": said.mean_s(width, CONTEXT)})


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Lower quartile of the call's seconds: what a neighbour on the machine adds is left out."""
    call()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return float(np.quantile(seconds, 0.25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("published").add_argument("folder", type=Path)
    kinds.add_parser("compiled")
    kinds.add_parser("here").add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    if args.kind == "published":
        published(args.folder)
    elif args.kind == "compiled":
        compiled()
    else:
        here(args.repeats)


if __name__ == "__main__":
    main()
