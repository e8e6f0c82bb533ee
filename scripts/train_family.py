"""Train a family of three Llama models with one tokenizer, on text that comes with Python.

None is part of the package yet: in 34 minutes on two cores the smaller two came to agree with the
largest at 0.53 and 0.69 of held-out positions, too little to draft with.

    python scripts/train_family.py OUT [--minutes 40]

The text is the standard library itself: its source and the manual's topics (``pydoc_data``).  The
largest model learns the text; the smaller two then learn what the largest would say (soft labels and
its first choice), because a drafter is worth what it shares with its target.  Files are split by the
hash of their name; agreement is measured on the part that no model saw, teacher-forced.

Seeded; another Python version has another standard library and gives slightly other weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
CONTEXT = 256
BATCH = 8
SEED = 7
END = "<|end|>"
SHAPES = {  # hidden size, layers, heads, key-value heads, intermediate size
    "tiny-s": (96, 2, 3, 1, 256),
    "tiny-m": (144, 5, 4, 2, 384),
    "tiny-l": (192, 9, 6, 2, 544),
}
SHARE = {"tiny-l": 0.62, "tiny-m": 0.25, "tiny-s": 0.13}  # of the time


def texts() -> tuple[list[str], list[str]]:
    """(training, held-out) documents."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "encodings", "site-packages", "lib2to3", "__pycache__"}
    out: tuple[list[str], list[str]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skip & set(name.parts):
            held = hashlib.sha256(str(name).encode()).digest()[0] < 13  # 5%
            out[held].append(path.read_text(encoding="utf-8", errors="replace"))
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        out[hashlib.sha256(name.encode()).digest()[0] < 13].append(text)
    return out


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def ids(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> Tensor:
    end = tokenizer.eos_token_id
    return torch.tensor([i for text in documents for i in [*tokenizer.encode(text), end]], dtype=torch.long)


def new_model(name: str) -> LlamaForCausalLM:
    hidden, layers, heads, kv_heads, inner = SHAPES[name]
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, attn_implementation="sdpa"))


def batches(data: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])


def train(name: str, data: Tensor, *, seconds: float, teacher: LlamaForCausalLM | None) -> LlamaForCausalLM:
    """Train for that long: the learning rate follows the clock, so the schedule always ends."""
    torch.manual_seed(SEED)
    model = new_model(name).train()
    rate = 3e-3 if teacher else 2e-3
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    begun, smooth = time.monotonic(), 0.0
    for step, batch in enumerate(batches(data, torch.Generator().manual_seed(SEED))):
        done = (time.monotonic() - begun) / seconds
        if done >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        inputs, labels = batch[:, :-1], batch[:, 1:]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs, use_cache=False).logits.float().flatten(0, 1)
            if teacher is None:
                loss = F.cross_entropy(logits, labels.flatten())
            else:
                with torch.no_grad():
                    wanted = teacher(inputs, use_cache=False).logits.float().flatten(0, 1)
                loss = (F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True,
                                 reduction="batchmean") + F.cross_entropy(logits, wanted.argmax(-1)))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if step % 200 == 0:
            print(f"{name} {100 * done:.0f}% step {step} loss {smooth:.3f}", file=sys.stderr, flush=True)
    return model.eval()


@torch.inference_mode()
def agreement(models: dict[str, LlamaForCausalLM], data: Tensor, windows: int = 64) -> dict[str, float]:
    """Share of held-out positions where a model's first choice is the largest's, and the largest's own
    accuracy; contexts of 64 tokens and more."""
    starts = torch.linspace(0, len(data) - CONTEXT - 2, windows).long().tolist()
    batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    first = {name: model(batch[:, :-1], use_cache=False).logits[:, 64:].argmax(-1) for name, model in models.items()}
    largest = first["tiny-l"]
    out = {name: float((choice == largest).float().mean()) for name, choice in first.items()}
    return {**out, "accuracy": float((largest == batch[:, 65:]).float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=40.0)
    args = parser.parse_args()
    seen, held = texts()
    tokenizer = train_tokenizer(seen)
    data, unseen = ids(tokenizer, seen), ids(tokenizer, held)
    print(f"{len(data)} training tokens, {len(unseen)} held out", file=sys.stderr)
    made: dict[str, LlamaForCausalLM] = {}
    for name in sorted(SHAPES, key=lambda name: -SHARE[name]):
        made[name] = train(name, data, seconds=60 * args.minutes * SHARE[name], teacher=made.get("tiny-l"))
        # What is shipped is what is judged.
        made[name] = made[name].half().float()
        folder = args.out / name
        made[name].half().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made[name].float()
    figures = agreement(made, unseen)
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in made.items()}
    card = {"parameters": sizes, "agreement_with_tiny-l": figures, "python": sys.version.split()[0],
            "training_tokens": len(data), "held_out_tokens": len(unseen), "minutes": args.minutes, "seed": SEED}
    (args.out / "family.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(card))


if __name__ == "__main__":
    main()
