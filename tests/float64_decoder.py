"""A whole sequence through a checkpoint in float64: what decoding in any mode must compute.

Shares no code with the engine. Weights come from the transformers model, rotary frequencies from transformers, and
instead of caches there is one causal mask over true positions. Rows before `prompt` are dense; rows from there on are
decode steps, whose inputs lose the channels below a threshold and whose attention sees only the prompt entries that a
method retained, besides all decoded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sparse:
    """What the decode rows read.

    limits: (L, 7) thresholds of q, k, v, o, gate, up, down, or None for all channels.
    retained: per layer (kv_heads, kept) prompt positions, or None for all entries.
    """

    prompt: int
    limits: torch.Tensor | None = None
    retained: Sequence[torch.Tensor] | None = None


@dataclass
class Read:
    """Channels read by the decode rows: kept[layer, projection], summed over rows."""

    kept: torch.Tensor


class Reference:
    """The float64 model of a transformers causal LM."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state = {key: value.double() for key, value in model.state_dict().items()}
        self.inv_freq = model.model.rotary_emb.inv_freq.float()
        self.dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, sparse: Sparse | None = None) -> tuple[torch.Tensor, Read]:
        """Return (n, V) float64 logits of every row and the channels that decode rows read."""
        sparse = sparse or Sparse(tokens.shape[0])
        read = Read(torch.zeros(self.config.num_hidden_layers, 7, dtype=torch.int64))
        hidden = self.state["model.embed_tokens.weight"][tokens]
        for layer in range(self.config.num_hidden_layers):
            hidden = self._layer(layer, hidden, sparse, read)
        final = self._norm(hidden, "model.norm.weight")
        return final @ self.state["lm_head.weight"].T, read

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.state[name]

    def _project(
        self, layer: int, name: str, x: torch.Tensor, sparse: Sparse, read: Read, projection: int
    ) -> torch.Tensor:
        if sparse.limits is not None:
            small = x.abs() <= float(sparse.limits[layer, projection])
            small[: sparse.prompt] = False
            read.kept[layer, projection] += (~small[sparse.prompt :]).sum()
            x = torch.where(small, torch.zeros_like(x), x)
        y = x @ self.state[f"model.layers.{layer}.{name}.weight"].T
        bias = self.state.get(f"model.layers.{layer}.{name}.bias")
        return y if bias is None else y + bias

    def _heads(self, layer: int, x: torch.Tensor, norm: str | None) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, self.dim)
        name = f"model.layers.{layer}.self_attn.{norm}.weight"
        if norm is not None:
            heads = self._norm(heads, name) if name in self.state else heads
            angle = (torch.arange(x.shape[0]).float()[:, None] * self.inv_freq).double()
            a, b = heads.chunk(2, dim=-1)
            spun = torch.complex(a.contiguous(), b.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
            heads = torch.cat((spun.real, spun.imag), dim=-1)
        return heads.transpose(0, 1)

    def _visible(self, layer: int, count: int, kv_head: int, sparse: Sparse) -> torch.Tensor:
        """Return (n, n) booleans: which positions a row attends to."""
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        if sparse.retained is not None:
            evicted = torch.ones(sparse.prompt, dtype=torch.bool)
            evicted[sparse.retained[layer][kv_head]] = False
            visible[sparse.prompt :, : sparse.prompt] &= ~evicted
        return visible

    def _layer(self, layer: int, hidden: torch.Tensor, sparse: Sparse, read: Read) -> torch.Tensor:
        count, name = hidden.shape[0], f"model.layers.{layer}"

        def project(which: str, x: torch.Tensor, projection: int) -> torch.Tensor:
            return self._project(layer, which, x, sparse, read, projection)

        normed = self._norm(hidden, f"{name}.input_layernorm.weight")
        q = self._heads(layer, project("self_attn.q_proj", normed, 0), "q_norm")
        k = self._heads(layer, project("self_attn.k_proj", normed, 1), "k_norm")
        v = self._heads(layer, project("self_attn.v_proj", normed, 2), None)
        mixed = torch.empty_like(q)
        for head in range(q.shape[0]):
            kv = head // (q.shape[0] // k.shape[0])
            scores = (q[head] @ k[kv].T) / self.dim**0.5
            scores = scores.masked_fill(~self._visible(layer, count, kv, sparse), float("-inf"))
            mixed[head] = torch.softmax(scores, -1) @ v[kv]
        hidden = hidden + project("self_attn.o_proj", mixed.transpose(0, 1).reshape(count, -1), 3)
        normed = self._norm(hidden, f"{name}.post_attention_layernorm.weight")
        gate, up = project("mlp.gate_proj", normed, 4), project("mlp.up_proj", normed, 5)
        return hidden + project("mlp.down_proj", gate * torch.sigmoid(gate) * up, 6)
