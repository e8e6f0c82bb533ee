"""Any Hugging Face decoder whose layers are a list, run layer by layer on an in-place cache.

The rotary families (Llama, Qwen2, Mistral, Gemma, …) keep their parts in ``model``, the GPT-2 family
in ``transformer``.  Names prove nothing, so a model is accepted once a short text, run layer by layer
and in two passes, gives the model's own logits; any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from execute.decoders import InPlaceCache, LayeredDecoder, LlamaDecoder, Rows, forward_layers, rivals_mask, supported
from execute.int8 import int8_model
from execute.loading import check_can_roll_back
from execute.skips import KEEP_ALL, SkipSet
from pipespec_model.errors import InputError

PROOF_TOKENS = 6


def layered(model: Any) -> LayeredDecoder:
    """The fastest layer-by-layer decoder of a model.  Raises InputError naming a model that has none."""
    check_can_roll_back(model.config, type(model).__name__)
    return LlamaDecoder(model) if supported(model) else LayerwiseDecoder(model)


def layered_int8(model: Any) -> LayeredDecoder:
    """The same with int8 weights (execute.int8)."""
    return LlamaDecoder(model, int8=True) if supported(model) else LayerwiseDecoder(int8_model(model), proven=True)


class LayerwiseDecoder:
    """transformers' own layers, called one by one.

    proven : do without the check (a quantised copy of a model that passed it has other logits)
    """

    def __init__(self, model: Any, *, proven: bool = False) -> None:
        self._model, self._device, self._dtype = model, model.device, model.dtype
        body = getattr(model, "model", None) or getattr(model, "transformer", None)
        self._rotary = getattr(body, "rotary_emb", None)
        self._embedding = getattr(body, "embed_tokens", None) or getattr(body, "wte", None)
        self._positions = None if self._rotary is not None else getattr(body, "wpe", None)
        self._layers = getattr(body, "layers", None) or getattr(body, "h", None)
        self._norm = getattr(body, "norm", None) or getattr(body, "ln_f", None)
        self._head = getattr(model, "lm_head", None)
        parts = (self._embedding, self._layers, self._norm, self._head)
        if any(part is None for part in parts) or (self._rotary is None and self._positions is None):
            raise self._refused("its layers are not a list between an embedding and a head")
        assert self._layers is not None
        self.num_layers = len(self._layers)
        self.linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not proven:
            self._prove()

    def _refused(self, reason: str) -> InputError:
        return InputError(f"model {type(self._model).__name__}", f"cannot be run layer by layer ({reason})",
                          mend="layer skipping needs a decoder of the Llama or the GPT-2 kind")

    @torch.inference_mode()
    def _prove(self) -> None:
        ids = [i % self._model.config.vocab_size for i in range(1, PROOF_TOKENS + 1)]
        try:
            expected = self._model(torch.tensor([ids], device=self._device), use_cache=False).logits[0]
            cache, first = self.new_cache(), PROOF_TOKENS // 2
            found = torch.cat([self.forward(ids[:first], 0, first, cache),
                               self.forward(ids[first:], first, PROOF_TOKENS - first, cache)])
        except (AttributeError, TypeError, ValueError, RuntimeError, KeyError) as error:
            raise self._refused(f"{type(error).__name__}: {str(error)[:80]}") from None
        scale = expected.abs().max().float()
        allowed = 1e-4 if self._dtype == torch.float32 else 0.05
        if not (found - expected).abs().max().float() <= allowed * scale:
            raise self._refused("its logits are not those of its layers in turn")

    def new_cache(self) -> InPlaceCache:
        config = self._model.config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return InPlaceCache((self.num_layers, kv_heads, size), self._dtype, self._device)

    def forward(self, ids: Sequence[int], start: int, keep: int, cache: InPlaceCache, *, skip: SkipSet = KEEP_ALL,
                states: list[Tensor] | None = None) -> Tensor:
        return forward_layers(self, ids, start, keep, cache, skip=skip, states=states)

    def embed(self, ids: Sequence[int], start: int) -> Tensor:
        assert self._embedding is not None
        x: Tensor = self._embedding(torch.tensor(ids, device=self._device))
        if self._positions is not None:
            x = x + self._positions(torch.arange(start, start + len(ids), device=self._device))
        return x

    def rows(self, start: int, width: int) -> Rows:
        positions = torch.arange(start, start + width, device=self._device)
        mask = torch.arange(start + width, device=self._device) <= positions[:, None] if width > 1 else None
        return self._at(positions, start, mask)

    def rivals(self, positions: Sequence[int], at: int) -> Rows:
        return self._at(torch.tensor(positions, device=self._device), at, rivals_mask(positions, at, self._device))

    def _at(self, positions: Tensor, start: int, mask: Tensor | None) -> Rows:
        nothing = torch.empty(0, device=self._device, dtype=self._dtype)
        cos, sin = (nothing, nothing) if self._rotary is None else self._rotary(nothing, positions[None])
        return Rows(start, start + len(positions), mask, cos, sin)

    def layer(self, index: int, x: Tensor, rows: Rows, cache: InPlaceCache) -> Tensor:
        assert self._layers is not None
        turn = {"position_embeddings": (rows.cos, rows.sin)} if self._rotary is not None else {}
        mask = None if rows.mask is None else rows.mask[None, None]
        out: Tensor = self._layers[index](x[None], attention_mask=mask, cache=_Writes(cache, rows), use_cache=True,
                                          **turn)
        return out[0]

    def attention(self, index: int, x: Tensor, rows: Rows, cache: InPlaceCache) -> Tensor:
        raise self._refused("attention and MLP apart")

    def mlp(self, index: int, x: Tensor) -> Tensor:
        raise self._refused("attention and MLP apart")

    def head(self, x: Tensor) -> Tensor:
        assert self._norm is not None
        assert self._head is not None
        out: Tensor = self._head(self._norm(x))
        return out


class _Writes:
    """What transformers' attention takes for a cache: one pass that writes ``rows`` in place."""

    def __init__(self, cache: InPlaceCache, rows: Rows) -> None:
        self._cache, self._rows = cache, rows

    def update(self, keys: Tensor, values: Tensor, index: int, **_: Any) -> tuple[Tensor, Tensor]:
        """keys, values : ``[1, kv heads, width, head size]``; returns all rows up to the last written."""
        start, end = self._rows.start, self._rows.end
        out = []
        for all_rows, new in ((self._cache.keys[index], keys), (self._cache.values[index], values)):
            all_rows[start:end] = new[0].transpose(0, 1)
            out.append(all_rows[:end].transpose(0, 1)[None])
        return out[0], out[1]
