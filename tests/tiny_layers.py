"""Tiny random models of several families, for the tests of layer skipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import word_tokenizer

from pipespec_model.spec import StageSpec

COMMON = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
          "max_position_embeddings": 256, "initializer_range": 0.25,
          "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
FAMILIES = ("Llama", "Qwen2", "Mistral", "Gemma", "GPT2")


def make(family: str, **changes: Any) -> Any:
    """A random model in evaluation mode; the same at every call."""
    options = {**COMMON, **changes}
    if family == "Mistral":
        options["sliding_window"] = None
    if family == "GPT2":
        options = {"vocab_size": 96, "n_embd": 48, "n_layer": options["num_hidden_layers"], "n_head": 4,
                   "n_positions": 256, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.25}
    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, kind)(config).eval()


GENTLE_LAYERS = 6


def save_gentle(folder: Path, *, noise: float = 0.0) -> Path:
    """A model of six layers whose later ones change little, so that skipping them is often right.

    noise : relative, on every weight; with little of it the model often agrees with that without
    """
    model = make("Llama", num_hidden_layers=GENTLE_LAYERS)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(0.05)
        for weight in model.parameters() if noise else ():
            weight.mul_(1 + noise * torch.randn_like(weight))
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def clasp(folder: Path, skipped: int, interval: int = 8, threshold: float = 0.0, **options: Any) -> StageSpec:
    """A layer-skipping stage of that model, named by its settings."""
    return StageSpec(name=f"clasp-{skipped}-{interval}-{threshold:g}{options.get('quantize') or ''}", model=str(folder),
                     drafter="clasp", num_skipped_layers=skipped, layer_opt_interval=interval,
                     draft_exit_threshold=threshold, **options)
