"""Train the built-in family of three Llama models with one tokenizer, on text that comes with Python.

    python scripts/train_family.py OUT [--scale 1.0]

The text is the standard library itself: its source and the manual's topics (``pydoc_data``).  The
largest model learns the text; the smaller two then learn what the largest would say (soft labels and
its first choice), because a drafter is worth what it shares with its target.  Files are split by the
hash of their name; agreement is measured on the part that no model saw, teacher-forced.

OUT receives a folder for each model and ``family.json`` with the figures.  A model that OUT holds
already is not trained again.

Seeded; another Python version has another standard library and gives slightly other weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VOCABULARY = 384
TOKENS = 4096  # of a batch
CONTEXTS = ((0.7, 128), (1.0, 256))  # up to this share of the steps, windows of that many tokens
STEPS = {"tiny-l": 1800, "drafters": 1800}
SEED = 7
END = "<|end|>"
SHAPES = {  # hidden size, layers, heads, key-value heads, intermediate size
    "tiny-s": (128, 2, 4, 2, 256),
    "tiny-m": (192, 4, 4, 2, 480),
    "tiny-l": (192, 8, 4, 2, 480),
}


def texts() -> tuple[list[str], list[str]]:
    """(training, held-out) documents."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    # Tables, generated files, and what not every installation has.
    skip = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "lib2to3", "pydoc_data",
            "msilib", "__pycache__"}
    documents = {f"topic {name}": text for name, text in topics.items()}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not skip & set(name.parts) and not name.name.startswith("_sysconfigdata"):
            documents[name.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    out: tuple[list[str], list[str]] = ([], [])
    for name, text in sorted(documents.items()):
        out[hashlib.sha256(name.encode()).digest()[0] < 13].append(text)  # 5% held out
    seen, held = out
    known = {passage for text in seen for passage in passages(text)}
    # What was held out by name may be a copy of what was not.
    return seen, [text for text in held if len(known & passages(text)) <= 0.05 * len(passages(text))]


def passages(text: str) -> set[str]:
    """Every five lines in a row, blank ones and indentation apart."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {"\n".join(lines[i : i + 5]) for i in range(len(lines) - 4)}


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


def start(name: str, teacher: LlamaForCausalLM | None) -> LlamaForCausalLM:
    """A new model; one as wide as its teacher begins as every other of its layers."""
    torch.manual_seed(SEED)
    model = new_model(name)
    if teacher is not None and SHAPES[name][0] == teacher.config.hidden_size:
        every = teacher.config.num_hidden_layers // len(model.model.layers)
        model.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
        model.model.norm.load_state_dict(teacher.model.norm.state_dict())
        for mine, its in zip(model.model.layers, teacher.model.layers[::every], strict=True):
            mine.load_state_dict(its.state_dict())
    return model


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float,
           **_: Any) -> tuple[Tensor, None]:
    """Attention in float32: torch's bfloat16 one is five times slower backwards on a CPU."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    out = F.scaled_dot_product_attention(query.float(), key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous().to(query.dtype), None


class Learner:
    """A float32 model and the bfloat16 copy that computes, because a CPU multiplies that faster."""

    def __init__(self, model: LlamaForCausalLM, *, matrix_rate: float, rate: float) -> None:
        self.model = model
        self.fast = working_copy(model).train()
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if not any(p is m for m in matrices)]
        self.optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.05), matrix_rate),
            (torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0), rate)]

    def learn(self, loss: Tensor, speed: float) -> None:
        """One step against the loss, at that share of the full learning rates."""
        loss.backward()
        pairs = list(zip(self.model.parameters(), self.fast.parameters(), strict=True))
        for slow, fast in pairs:
            slow.grad, fast.grad = fast.grad.float(), None
        for optimiser, rate in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * speed
            optimiser.step()
        with torch.no_grad():
            for slow, fast in pairs:
                fast.copy_(slow)


def working_copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config._attn_implementation = "float32"
    return copy.bfloat16()


