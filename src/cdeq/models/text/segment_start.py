"""A learned start for the DEQ-Transformer. Shapes as in deq_transformer.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cdeq.models.text.relative import segment_attention
from cdeq.models.text.windows import causal_windows, gelu

if TYPE_CHECKING:
    from cdeq.models.text.deq_transformer import SegmentContext


class SegmentStart(nn.Module):
    """s = W_2 gelu(W_1 [h; attention(W h + u)]), h = gelu(conv(u)): a step's attention over a first guess of its own.

    The guess h (B, L, D) is a convolution over what the input adds to the values of a token and of those before it.
    Keys and values of remembered tokens, and keys of distances, are the context's: exact, and computed already. A
    convolution alone, a third of the price, was 1.7 times as far from the equilibrium. Zero before training.
    """

    def __init__(self, width: int, heads: int, kernel: int = 3):
        super().__init__()
        self.width, self.kernel = width, kernel
        self.guess = nn.Linear(kernel * width, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.expand = nn.Linear(2 * width, 2 * width)
        self.out = nn.Linear(2 * width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def output_layers(self) -> list[list[nn.Module]]:
        """The linear layers at the end, for the one tensor of the state."""
        return [[self.out]]

    def first_guess(self, context: SegmentContext) -> Tensor:
        """h, without attention."""
        values = context.injection[..., 2 * self.width : 3 * self.width]
        before = context.memory[1][..., self.width :]
        return gelu(self.guess(causal_windows(values, self.kernel, before=before)))

    def forward(self, context: SegmentContext) -> Tensor:
        h = self.first_guess(context)
        projected = self.qkv(h) + context.injection[..., : 3 * self.width]
        biases = self.content_bias, self.position_bias
        attended = segment_attention(projected, context, *biases)
        s = self.out(gelu(self.expand(torch.cat((h, attended), dim=-1))))
        # States end in a layer norm; starts of a trained student are up to half as long again. Without a limit, memory
        # that is far off leaves memory that is farther off.
        longest = 2 * self.width**0.5
        return s * (longest / torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp_min(longest))
