"""One forward pass over a key-value cache: the two ways to run a model.

``GenericDecoder`` calls transformers' own forward and works for every causal model.
``LlamaDecoder`` runs the Llama architecture from the same weights with fewer, fused operations and a
cache that is written in place: at one token a step, half of an int8 drafter's time on a CPU is the
Python and dispatch of transformers' forward.  Both give the same logits up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from .int8 import Int8Linear, int8_model
from .linear import PackedLinear, can_pack
from .skips import KEEP_ALL, SkipSet

Linear = Callable[[Tensor], Tensor]


class Decoder(Protocol):
    """A model that extends a cache.  ``linears``: its linear layers, by far most of the work."""

    linears: list[Any]

    def new_cache(self) -> Any: ...

    def forward(self, ids: Sequence[int], start: int, keep: int, cache: Any) -> Tensor:
        """Feed ``ids`` at positions ``start``, …; returns the last ``keep`` logits ``[keep, vocab]``."""
        ...


def decoders(model: Any, *, int8: bool) -> tuple[Decoder, Decoder]:
    """(prefill, step) for a loaded model; they share one kind of cache and are the same object unless
    quantised."""
    if supported(model):
        plain: Decoder = LlamaDecoder(model)
        return plain, LlamaDecoder(model, int8=True) if int8 else plain
    plain = GenericDecoder(model)
    return plain, GenericDecoder(int8_model(model)) if int8 else plain


class GenericDecoder:
    """Any causal model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = model.device
        self.linears = [module for module in model.modules() if isinstance(module, nn.Linear)]

    def new_cache(self) -> Any:
        return DynamicCache()

    def forward(self, ids: Sequence[int], start: int, keep: int, cache: Any) -> Tensor:
        positions = torch.arange(start, start + len(ids), device=self._device)
        out = self._model(torch.tensor([ids], device=self._device), position_ids=positions[None], cache=cache,
                          logits_to_keep=keep)
        return out.logits[0]


class InPlaceCache:
    """Keys and values of all layers, ``[layer, capacity, kv heads, head size]``, overwritten in place.

    ``get_seq_length`` and ``crop`` mean what they mean for transformers' caches.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """shape : layers, kv heads, head size"""
        self._shape = (shape[0], 0, *shape[1:])
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.keys = torch.empty(self._shape, **self._options)
        self.values = torch.empty(self._shape, **self._options)
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, minus: int) -> None:
        self.length += minus

    def make_room(self, length: int) -> None:
        if length <= self.keys.shape[1]:
            return
        layers, _, heads, size = self._shape
        capacity = max(2 * self.keys.shape[1], length + 256)
        for name in ("keys", "values"):
            bigger = torch.empty(layers, capacity, heads, size, **self._options)
            bigger[:, : self.length] = getattr(self, name)[:, : self.length]
            setattr(self, name, bigger)


@dataclass(frozen=True)
class Rows:
    """Where the tokens of one pass stand.

    start, end : the rows of the cache that they write
    mask : what each sees of the rows before ``end``, boolean; None = all of them, or with attention one by one
        those up to its own
    cos, sin : of their positions
    """

    start: int
    end: int
    mask: Tensor | None
    cos: Tensor
    sin: Tensor


def rivals_mask(positions: Sequence[int], at: int, device: Any) -> Tensor:
    """``[count, at + count]``: each state sees the tokens before its position and itself."""
    columns = torch.arange(at + len(positions), device=device)
    own = torch.arange(at, at + len(positions), device=device)[:, None]
    return (columns < torch.tensor(positions, device=device)[:, None]) | (columns == own)


class LayeredDecoder(Decoder, Protocol):
    """A decoder whose layers can be run one by one on an InPlaceCache: what layer skipping needs."""

    @property
    def num_layers(self) -> int: ...

    def new_cache(self) -> InPlaceCache: ...

    def forward(self, ids: Sequence[int], start: int, keep: int, cache: Any, *, skip: SkipSet = KEEP_ALL,
                states: list[Tensor] | None = None) -> Tensor: ...

    def embed(self, ids: Sequence[int], start: int) -> Tensor: ...

    def rows(self, start: int, width: int) -> Rows: ...

    def rivals(self, positions: Sequence[int], at: int) -> Rows: ...

    def attention(self, index: int, x: Tensor, rows: Rows, cache: Any) -> Tensor: ...

    def mlp(self, index: int, x: Tensor) -> Tensor: ...

    def layer(self, index: int, x: Tensor, rows: Rows, cache: Any) -> Tensor: ...

    def head(self, x: Tensor) -> Tensor: ...


def forward_layers(decoder: LayeredDecoder, ids: Sequence[int], start: int, keep: int, cache: InPlaceCache, *,
                   skip: SkipSet = KEEP_ALL, states: list[Tensor] | None = None) -> Tensor:
    """One pass, layer by layer; see LlamaDecoder.forward."""
    width = len(ids)
    cache.make_room(start + width)
    x, rows = decoder.embed(ids, start), decoder.rows(start, width)
    if states is not None:
        states.append(x)
    for index in range(decoder.num_layers):
        attention, mlp = index not in skip.attention, index not in skip.mlp
        if attention and mlp:
            x = decoder.layer(index, x, rows, cache)
        elif attention:
            x = decoder.attention(index, x, rows, cache)
        elif mlp:
            x = decoder.mlp(index, x)
        if states is not None:
            states.append(x)
    cache.length = start + width
    return decoder.head(x[width - keep :])


def supported(model: Any) -> bool:
    """Whether LlamaDecoder computes exactly this model's function."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (type(model).__name__ == "LlamaForCausalLM" and config.hidden_act == "silu"
            and rope in ("default", "linear", "llama3") and not config.mlp_bias)