def batches(data: Tensor, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        context = next(length for share, length in CONTEXTS if step < share * steps)
        starts = torch.randint(len(data) - context - 1, (round(TOKENS / context),), generator=generator)
        yield torch.stack([data[start : start + context + 1] for start in starts.tolist()])


def logits(model: LlamaForCausalLM, inputs: Tensor) -> Tensor:
    return model(inputs, use_cache=False).logits.float().flatten(0, 1)


def train(learners: dict[str, Learner], data: Tensor, *, steps: int, teacher: LlamaForCausalLM | None,
          report: Any) -> dict[str, float]:
    """Train all on the same batches; returns what it took."""
    wise = None if teacher is None else working_copy(teacher).eval()
    begun, times = time.process_time(), []
    for step, batch in enumerate(batches(data, steps)):
        tick = time.perf_counter()
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        speed = min(1.0, (step + 1) / 100, 0.01 + 1.6 * (1 - step / steps))
        if wise is not None:
            with torch.no_grad():
                wanted = logits(wise, inputs).log_softmax(-1)
        losses = []
        for learner in learners.values():
            said = logits(learner.fast, inputs)
            if wise is None:
                loss = F.cross_entropy(said, labels)
            else:
                loss = (F.kl_div(said.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
                        + F.cross_entropy(said, wanted.argmax(-1)))
            learner.learn(loss, speed)
            losses.append(f"{loss.item():.3f}")
        times.append(time.perf_counter() - tick)
        if step % 50 == 0:
            note = report() if step % 400 == 0 and step else ""
            print(f"{'+'.join(learners)} {step}/{steps} {statistics.median(times[-50:]):.2f} s loss {' '.join(losses)}"
                  f" {note}", file=sys.stderr, flush=True)
    return {"steps": steps, "minutes": steps * statistics.median(times) / 60,
            "cpu_minutes": (time.process_time() - begun) / 60}


@torch.inference_mode()
def agreement(models: dict[str, LlamaForCausalLM], data: Tensor, windows: int = 256) -> dict[str, float]:
    """Share of held-out positions where a model's first choice is the largest's, and the largest's own
    accuracy; contexts of 64 to 256 tokens."""
    starts = torch.linspace(0, len(data) - 258, windows).long().tolist()
    batch = torch.stack([data[start : start + 257] for start in starts])
    first = {name: torch.cat([model(part[:, :-1], use_cache=False).logits[:, 64:].argmax(-1)
                              for part in batch.split(32)]) for name, model in models.items()}
    out = {name: float((choice == first["tiny-l"]).float().mean()) for name, choice in first.items()}
    return {**out, "accuracy": float((first["tiny-l"] == batch[:, 65:]).float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps (for a trial)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    ALL_ATTENTION_FUNCTIONS.register("float32", attend)
    seen, held = texts()
    tokenizer = train_tokenizer(seen)
    data, unseen = ids(tokenizer, seen), ids(tokenizer, held)
    print(f"{len(data)} training tokens, {len(unseen)} held out, {sum(map(len, seen))} characters", file=sys.stderr)
    made: dict[str, LlamaForCausalLM] = {}
    took: dict[str, dict[str, float]] = {}
    for phase, names in {"tiny-l": ["tiny-l"], "drafters": ["tiny-m", "tiny-s"]}.items():
        teacher = made.get("tiny-l")
        if all((args.out / name / "config.json").exists() for name in names):
            made.update({name: LlamaForCausalLM.from_pretrained(args.out / name, dtype=torch.float32).eval()
                         for name in names})
            continue
        learners = {name: Learner(start(name, teacher), matrix_rate=0.02, rate=3e-3) for name in names}
        models = made | {name: learner.model for name, learner in learners.items()}
        took[phase] = train(learners, data, steps=round(STEPS[phase] * args.scale), teacher=teacher,
                            report=lambda models=models: agreement(models, unseen, 32))
        for name in names:
            # What is shipped is what is judged, and what teaches.
            models[name].half().save_pretrained(args.out / name)
            tokenizer.save_pretrained(args.out / name)
            made[name] = models[name].float().eval()
    figures = agreement(made, unseen)
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in made.items()}
    card: dict[str, Any] = {
        "parameters": sizes, "agreement_with_tiny-l": figures, "python": sys.version.split()[0],
        "training_tokens": len(data), "held_out_tokens": len(unseen), "took": took, "seed": SEED}
    (args.out / "family.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(card))


if __name__ == "__main__":
    main()
