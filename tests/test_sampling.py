"""Sampling with tiny random models: transformers' own scores, and one text whatever the strategy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STRATEGIES, VOCABULARY, Done, chain, drive, stage

from execute.fleet import Fleet
from execute.prompts import Prompt
from execute.record import check_recordable
from execute.sampler import Sampler, gumbel, sampler_of, words
from execute.scripted import Script
from execute.timing import measure, prime, probe
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.lookup import PromptLookup
from pipespec_model.messages import Step
from pipespec_model.sampling import Sampling
from pipespec_model.spec import checked
from pipespec_model.uniforms import SAMPLE, mix, word

PROMPT = (5, 6, 7, 8)
REPEATING = (11, 12, 13, 14, 11, 12, 13, 14, 11, 12)
OPTIONS = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 2.0},
    "top-k": {"temperature": 0.7, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.4},
    "length": {"temperature": 1.0, "min_new_tokens": 6},
    "all": {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
            "min_new_tokens": 4},
    "greedy-penalty": {"repetition_penalty": 1.6, "min_new_tokens": 5},
}
TEAMS = {"near": ("near", "target"), "three": ("mid", "near", "target"), "lookup": ("lookup", "near", "target")}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def sample(runners: dict[str, Any], names: Sequence[str], strategy: str, sampling: Sampling, *,
           prompt: Sequence[int] = PROMPT, budget: int = 30, eos: Sequence[int] = (), order: int | None = None) -> Done:
    """order : seed of an uneven schedule"""
    team = [PromptLookup() if name == "lookup" else runners[name] for name in names]
    for runner in team:
        if isinstance(runner, PromptLookup):
            runner.begin(prompt)
        else:
            runner.begin(prompt, sampler_of(sampling, prompt, number=0, eos=eos))
    specs = [stage(name, drafter="prompt-lookup" if name == "lookup" else "model") for name in names]
    rng = None if order is None else np.random.default_rng(order)
    return drive(chain(strategy, specs), team, prompt, budget, eos=eos, rng=rng)


# -- noise ------------------------------------------------------------------------------------------


def test_the_noise_is_the_projects_counter_based_stream() -> None:
    """A word for a token is that of ``uniforms.mix``, bit for bit, and so no device or process has its own."""
    for state in (0, 1, word(3, 0, 0, SAMPLE, 9), (1 << 64) - 1):
        ids = torch.tensor([0, 1, 2, 77, 49151, 128255])
        assert [x % (1 << 64) for x in words(state, ids).tolist()] == [mix(state, i) for i in ids.tolist()]


def test_the_noise_is_finite_and_has_gumbels_mean_and_variance() -> None:
    """Over a million ids: all finite, mean γ and variance π²/6 within five standard errors (odds of a false
    alarm below 1e-5)."""
    noise = gumbel(word(1, 2, 3, SAMPLE), torch.arange(1_000_000)).numpy()
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * noise.std() / 1000
    fourth = ((noise - noise.mean()) ** 4).mean()
    assert abs(noise.var() - math.pi**2 / 6) < 5 * math.sqrt(fourth - noise.var() ** 2) / 1000


def test_seed_prompt_and_position_each_have_noise_of_their_own() -> None:
    """Changing any one of them changes the draws: of 64 ids, no value is met twice."""
    states = {word(seed, number, 0, SAMPLE, position) for seed in (0, 1) for number in (0, 1) for position in (0, 1)}
    values = torch.cat([gumbel(state, torch.arange(64)) for state in states])
    assert len(values.unique()) == 8 * 64


# -- scores -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generate(tiny: dict[str, Any]) -> Any:
    """``generate(prompt, options, budget, eos)``: transformers' sampled text and the scores it drew from."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(tiny["target"], dtype=torch.float32).eval()

    def call(prompt: Sequence[int], options: dict[str, Any], budget: int, eos: int) -> tuple[list[int], torch.Tensor]:
        ids = torch.tensor([list(prompt)])
        wanted = {"top_k": 0, **{key: value for key, value in options.items() if key != "seed"}}
        if not options.get("temperature"):
            wanted = {key: value for key, value in wanted.items() if key in ("repetition_penalty", "min_new_tokens")}
        config = GenerationConfig(do_sample=bool(options.get("temperature")), max_new_tokens=budget, eos_token_id=eos,
                                  pad_token_id=0, output_scores=True, return_dict_in_generate=True, **wanted)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.scores)

    return call


@each_option
def test_scores_are_those_that_generate_draws_from(runners, generate, options: dict[str, Any]) -> None:
    """Along a text that transformers sampled, in one pass over many rows: the same tokens may be drawn, and their
    scores agree to float32 rounding."""
    torch.manual_seed(7)
    eos = 3
    for prompt in (PROMPT, REPEATING):
        tokens, wanted = generate(prompt, options, 12, eos)
        runner = runners["target"]
        runner.begin(prompt)
        drafts = tuple(tokens[:-1])
        logits = runner.logits([], Step("verify", 0, 0, len(prompt) + len(drafts), drafts, 1, 0, False))
        found = Sampler(Sampling(**options), prompt, number=0, eos=(eos,)).scores(logits, [], drafts)
        assert torch.equal(found.isinf(), wanted.isinf())
        assert torch.allclose(found.softmax(-1), wanted.softmax(-1), atol=2e-5)


