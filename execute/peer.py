"""The transformers library as a peer: its own ``generate()`` in a process of its own.

A twin of a contender does the same work the library's way: plain greedy decoding, assisted generation
with the same drafter, prompt lookup.  It loads the same weights, runs on the same cores with as many
threads, and stops at the same tokens.  Sampled, it draws with the same settings and noise of its own: its texts are
others, of the same distribution.  What differs is the library's choice: its assistant reads the
prompt with the drafter's own (quantised) weights, and its lookup takes the first match, of one token
at the least, where ours takes the last, of two.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from pipespec_model.errors import InputError, StageError
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec, StageSpec
from pipespec_model.trace import PromptRecord, StepRecord
from pipespec_model.uniforms import SAMPLE, word

from .fleet import LOAD_TIMEOUT_S
from .processes import end_process, start
from .prompts import Prompt
from .worker import set_threads

PEERS = ("transformers",)
ANSWER_TIMEOUT_S = 3600.0


def has_twin(pipeline: PipelineSpec) -> bool:
    """Whether the library can do it: one stage at a time, at most one drafter, that is a model or a lookup."""
    return pipeline.strategy != "pipelined" and len(pipeline.stages) <= 2 and not (
        pipeline.stages[0].hybrid or pipeline.stages[0].clasp)


class Peer:
    """The parent's side.  A context manager: leaving it ends the process.

    pipelines : resolved (with cores and threads), all with one target; each gets a twin
    """

    def __init__(self, pipelines: Sequence[PipelineSpec]) -> None:
        self.pipelines = list(pipelines)
        self.process: BaseProcess | None = None
        self._end: Connection | None = None
        self._current = ""

    def __enter__(self) -> Peer:
        context = get_context("spawn")
        self._end, theirs = context.Pipe()
        self.process = context.Process(target=main, name="transformers", daemon=True, args=(self.pipelines, theirs))
        try:
            start(self.process)
            theirs.close()
            self._receive(LOAD_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._end is not None:
            self._end.close()  # the process sees the end of its commands
        if self.process is not None:
            end_process(self.process)

    def run_prompt(self, pipeline: PipelineSpec, prompt: Prompt, *, max_new_tokens: int, number: int = 0,
                   repeat: int = 0, sampling: Sampling | None = None, drawn_as: int | None = None,
                   ) -> tuple[PromptRecord, list[StepRecord]]:
        """As ``Fleet.run_prompt``, by the twin of ``pipeline``.  ``generate()`` tells of no step and of no
        earlier time than its end; its target's forwards are counted (``target_steps``)."""
        assert self._end is not None
        self._current = f", while working on prompt {prompt.name!r}"
        try:
            self._end.send((self.pipelines.index(pipeline), prompt.tokens, prompt.eos, max_new_tokens, sampling,
                            number if drawn_as is None else drawn_as))
        except (BrokenPipeError, ConnectionResetError):
            raise self._dead() from None
        tokens, seconds, forwards = self._receive(ANSWER_TIMEOUT_S)
        self._current = ""
        return PromptRecord(
            prompt=number, name=prompt.name, prompt_length=len(prompt.tokens), tokens=tokens, total_s=seconds,
            ttft_s=seconds, counters=[{"target_steps": forwards}], category=prompt.category, repeat=repeat), []

    def _receive(self, timeout_s: float) -> tuple[Any, ...]:
        assert self._end is not None
        assert self.process is not None
        ready = connection.wait([self._end, self.process.sentinel], timeout_s)
        if not ready:
            raise StageError(f"peer 'transformers' did not answer within {timeout_s:.0f} s{self._current}")
        try:
            # What it said before it ended comes first.
            verb, *body = self._end.recv()
        except (EOFError, ConnectionResetError):
            raise self._dead() from None
        if verb == "input":
            raise InputError("peer 'transformers':", body[0])
        if verb == "failure":
            raise StageError(f"peer 'transformers' failed: {body[0]}{self._current}")
        return tuple(body)

    def _dead(self) -> StageError:
        assert self.process is not None
        self.process.join(timeout=1)
        return StageError(f"peer 'transformers' ended with exit code {self.process.exitcode}{self._current}")


