"""An explicit recurrent language model: quasi-recurrent layers, regularised as in AWD-LSTM.

Shapes: B streams, L tokens, D width, C channels of one layer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq_experiments.rivals.language_model import LanguageModel, Memory


class QRNN(LanguageModel):
    """c_t = f_t c_(t-1) + (1 - f_t) z_t, h_t = o_t c_t, with z, f, o = tanh, sigmoid, sigmoid of a convolution.

    Bradbury et al. (2017), fo-pooling; `layers` of them with a window of two tokens in the first and of one above,
    as the AWD-QRNN of Merity et al. (2018). The last has `width` channels, so that the embedding is tied. `dropout`
    is locked: one mask for a stream in a segment, at the embedding and after each layer. `weight_dropout` drops
    weights of the convolutions. The memory is c of each layer, and the last input of the first.
    """

    def __init__(
        self, *, channels: int = 220, layers: int = 3, weight_dropout: float = 0.0, **words: Any
    ):
        super().__init__(channels=channels, layers=layers, weight_dropout=weight_dropout, **words)
        self.weight_dropout = weight_dropout
        self.sizes = [self.width, *[channels] * (layers - 1), self.width]
        self.projections = nn.ModuleList()
        for i, (inputs, outputs) in enumerate(pairwise(self.sizes)):
            projection = nn.Linear(inputs if i else 2 * inputs, 3 * outputs)
            # A layer's output, gated means of tanh, is a third or a quarter of unit size at the start.
            size = 3.0 if i else 1.0
            nn.init.normal_(projection.weight, std=size * projection.in_features**-0.5)
            nn.init.zeros_(projection.bias)
            self.projections.append(projection)

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Tokens (B, L) to features (B, L, D) and the memory for the next segment."""
        batch = len(tokens)
        shapes = [*((batch, size) for size in self.sizes[1:]), (batch, 1, self.width)]
        *cells, before = self.remembered(memory, shapes)
        h = locked_dropout(self.words.embed(tokens), self.dropout.p, self.training)
        known = torch.cat((before, h), dim=1)
        h, kept = torch.cat((known[:, :-1], h), dim=-1), []
        for projection, cell in zip(self.projections, cells, strict=True):
            assert isinstance(projection, nn.Linear)
            weight = F.dropout(projection.weight, self.weight_dropout, self.training)
            z, f, o = F.linear(h, weight, projection.bias).chunk(3, dim=-1)
            c = forget_pool(z.tanh(), f.sigmoid(), cell)
            h = locked_dropout(o.sigmoid() * c, self.dropout.p, self.training)
            kept.append(c[:, -1].detach())
        return h, (*kept, known[:, -1:].detach())


def forget_pool(z: Tensor, f: Tensor, c: Tensor) -> Tensor:
    """c_t = f_t c_(t-1) + (1 - f_t) z_t along the tokens of z and f (B, L, C), from c (B, C); all c_t (B, L, C)."""
    # One elementwise operation for each token: beside the projections its time is small. In the precision of the
    # carried state, which under autocast is higher than that of the gates.
    z, f = z.to(c.dtype), f.to(c.dtype)
    states = []
    for z_t, f_t in zip(z.unbind(1), f.unbind(1), strict=True):
        c = torch.lerp(z_t, c, f_t)
        states.append(c)
    return torch.stack(states, dim=1)


def locked_dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout of x (B, L, C) with one mask for all tokens of a stream (Gal & Ghahramani 2016)."""
    return F.dropout1d(x.transpose(1, 2), rate, training).transpose(1, 2)