def test_an_option_changes_what_may_be_drawn(runners) -> None:
    """Negative control of the comparison above: no two sets of options have the same scores."""
    runner = runners["target"]
    runner.begin(PROMPT)
    logits = runner.logits([], Step("prefill", 0, 0, len(PROMPT), (), 1, 0, False))
    scores = [Sampler(Sampling(**options), PROMPT, number=0, eos=(3,)).scores(logits, [], ()).softmax(-1)
              for options in OPTIONS.values()]
    assert all(float((a - b).abs().max()) > 1e-4 for i, a in enumerate(scores) for b in scores[:i])


# -- one text, whatever the strategy -------------------------------------------------------------------


@each_option
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_draws_the_text_of_the_target_alone(runners, options: dict[str, Any], strategy: str) -> None:
    """With a seed, two stages or three, a model or a lookup as drafter, whatever the schedule and the options: token
    for token what the target draws alone, and every draft is booked."""
    for names in TEAMS.values():
        for number, prompt in enumerate((PROMPT, REPEATING)):
            sampling = Sampling(**options, **({"seed": 5 + number} if options.get("temperature") else {}))
            alone = sample(runners, ["target"], "autoregressive", sampling, prompt=prompt, eos=(3,))
            done = sample(runners, names, strategy, sampling, prompt=prompt, eos=(3,), order=number or None)
            assert done.tokens == alone.tokens
            assert all(link.conserved for link in done.links())


def test_the_comparison_sees_long_blocks_and_rejections(runners) -> None:
    """Sampled drafts are accepted in blocks of three and more, and some are refused."""
    rounds = [pair for seed in range(4) for pair in sample(
        runners, TEAMS["near"], "speculative", Sampling(temperature=0.8, seed=seed)).verifications()]
    assert max(accepted for _, accepted in rounds) >= 3
    assert any(accepted < drafts for drafts, accepted in rounds)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stage_that_draws_as_the_target_is_never_refused(tiny, runners, strategy: str) -> None:
    """The target's own copy as drafter: shared noise makes every draft right (with noise of its own it would
    be right with the probability that two independent draws agree)."""
    from execute.torch_runner import TorchRunner

    twins = {"twin": TorchRunner(stage("twin", tiny["target"])), "target": runners["target"]}
    done = sample(twins, ("twin", "target"), strategy, Sampling(temperature=1.0, seed=1), budget=60,
                  order=0)
    assert done.links()[0].rejected == 0
    assert done.links()[0].accepted > 10


def test_seeds_differ_and_repeat(runners) -> None:
    """One seed, one text; of ten seeds, ten texts."""
    texts = [tuple(sample(runners, ["target"], "autoregressive", Sampling(temperature=1.0, seed=seed)).tokens)
             for seed in [*range(10), 0]]
    assert len(set(texts)) == 10
    assert texts[0] == texts[-1]


def test_no_end_of_sequence_before_the_minimum(runners) -> None:
    """A token that would end the text at once is not drawn before ``min_new_tokens``, in any strategy."""
    first = sample(runners, ["target"], "autoregressive", Sampling()).tokens[0]
    for strategy in STRATEGIES:
        done = sample(runners, TEAMS["three"], strategy, Sampling(min_new_tokens=9), eos=(first,))
        assert len(done.tokens) >= 9
        assert first not in done.tokens[:8]


def test_a_row_without_a_finite_score_names_its_position() -> None:
    """One NaN among the logits is an error that says where, never a token."""
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 4] = float("nan")
    with pytest.raises(ValueError, match="position 8 must have a finite maximum"):
        Sampler(Sampling(temperature=1.0), PROMPT, number=0).choose(logits, list(range(7)), (1, 2))


# -- with processes, and what is refused ------------------------------------------------------------------


def test_processes_draw_the_same_text(tiny) -> None:
    """Two stage processes in a pipeline and in a chain give the text that the target's process draws alone."""
    stages = [stage(name, tiny[name]) for name in ("near", "target")]
    prompt = Prompt("p", "", tokens=PROMPT, eos=(3,))
    wanted = {"max_new_tokens": 24, "number": 2, "sampling": Sampling(temperature=0.9, top_p=0.95, seed=11)}
    with Fleet(stages) as fleet:
        alone, _ = fleet.run_prompt(chain("autoregressive", stages[-1:]), prompt, **wanted)
        for strategy in STRATEGIES:
            pieces: list[int] = []
            record, _ = fleet.run_prompt(chain(strategy, stages), prompt, on_text=pieces.extend, **wanted)
            assert pieces == record.tokens == alone.tokens


def test_repeats_may_share_a_text(tiny) -> None:
    """Two numbers of a trace drawn as one number give one text; by themselves they differ."""
    alone = chain("autoregressive", [stage("target", tiny["target"])])
    prompt = Prompt("p", "", tokens=PROMPT)
    with Fleet(alone.stages) as fleet:
        texts = [fleet.run_prompt(alone, prompt, max_new_tokens=12, number=number, drawn_as=drawn_as,
                                  sampling=Sampling(temperature=1.0))[0].tokens
                 for number, drawn_as in ((4, None), (5, None), (5, 4), (9, 4))]
    assert texts[0] == texts[2] == texts[3] != texts[1]


