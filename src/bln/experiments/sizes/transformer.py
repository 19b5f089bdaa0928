"""A small transformer encoder for reviews, with any norm in place of LayerNorm."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import norms
from ..models import Words
from ..words import PADDING


def transformer(
    norm: str,
    runs: int = 1,
    *,
    words: int = 20_000,
    length: int = 80,
    embedded: int = 16,
    features: int = 64,
    heads: int = 4,
    blocks: int = 2,
) -> nn.Module:
    """Return an encoder of tokens ``(N, length)`` with two outputs, for one run at a time."""
    if runs != 1:
        raise ValueError(f"a transformer takes one run at a time, got {runs}")
    return _Encoder(norms.norm(norm), words, length, embedded, features, heads, blocks)


class _Encoder(nn.Module):
    """Pre-norm blocks and the mean over tokens. Norms with statistics over tokens are given the padding mask."""

    def __init__(
        self, norm: norms.Norm, words: int, length: int, embedded: int, features: int, heads: int, blocks: int
    ) -> None:
        super().__init__()
        self.words, self.widen = Words(words, embedded), nn.Linear(embedded, features)
        self.places = nn.Parameter(0.02 * torch.randn(length, features))
        self.blocks = nn.ModuleList(_Block(norm, features, heads) for _ in range(blocks))
        self.norm, self.head = _Masked(norm, features), nn.Linear(features, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != PADDING
        x = self.widen(self.words(tokens)) + self.places
        for block in self.blocks:
            x = block(x, real)
        x = self.norm(x, real) * real[..., None]
        return cast(Tensor, self.head(x.sum(1) / real.sum(1, keepdim=True)))


class _Block(nn.Module):
    """Self-attention and two dense layers, each with a norm before it and a shortcut around it."""

    def __init__(self, norm: norms.Norm, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_dense = _Masked(norm, features), _Masked(norm, features)
        self.queries_keys_values, self.attended = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.wide, self.narrow = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(x, real))
        queries, keys, values = parts.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(queries, keys, values, attn_mask=real[:, None, None])
        x = x + self.attended(attention.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.narrow(F.gelu(self.wide(self.before_dense(x, real)))))


class _Masked(nn.Module):
    """A norm of ``(N, length, features)`` that leaves padding out of its statistics."""

    def __init__(self, norm: norms.Norm, features: int) -> None:
        super().__init__()
        self.inner = norm(features, -1, ordinary=True)
        self.by_token = isinstance(self.inner, nn.LayerNorm | nn.RMSNorm)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return cast(Tensor, self.inner(x) if self.by_token else self.inner(x, real))
