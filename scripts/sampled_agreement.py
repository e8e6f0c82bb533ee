"""How often a drafter draws the target's token: with shared noise as here, and with the best that any coupling does.

Assumes the built-in models.  Draws texts of the target at several temperatures, and along each takes both stages'
probabilities.  Prints one line a pair and temperature, of all positions: the share at which both drew one token, the
mean probability of it given the text, the mean of 1 − TV, and that of the least that shared noise agrees,
(1 − TV)/(1 + TV).  docs/losslessness.md has the table.
"""

from __future__ import annotations

import argparse

import numpy as np

from execute.forced import Draws, forced
from execute.loading import end_of_sequence, load_tokenizer
from execute.prompts import built_in, encode
from execute.record import chance_and_overlap
from execute.sampler import sampler_of
from execute.torch_runner import TorchRunner
from execute.zoo import BUILT_IN
from pipespec_model.messages import Step
from pipespec_model.sampling import Sampling
from pipespec_model.spec import StageSpec

PAIRS = {"int8 → built-in": (StageSpec(name="int8", model=BUILT_IN, quantize="int8"),
                             StageSpec(name="full", model=BUILT_IN)),
         "tiny-s → tiny-l": (StageSpec(name="tiny-s", model="tiny-s"), StageSpec(name="tiny-l", model="tiny-l"))}


def text_of(target: TorchRunner, prompt: tuple[int, ...], draws: Draws, num_tokens: int) -> list[int]:
    """What the target alone draws."""
    target.begin(prompt, sampler_of(draws.sampling, prompt, number=draws.number, eos=draws.eos))
    text: list[int] = []
    while len(text) < num_tokens and not (text and text[-1] in draws.eos):
        cached = len(prompt) + len(text) - 1 if text else 0
        text += target.run(text, Step("decode", len(text), cached, 1, (), 1, 0, False))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("pair | temperature | positions | drawn alike | shared noise | 1 - TV | (1 - TV)/(1 + TV)")
    for pair, (drafter, target) in PAIRS.items():
        runners = TorchRunner(drafter), TorchRunner(target)
        tokenizer = load_tokenizer(target.model)
        chosen = built_in("evaluation", model=target.model)[:: max(1, 12 // args.prompts)][: args.prompts]
        prompts = encode(chosen, tokenizer, end_of_sequence(target.model, tokenizer))
        for temperature in args.temperatures:
            same, figures = [], []
            for number, prompt in enumerate(prompts):
                draws = Draws(Sampling(temperature=temperature, seed=args.seed), number, prompt.eos)
                text = text_of(runners[1], prompt.tokens, draws, args.tokens)
                mine, own = (forced(runner, stage, prompt.tokens, text, draws)
                             for runner, stage in zip(runners, (drafter, target), strict=True))
                same += [a == b for a, b in zip(mine.choices, text, strict=True)]
                figures.append(chance_and_overlap(own, mine, text))
            chance, overlap = np.concatenate(figures, 1)
            error = np.sqrt(np.mean(same) * (1 - np.mean(same)) / len(same))
            print(f"{pair} | {temperature:g} | {len(same)} | {np.mean(same):.3f} ± {error:.3f} | {chance.mean():.3f} | "
                  f"{overlap.mean():.3f} | {(overlap / (2 - overlap)).mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