def test_timed_steps_are_drawn_too(runners) -> None:
    """A step that is timed for a calibration, and a probe after it, choose as a run does: drawing is part of it."""
    rows: list[int] = []

    class Counting(Sampler):
        def choose(self, logits: torch.Tensor, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
            rows.append(len(logits))
            return super().choose(logits, sequence, drafts)

    runner, sampler = runners["target"], Counting(Sampling(temperature=1.0), PROMPT, number=0)
    prime(runner, list(PROMPT), list(PROMPT), sampler)
    measure(runner, list(PROMPT), 3, list(PROMPT), sampler)
    assert rows == [1, 1, 3]
    assert len(probe(runner)) >= 1
    assert set(rows[3:]) == {1}
    measure(runner, [], 5, list(PROMPT), sampler)
    counted = len(rows)
    measure(runner, [], 5, list(PROMPT))
    assert len(rows) == counted


NOT_PLAIN = [{"temperature": 0.5}, {"temperature": 0.5, "top_k": 3, "seed": 2}, {"repetition_penalty": 1.5},
             {"min_new_tokens": 4}, {"repetition_penalty": 0.9, "min_new_tokens": 2}]


@pytest.mark.parametrize("options", NOT_PLAIN, ids=str)
def test_a_scripted_stage_refuses_what_it_cannot_honour(options: dict[str, Any]) -> None:
    """A replay has no scores: the first option that would need them is named, before anything runs."""
    name, value = next(iter(options.items()))
    stages = [stage("s0")]
    fleet = Fleet(stages, scripts={"s0": Script(Constant(0.0))})
    with pytest.raises(InputError, match=rf"{name} must be absent where a stage is scripted \(stages.0, s0\), "
                                         f"got {value}"):
        fleet.check_samples(chain("autoregressive", stages), Sampling(**options))
    fleet.check_samples(chain("autoregressive", stages), Sampling())


@pytest.mark.parametrize("options", NOT_PLAIN, ids=str)
def test_a_layer_skipping_drafter_refuses_to_be_recorded_sampled(options: dict[str, Any]) -> None:
    """Its choices along a text are recorded greedy alone: a calibration names the first option given, and does
    without one."""
    name, value = next(iter(options.items()))
    skipping = stage("d", drafter="clasp", num_skipped_layers=1)
    spec = chain("speculative", [skipping, stage("t", skipping.model)])
    with pytest.raises(InputError, match=rf"{name} must be absent where a drafter skips layers \(stages.0, d\), "
                                         f"got {value}"):
        check_recordable(spec, Sampling(**options))
    check_recordable(spec, Sampling())
    check_recordable(spec, None)


@pytest.mark.parametrize(("option", "value"), [("--temperature", "0.7"), ("--min-new-tokens", "3")])
def test_a_second_try_refuses_what_counts_from_the_first_token(option: str, value: str, tmp_path, tiny, capsys) -> None:
    """--retry with an option that depends on the position is one line that names both."""
    from execute.__main__ import main

    (tmp_path / "p.yaml").write_text(f"strategy: autoregressive\nstages: [{{name: t, model: {tiny['target']}}}]\n",
                                     encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["run", str(tmp_path / "p.yaml"), "--prompt", "w5", "--retry", "1", option, value])
    assert end.value.code == 2
    assert "--retry must come without --temperature and --min-new-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -1}, "temperature must be >= 0"),
    ({"temperature": math.nan}, "temperature must be"),
    ({"temperature": 1, "top_p": 0}, "top_p must be greater than 0"),
    ({"temperature": 1, "min_p": 1.5}, "min_p must be <= 1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than 0"),
    ({"top_k": 3}, "top_k must be absent with temperature 0"),
    ({"seed": 3}, "seed must be absent with temperature 0"),
])
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    """What is out of range, or would be without effect, is an error naming the option."""
    with pytest.raises(InputError, match=message):
        checked(Sampling, options, "sampling:")


def test_the_command_echoes_what_it_drew_with(tiny, tmp_path, capsys) -> None:
    """``execute run`` writes the options and the seed into the trace's header."""
    from execute.__main__ import main

    (tmp_path / "p.yaml").write_text(f"strategy: autoregressive\nstages: [{{name: t, model: {tiny['target']}}}]\n",
                                     encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["run", str(tmp_path / "p.yaml"), "--prompt", "w5 w6", "--max-new-tokens", "5", "--temperature", "0.7",
              "--top-k", "9", "--seed", "4", "--out", str(tmp_path / "out"), "--json"])
    assert end.value.code in (0, None)
    header = json.loads((tmp_path / "out" / "trace.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert header["seed"] == 4
    assert header["options"]["sampling"] == {**Sampling().to_dict(), "temperature": 0.7, "top_k": 9, "seed": 4}
    assert len(json.loads(capsys.readouterr().out)["prompts"][0]["tokens"]) == 5