class Twin:
    """One contender's work by ``generate()``, which keeps nothing between prompts.

    forwards : of the target, in the last call
    """

    def __init__(self, pipeline: PipelineSpec, model: Any) -> None:
        self.target, self._model = pipeline.target, model
        self._options: dict[str, Any] = {}
        self._assistant: dict[str, Any] = {}
        self.forwards = 0
        if len(pipeline.stages) == 1:
            return
        drafter, lookahead = pipeline.stages[0], pipeline.links[0].lookahead
        if drafter.block:
            self._options = {"prompt_lookup_num_tokens": lookahead, "max_matching_ngram_size": drafter.max_ngram}
        else:
            self._assistant = {"assistant_model": assistant(drafter, lookahead)}

    def generate(self, prompt: Sequence[int], eos: Sequence[int], max_new_tokens: int, *,
                 sampling: Sampling | None = None, number: int = 0) -> tuple[list[int], float]:
        """The new tokens, and the seconds of ``generate()`` alone.

        number : of the text; with the seed it decides what is drawn
        """
        import torch
        from transformers import GenerationConfig

        ids = torch.tensor([list(prompt)], device=self._model.device)
        mask = torch.ones_like(ids)
        # The model's own defaults (a temperature, penalties, other ends) would fill what is not given here.
        self._model.generation_config = GenerationConfig(eos_token_id=list(eos) or None)
        wanted = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=list(eos) or None,
                                  pad_token_id=eos[0] if eos else 0, **generation_options(sampling), **self._options)
        if sampling is not None:
            torch.manual_seed(word(sampling.seed, number, 0, SAMPLE) >> 1)
        self.forwards = 0
        counting = self._model.register_forward_pre_hook(self._count)
        begun = time.perf_counter()
        out = self._model.generate(ids, attention_mask=mask, generation_config=wanted, **self._assistant)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        seconds = time.perf_counter() - begun
        counting.remove()
        return out[0, len(prompt) :].tolist(), seconds


    def _count(self, *_: Any) -> None:
        self.forwards += 1


def generation_options(sampling: Sampling | None) -> dict[str, Any]:
    """``generate()``'s own words for it; what is not drawn has none of temperature, top-k, top-p and min-p."""
    if sampling is None:
        return {"do_sample": False}
    found: dict[str, Any] = {"do_sample": bool(sampling.temperature)}
    if sampling.temperature:
        found |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        found |= {"min_p": sampling.min_p} if sampling.min_p else {}
    if sampling.repetition_penalty != 1:
        found["repetition_penalty"] = sampling.repetition_penalty
    return found | ({"min_new_tokens": sampling.min_new_tokens} if sampling.min_new_tokens else {})


def assistant(drafter: StageSpec, lookahead: int) -> Any:
    """The drafter as an assistant that always drafts ``lookahead`` tokens, however sure it is."""
    from transformers import GenerationConfig

    from .int8 import int8_model
    from .loading import load_model

    model = load_model(drafter)
    made = int8_model(model) if drafter.quantize == "int8" else model
    made.generation_config = GenerationConfig(
        num_assistant_tokens=lookahead, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    return made


def serve(pipelines: Sequence[PipelineSpec], parent: Connection) -> None:
    from transformers import logging

    from .loading import load_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = pipelines[0].target
    set_threads(target.threads, target.cores or (), torch_loaded=True)
    model = load_model(target)
    twins = [Twin(pipeline, model) for pipeline in pipelines]
    parent.send(("ready",))
    while True:
        index, prompt, eos, max_new_tokens, sampling, number = parent.recv()
        twin = twins[index]
        set_threads(twin.target.threads, twin.target.cores or (), torch_loaded=True)
        made = twin.generate(prompt, eos, max_new_tokens, sampling=sampling, number=number)
        parent.send(("done", *made, twin.forwards))


def main(pipelines: Sequence[PipelineSpec], parent: Connection) -> None:
    """Entry point of the process."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The library's advice is not for whoever reads our progress on stderr.
    warnings.simplefilter("ignore")
    try:
        serve(pipelines, parent)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone or has done
    except InputError as error:
        parent.send(("input", str(error)))
    except Exception as error:
        parent.send(("failure", f"{type(error).__name__}: {error}"))
