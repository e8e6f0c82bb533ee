"""Shared by the tests of the executor: tiny random models, and a scheduler that runs a pipeline's
stages in this process, so that most laws need no process and no model of any size.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from execute.scripted import Script, ScriptedRunner
from pipespec_model.agreement import Agreement
from pipespec_model.latency import Constant
from pipespec_model.messages import Step
from pipespec_model.metrics import LinkFigures, booked_links
from pipespec_model.protocol import Stage
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec

VOCABULARY = 96
CONTEXT = 256
STRATEGIES = ("speculative", "pipelined", "speculative blocking", "pipelined blocking")
"""With the handshake where it is not our own."""


# -- pipelines ------------------------------------------------------------------------------------


def stage(name: str, model: str = "scripted", **options: Any) -> StageSpec:
    return StageSpec(name=name, model=f"{model}-{name}" if model == "scripted" else str(model), **options)


def chain(strategy: str, stages: Sequence[StageSpec], *, window: int = 4, lookahead: int | None = None) -> PipelineSpec:
    """All links alike; a synchronous drafter drafts ``window``, a pipelined one is never waited for.

    strategy : one of STRATEGIES
    """
    strategy, _, handshake = strategy.partition(" ")
    ahead = lookahead if lookahead is not None else window if strategy == "speculative" else 0
    link = LinkSpec(lookahead=ahead, buffer_tokens=window, max_window=window)
    if len(stages) == 1:
        return PipelineSpec(strategy="autoregressive", stages=tuple(stages))
    return PipelineSpec(strategy=strategy, handshake=handshake or "overlapped", stages=tuple(stages),
                        links=(link,) * (len(stages) - 1))


# -- one prompt, all stages in this process -------------------------------------------------------


@dataclass
class Done:
    """What a run leaves: the answer, each stage's steps with the accepted drafts, and the counters."""

    tokens: list[int]
    steps: list[list[tuple[Step, int]]]
    counters: list[dict[str, int]]
    pipeline: PipelineSpec

    def verifications(self, index: int = -1) -> list[tuple[int, int]]:
        """(drafts, accepted) of a stage's steps that verified something."""
        return [(len(step.drafts), accepted) for step, accepted in self.steps[index] if step.drafts]

    def links(self) -> list[LinkFigures]:
        return [LinkFigures.of(*self.counters[i : i + 2]) for i in booked_links(self.pipeline)]


def drive(pipeline: PipelineSpec, runners: Sequence[Any], prompt: Sequence[int], budget: int, *,
          eos: Sequence[int] = (), rng: np.random.Generator | None = None, check: Any = None,
          ends: Any = None) -> Done:
    """Run one prompt as the stage processes would, one stage at a time.

    runners : begun already
    rng : picks whose turn it is (an uneven schedule); None = all stages in rotation
    check : called as ``check(stage, runner)`` after each step
    ends : the target's, see protocol.Stage
    """
    k = len(runners)
    stages = [Stage(pipeline, i, len(prompt), budget, frozenset(eos), tuple(prompt)) for i in range(k)]
    stages[-1].ends = ends
    inbox: list[deque[Any]] = [deque() for _ in stages]
    done = Done([], [[] for _ in stages], [], pipeline)

    def deliver(i: int) -> None:
        while inbox[i]:
            stages[i].receive(inbox[i].popleft())

    def post(i: int) -> None:
        up, down = stages[i].take_outbox()
        if up:
            inbox[i - 1].extend(up)
        if down is not None:
            inbox[i + 1].append(down)

    idle = 0
    turn = 0
    while not stages[-1].done:
        i = turn % k if rng is None else int(rng.integers(k))
        turn += 1
        deliver(i)
        step = stages[i].next_step()
        post(i)
        idle += 1
        assert idle < 200 * k, "no stage can go on, and the target is not done"
        if step is None:
            continue
        idle = 0
        accepted = stages[i].finish(step, runners[i].run(stages[i].sequence, step))
        done.steps[i].append((step, accepted))
        post(i)
        if check is not None:
            check(stages[i], runners[i])
    for i in reversed(range(k)):
        deliver(i)
        stages[i].settle()
        post(i)
    done.counters = [asdict(item.close()) for item in stages]
    done.tokens = list(stages[-1].sequence)
    return done


