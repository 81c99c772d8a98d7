"""An explicit language model with attention over the segments before its own: Transformer-XL.

Shapes: B streams, L tokens, M tokens of memory, K = M + L, D width, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.text.relative import relative_attention, sinusoids
from cdeq_experiments.rivals.language_model import LanguageModel, Memory


class TransformerXL(LanguageModel):
    """y = LN(h + O attention(h, [memory; h])), h' = LN(y + W2 relu(W1 y)) in each layer (Dai et al. 2019).

    Attention is by content and by distance, over the tokens of the segment so far and the last `memory` before it.
    A layer's memory is its input at those tokens: it grows from nothing to `memory` tokens.
    """

    def __init__(
        self,
        *,
        heads: int = 4,
        inner: int = 192,
        layers: int = 3,
        memory: int = 64,
        **words: Any,
    ):
        super().__init__(heads=heads, inner=inner, layers=layers, memory=memory, **words)
        width, dropout = self.width, self.dropout.p
        if width % heads or width % 2:
            raise ValueError(f"width must be even and a multiple of heads = {heads}, not {width}")
        self.memory = memory
        self.blocks = nn.ModuleList(_Block(width, heads, inner, dropout) for _ in range(layers))

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Tokens (B, L) to features (B, L, D) and the memory for the next segment."""
        h = self.dropout(self.words.embed(tokens))
        length = memory[0].shape[1] if memory else 0
        memory = self.remembered(memory, [(len(h), length, self.width)] * len(self.blocks))
        keys = length + h.shape[1]
        distances = self.dropout(sinusoids(keys, self.width, device=h.device, dtype=h.dtype))
        kept = []
        for block, before in zip(self.blocks, memory, strict=True):
            known = torch.cat((before, h), dim=1)
            kept.append(known[:, max(0, keys - self.memory) :].detach())
            h = block(h, known, distances)
        return self.dropout(h), tuple(kept)


class _Block(nn.Module):
    """Relative attention and a feed-forward network, each with its norm after the sum."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.out = nn.Linear(width, width, bias=False)
        self.attention_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, inner)
        self.contract = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                # Smaller weights leave the embedding almost as it was, and tied to it the model would begin
                # by predicting the word it has just read.
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, h: Tensor, known: Tensor, distances: Tensor) -> Tensor:
        """h (B, L, D), known (B, K, D), distances (K, D) to (B, L, D)."""
        q = self._split(self.query(h))
        k, v = (self._split(part) for part in self.key_value(known).chunk(2, dim=-1))
        r = self._split(self.position(distances))
        attended = relative_attention(q, k, v, r, self.content_bias, self.position_bias)
        attended = self.out(attended.transpose(-2, -3).flatten(-2))
        y = self.attention_norm(h + self.dropout(attended))
        hidden = self.dropout(F.relu(self.expand(y)))
        return self.norm(y + self.dropout(self.contract(hidden)))

    def _split(self, x: Tensor) -> Tensor:
        """(..., K, D) to (..., H, K, D / H)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
