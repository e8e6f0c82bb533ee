"""Tiny random models of several families, for the tests of layer skipping."""

from __future__ import annotations

from typing import Any

import torch
import transformers

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