# -- stages that replay ---------------------------------------------------------------------------


def table(rows: Sequence[Sequence[int]], *, prompt_length: int = 3, eos: Sequence[int] = (),
          name: str = "table") -> tuple[list[StageSpec], Agreement]:
    """Scripted stages ``s0``, ``s1``, … and what each chooses after the last row's prefix."""
    stages = [stage(f"s{i}") for i in range(len(rows))]
    tokens = np.array(rows, dtype=np.int64)
    names = tuple(item.choice_key for item in stages)
    return stages, Agreement(name, prompt_length, names, tokens, eos=tuple(eos))


def replays(agreement: Agreement, *, neighbour_rate: float = 0.9) -> list[ScriptedRunner]:
    """One runner a row, ready to go; their steps take no time."""
    out = []
    for index in range(len(agreement.names)):
        runner = ScriptedRunner(Script(Constant(0.0), neighbour_rate=neighbour_rate))
        runner.begin_replay(agreement, index, 0, block=False)
        out.append(runner)
    return out


def rows_of(target: Sequence[int], *patterns: str) -> list[list[int]]:
    """Drafters' rows, drafter first, then ``target``: ``1`` agrees with it, ``0`` does not; a pattern
    repeats."""
    drafters = [[t if p[i % len(p)] == "1" else 1000 + t for i, t in enumerate(target)] for p in patterns]
    return [*drafters, list(target)]


# -- tiny models ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random Llama models and one tokenizer: ``target``, and drafters made from its
    weights with noise: ``near`` is mostly right, ``mid`` sometimes, ``far`` hardly ever."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("tiny")
    out = {}
    for name, noise in {"target": 0.0, "near": 0.01, "mid": 0.03, "far": 1.0}.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + noise * torch.randn_like(weight))
        out[name] = folder / name
        model.save_pretrained(out[name])
        word_tokenizer().save_pretrained(out[name])
    return out


def word_tokenizer() -> Any:
    """One token a word, ``w5`` is token 5; no end of sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="session")
def runners(tiny: dict[str, Path]) -> dict[str, Any]:
    """A TorchRunner for each tiny model, loaded once; ``begin`` makes one ready for a new prompt."""
    import torch

    from execute.torch_runner import TorchRunner

    torch.set_num_threads(1)
    return {name: TorchRunner(stage(name, tiny[name])) for name in tiny}


@pytest.fixture(scope="session")
def plain_greedy(tiny: dict[str, Path]) -> Any:
    """``plain_greedy(prompt, budget)``: transformers' own greedy decoding of the tiny target."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny["target"], dtype=torch.float32).eval()

    def answer(prompt: Sequence[int], budget: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=budget)
        return out[0, len(prompt) :].tolist()

    return answer


def write_tiny_run(tiny: dict[str, Path], folder: Path, *, prompts: int = 2) -> list[str]:
    """Arguments of ``pipespec`` for a validation of two tiny models; its files are put into ``folder``."""
    stages = "".join(f"- {{name: {name}, model: {tiny[name]}}}\n" for name in ("near", "target"))
    (folder / "pipeline.yaml").write_text(f"strategy: speculative\nstages:\n{stages}links: [{{lookahead: 3}}]\n",
                                          encoding="utf-8")
    lines = [" ".join(f"w{(7 * line + 3 * i) % 90 + 1}" for i in range(6)) for line in range(prompts)]
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["validate", str(folder / "pipeline.yaml"), "--prompts", str(folder / "prompts.txt"),
            "--out", str(folder / "out")]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children can be interrupted: a shell's background job ignores Ctrl-C, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
