"""The shape of a decoder-only transformer, from its config.json: weights, cache and arithmetic, exactly counted.

Assumes gated feed-forward layers (three matrices) and grouped-query attention, as Llama and its kin have; other
kinds are refused rather than guessed.  Biases and the norms of single heads, below 0.1% of the weights where a kind
has them, are not counted.  Reads the file alone: no torch, no download.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .spec import read_document

# Model types of transformers that have such layers, and whose files say whether the head is tied.
GATED = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, all positive whole numbers.

    layers, hidden, intermediate : depth, width, width of the feed-forward layers
    heads, kv_heads, head_size : of attention; fewer ``kv_heads`` than ``heads`` share a cache
    vocabulary : rows of the embedding
    tied_head : whether the output head is the embedding
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied_head: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_size", "vocabulary"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"model.{name}", "must be a whole number >= 1", value)
        if self.heads % self.kv_heads:
            raise InputError("model.heads", f"must be a multiple of kv_heads ({self.kv_heads})", self.heads)

    @property
    def layer_weights(self) -> int:
        """Of the matrices of all layers: what a quantised model quantises."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All of them; norms are counted too.

        >>> ModelShape(32, 4096, 14336, 32, 8, 128, 128256).weights  # Llama-3.1-8B
        8030261248
        """
        norms = (2 * self.layers + 1) * self.hidden
        return self.layer_weights + self.head_weights * (1 if self.tied_head else 2) + norms

    @property
    def cache_values(self) -> int:
        """Keys and values a token of context.

        >>> ModelShape(32, 4096, 14336, 32, 8, 128, 128256).cache_values
        65536
        """
        return 2 * self.layers * self.kv_heads * self.head_size

    @property
    def flops_per_token(self) -> int:
        """Two for each weight that is multiplied: the layers and the head, not the embedding's look-up."""
        return 2 * (self.layer_weights + self.head_weights)

    @property
    def flops_per_cached_token(self) -> int:
        """Of attention, by token and token of context: scores and weighted values."""
        return 4 * self.layers * self.heads * self.head_size


def read_shape(path: str | Path) -> ModelShape:
    """From a config.json of transformers, or the folder that holds it.

    Raises InputError for a kind of model that is not counted here.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    data: Any = read_document(path)
    if not isinstance(data, dict):
        raise InputError(str(path), "must hold a mapping", type(data).__name__)
    if data.get("model_type") not in GATED:
        raise InputError(f"{path}: model_type", f"must be one of {', '.join(GATED)}", data.get("model_type"),
                         "measure this model instead (pipespec validate calibrates)")

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if data.get(key) is not None:
                return data[key]
        if default is None:
            raise InputError(f"{path}: {keys[0]}", "must be there")
        return default

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    made = {"layers": number("num_hidden_layers"), "hidden": hidden, "intermediate": number("intermediate_size"),
            "heads": heads, "kv_heads": number("num_key_value_heads", default=heads),
            "vocabulary": number("vocab_size")}
    try:
        made["head_size"] = number("head_dim", default=hidden // heads)
        return ModelShape(**made, tied_head=bool(data.get("tie_word_embeddings", False)))
    except (TypeError, ZeroDivisionError):
        raise InputError(f"{path}: num_attention_heads", "must be a whole number >= 1", heads) from None
