"""Explicit convolutional language models: TCN and the gated convolutional network.

Shapes: B streams, L tokens, D width, C channels, P tokens that a convolution sees before each one.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from cdeq.models.text.windows import causal_windows
from cdeq_experiments.rivals.language_model import LanguageModel, Memory, WordSizes, check_memory


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

    def no_tail(self, batch: int) -> Tensor:
        return self.linear.bias.new_zeros(batch, self.past, self.inputs)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, L, inputs) and tail (B, P, inputs) to y (B, L, outputs) and the next segment's tail."""
        taps = causal_windows(x, self.kernel, dilation=self.dilation, before=tail)
        return self.linear(taps), torch.cat((tail, x), dim=1)[:, x.shape[1] :].detach()


class _ConvolutionalModel(LanguageModel):
    """What the two networks share: their sizes, and the tails of all convolutions as memory."""

    def __init__(self, *, channels: int, levels: int, kernel: int, **words: Unpack[WordSizes]):
        super().__init__(**words)
        self.config |= {"channels": channels, "levels": levels, "kernel": kernel}
        if min(channels, levels, kernel) < 1:
            raise ValueError(
                f"channels, levels and kernel must be at least 1, not {channels}, {levels} and {kernel}"
            )
        self.dropout = nn.Dropout(self.config["dropout"])

    def _tails(self, batch: int, memory: Memory | None) -> Memory:
        """One tail for each convolution, in the order of the modules, which is that of their use."""
        convolutions = [module for module in self.modules() if isinstance(module, CausalConv)]
        if memory is None:
            return tuple(convolution.no_tail(batch) for convolution in convolutions)
        return check_memory(memory, [(batch, c.past, c.inputs) for c in convolutions], batch)


class TCN(_ConvolutionalModel):
    """h_l = relu(S h_(l-1) + relu(W2 * relu(W1 * h_(l-1)))), with dilation 2^l (Bai et al. 2018, figure 1).

    S is the identity, or a linear map where the number of channels changes. All levels but the last have
    `channels`; the last has `width`, so that the embedding is tied.
    """

    def __init__(
        self, *, channels: int = 128, levels: int = 4, kernel: int = 3, **words: Unpack[WordSizes]
    ):
        super().__init__(channels=channels, levels=levels, kernel=kernel, **words)
        width = self.width
        sizes = [width, *[channels] * (levels - 1), width]
        self.blocks = nn.ModuleList(
            _DilatedBlock(
                sizes[i], sizes[i + 1], kernel=kernel, dilation=2**i, dropout=self.dropout.p
            )
            for i in range(levels)
        )

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Tokens (B, L) to features (B, L, D) and the memory for the next segment."""
        tails = self._tails(tokens.shape[0], memory)
        h = self.dropout(self.words.embed(tokens))
        kept: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            h, *block_tails = block(h, tails[2 * i], tails[2 * i + 1])
            kept += block_tails
        return h, tuple(kept)


class _DilatedBlock(nn.Module):
    """Two dilated convolutions of one level of the TCN, and the way around them."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, dilation: int, dropout: float):
        super().__init__()
        self.first = CausalConv(inputs, outputs, kernel=kernel, dilation=dilation)
        self.second = CausalConv(outputs, outputs, kernel=kernel, dilation=dilation)
        self.skip = nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, first_tail: Tensor, second_tail: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, first_tail = self.first(x, first_tail)
        y, second_tail = self.second(self.dropout(F.relu(y)), second_tail)
        return F.relu(self.skip(x) + self.dropout(F.relu(y))), first_tail, second_tail


class GatedConvNet(_ConvolutionalModel):
    """h = x + G2(G1(x)), G(x) = (W * x + b) sigmoid(V * x + c) (Dauphin et al. 2017, equation 1).

    One gated convolution to `channels`, `levels` residual blocks of two, as their GCNN-13, and a linear map to
    `width`, so that the embedding is tied.
    """

    def __init__(
        self, *, channels: int = 96, levels: int = 3, kernel: int = 3, **words: Unpack[WordSizes]
    ):
        super().__init__(channels=channels, levels=levels, kernel=kernel, **words)
        width = self.width
        self.entry = CausalConv(width, 2 * channels, kernel=kernel)
        self.gated = nn.ModuleList(
            CausalConv(channels, 2 * channels, kernel=kernel) for _ in range(2 * levels)
        )
        self.exit = nn.Linear(channels, width)

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Tokens (B, L) to features (B, L, D) and the memory for the next segment."""
        tails = self._tails(tokens.shape[0], memory)
        y, tail = self.entry(self.dropout(self.words.embed(tokens)), tails[0])
        h, kept = F.glu(y), [tail]
        for i in range(0, len(self.gated), 2):
            y, first_tail = self.gated[i](self.dropout(h), tails[i + 1])
            y, second_tail = self.gated[i + 1](F.glu(y), tails[i + 2])
            h = h + F.glu(y)
            kept += [first_tail, second_tail]
        return self.exit(self.dropout(h)), tuple(kept)