def _fused(*linears: nn.Linear) -> nn.Linear:
    """One linear layer whose output is the others' side by side."""
    if len(linears) == 1:
        return linears[0]
    bias = linears[0].bias is not None
    out = nn.Linear(linears[0].in_features, sum(x.out_features for x in linears), bias=bias, device="meta")
    out.weight = nn.Parameter(torch.cat([x.weight for x in linears]), requires_grad=False)
    if bias:
        out.bias = nn.Parameter(torch.cat([x.bias for x in linears]), requires_grad=False)
    return out


def _share(fused: nn.Linear, linears: Sequence[nn.Linear]) -> None:
    """Make the parts' weights views of the fused one, so that nothing is held twice."""
    row = 0
    for linear in linears:
        linear.weight.data = fused.weight.data[row : row + linear.out_features]
        row += linear.out_features


def _seen(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """What attention gathers, ``[width, heads * size]``.

    queries : ``[width, kv heads, group, size]``; keys, values : ``[rows, kv heads, size]``
    mask : ``[group * width, rows]``
    """
    width, kv_heads, group, size = queries.shape
    seen = F.scaled_dot_product_attention(
        queries.permute(1, 2, 0, 3).reshape(1, kv_heads, group * width, size), keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None], attn_mask=mask)
    return seen.view(kv_heads, group, width, size).permute(2, 0, 1, 3).reshape(width, kv_heads * group * size)


