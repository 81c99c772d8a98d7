"""Explicit convolutional language models: TCN and the gated convolutional network.

Shapes: B streams, L tokens, D width, C channels, P tokens that a convolution sees before each one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from cdeq.models.text.windows import causal_windows
from cdeq_experiments.rivals.language_model import LanguageModel, Memory

Convolve = Callable[[nn.Module, Tensor], Tensor]
"""Applies a convolution behind its tail, and keeps the next one."""


class CausalConv(nn.Module):
    """y_t = sum_j W_j x_(t - j dilation) + b over `kernel` taps, weight-normalised for each output channel.

    The P = (kernel - 1) dilation inputs before a segment are its tail: zeros at the start of a text.
    """

    def __init__(self, inputs: int, outputs: int, *, kernel: int, dilation: int = 1):
        super().__init__()
        self.inputs, self.kernel, self.dilation = inputs, kernel, dilation
        self.past = (kernel - 1) * dilation
        linear = nn.Linear(kernel * inputs, outputs)
        nn.init.normal_(linear.weight, std=(kernel * inputs) ** -0.5)
        nn.init.zeros_(linear.bias)
        self.linear = weight_norm(linear)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, L, inputs) and tail (B, P, inputs) to y (B, L, outputs) and the next segment's tail."""
        taps = causal_windows(x, self.kernel, dilation=self.dilation, before=tail)
        return self.linear(taps), torch.cat((tail, x), dim=1)[:, x.shape[1] :].detach()


class _ConvolutionalModel(LanguageModel):
    """What the two networks share: the tails of all convolutions, in the order of their use, are the memory."""

    network: Callable[[Tensor, Convolve], Tensor]

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Tokens (B, L) to features (B, L, D) and the memory for the next segment."""
        convs = [module for module in self.modules() if isinstance(module, CausalConv)]
        shapes = [(len(tokens), conv.past, conv.inputs) for conv in convs]
        tails, kept = iter(self.remembered(memory, shapes)), []

        def convolve(conv: nn.Module, x: Tensor) -> Tensor:
            y, tail = conv(x, next(tails))
            kept.append(tail)
            return y

        return self.network(self.dropout(self.words.embed(tokens)), convolve), tuple(kept)


class TCN(_ConvolutionalModel):
    """h_l = relu(S h_(l-1) + relu(W2 * relu(W1 * h_(l-1)))), with dilation 2^l (Bai et al. 2018, figure 1).

    S is the identity, or a linear map where the number of channels changes. All levels but the last have
    `channels`; the last has `width`, so that the embedding is tied.
    """

    def __init__(self, *, channels: int = 128, levels: int = 4, kernel: int = 3, **words: Any):
        super().__init__(channels=channels, levels=levels, kernel=kernel, **words)
        self.layers = nn.ModuleList()  # three for each level
        sizes = [self.width, *[channels] * (levels - 1), self.width]
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            first = CausalConv(inputs, outputs, kernel=kernel, dilation=2**i)
            second = CausalConv(outputs, outputs, kernel=kernel, dilation=2**i)
            skip = nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs)
            self.layers.extend([first, second, skip])

    def network(self, h: Tensor, convolve: Convolve) -> Tensor:
        for first, second, skip in zip(*[iter(self.layers)] * 3, strict=True):
            y = self.dropout(F.relu(convolve(first, h)))
            y = self.dropout(F.relu(convolve(second, y)))
            h = F.relu(skip(h) + y)
        return h


class GatedConvNet(_ConvolutionalModel):
    """h = x + G2(G1(x)), G(x) = (W * x + b) sigmoid(V * x + c) (Dauphin et al. 2017, equation 1).

    One gated convolution to `channels`, `levels` residual blocks of two, as their GCNN-13, and a linear map to
    `width`, so that the embedding is tied.
    """

    def __init__(self, *, channels: int = 96, levels: int = 3, kernel: int = 3, **words: Any):
        super().__init__(channels=channels, levels=levels, kernel=kernel, **words)
        self.gated = nn.ModuleList(
            CausalConv(inputs, 2 * channels, kernel=kernel)
            for inputs in (self.width, *[channels] * (2 * levels))
        )
        self.exit = nn.Linear(channels, self.width)

    def network(self, h: Tensor, convolve: Convolve) -> Tensor:
        entry, *pairs = self.gated
        h = F.glu(convolve(entry, h))
        for first, second in zip(pairs[::2], pairs[1::2], strict=True):
            h = h + F.glu(convolve(second, F.glu(convolve(first, self.dropout(h)))))
        return self.exit(self.dropout(h))