class LlamaDecoder:
    """The Llama architecture, batch 1.

    int8 : linear layers quantised (execute.int8).  Attention then takes the tokens of a step one by one: rounded
        to eight bits, the last bit of a float can become a whole level, so tokens' results are only the same in
        steps of every width if each takes the same operations.
    """

    def __init__(self, model: Any, *, int8: bool = False) -> None:
        self._config = config = model.config
        self._device, self._dtype = model.device, model.dtype
        self._embedding = model.model.embed_tokens.weight
        self._heads, self._kv_heads, self._size = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self._rotary = model.model.rotary_emb
        self._cos = self._sin = torch.empty(0)
        self._one_by_one = int8
        self.linears: list[Any] = []

        pack = not int8 and can_pack(model)

        def made(*linears: nn.Linear) -> Linear:
            fused = _fused(*linears)
            if not int8:
                _share(fused, linears)
            self.linears.append(Int8Linear(fused) if int8 else PackedLinear(fused) if pack else fused)
            return self.linears[-1]

        self._layers = [
            (layer.input_layernorm.weight,
             made(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
             made(layer.self_attn.o_proj), layer.post_attention_layernorm.weight,
             made(layer.mlp.gate_proj, layer.mlp.up_proj), made(layer.mlp.down_proj))
            for layer in model.model.layers
        ]
        self._norm = model.model.norm.weight
        self._head = made(model.lm_head)

    def new_cache(self) -> InPlaceCache:
        config = self._config
        shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        return InPlaceCache(shape, self._dtype, self._device)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def forward(self, ids: Sequence[int], start: int, keep: int, cache: InPlaceCache, *, skip: SkipSet = KEEP_ALL,
                states: list[Tensor] | None = None) -> Tensor:
        """skip : parts of layers that are left out; their rows of the cache stay as they are
        states : takes the hidden states before the first and after each layer, ``[width, hidden]`` each
        """
        return forward_layers(self, ids, start, keep, cache, skip=skip, states=states)

    def embed(self, ids: Sequence[int], start: int) -> Tensor:
        return self._embedding[torch.tensor(ids, device=self._device)]

    def rows(self, start: int, width: int) -> Rows:
        """New tokens that follow ``start`` cached ones."""
        group = self._heads // self._kv_heads
        mask = self._mask(width, start, group) if width > 1 and not self._one_by_one else None
        return Rows(start, start + width, mask, *self._rotation(start, start + width))

    def rivals(self, positions: Sequence[int], at: int) -> Rows:
        """States for these positions (one or several), each of which sees the tokens before it and itself; their
        keys and values lie in the cache from row ``at``, beyond all of those."""
        cos, sin = (all_[list(positions)] for all_ in self._rotation(0, max(positions) + 1))
        mask = rivals_mask(positions, at, self._device).repeat(self._heads // self._kv_heads, 1)
        return Rows(at, at + len(positions), mask, cos, sin)

    def attention(self, index: int, x: Tensor, rows: Rows, cache: InPlaceCache) -> Tensor:
        norm, qkv, project = self._layers[index][:3]
        heads, kv_heads, size, width = self._heads, self._kv_heads, self._size, len(x)
        y = qkv(self._normed(x, norm)).view(width, heads + 2 * kv_heads, size)
        turned = y[:, : heads + kv_heads]
        # Rotary embedding of queries and keys at once; the sign of the rotated half is in ``sin``.
        turned = torch.addcmul(turned * rows.cos, turned.roll(size // 2, -1), rows.sin)
        keys, values = cache.keys[index], cache.values[index]
        keys[rows.start : rows.end] = turned[:, heads:]
        values[rows.start : rows.end] = y[:, heads + kv_heads :]
        # The heads that share a key-value head become further query rows of it.
        queries = turned[:, :heads].view(width, kv_heads, heads // kv_heads, size)
        if self._one_by_one and rows.mask is None:
            seen = torch.cat([_seen(queries[i : i + 1], keys[: rows.start + i + 1], values[: rows.start + i + 1], None)
                              for i in range(width)])
        else:
            seen = _seen(queries, keys[: rows.end], values[: rows.end], rows.mask)
        return x + project(seen)

    def mlp(self, index: int, x: Tensor) -> Tensor:
        norm, gate_up, down = self._layers[index][3:]
        gate, up = gate_up(self._normed(x, norm)).chunk(2, -1)
        return x + down(F.silu(gate) * up)

    def layer(self, index: int, x: Tensor, rows: Rows, cache: InPlaceCache) -> Tensor:
        return self.mlp(index, self.attention(index, x, rows, cache))

    def head(self, x: Tensor) -> Tensor:
        return self._head(self._normed(x, self._norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm, as transformers' Llama has it; torch's own takes twice as long in
        float32 and accumulates as this does not in half precision."""
        if self._dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, self._eps)
        return x * x.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_() * weight

    def _rotation(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the positions, ``[width, 1, head size]``; made once, then cut."""
        if end > len(self._cos):
            positions = torch.arange(max(end, 2 * len(self._cos), 512), device=self._device)
            cos, sin = self._rotary(self._embedding[:1], positions[None])
            half = self._size // 2
            sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(sin)
            self._cos, self._sin = cos[0, :, None], (sin[0] * sign)[:, None]
        return self._cos[start:end], self._sin[start:end]

    def _mask(self, width: int, start: int, group: int) -> Tensor:
        """``[group * width, end]``: each row sees the cache and the new tokens up to its own."""
        rows = torch.arange(start, start + width, device=self._device)
        seen = torch.arange(start + width, device=self._device) <= rows[:, None]
        return seen.repeat(group, 1)
