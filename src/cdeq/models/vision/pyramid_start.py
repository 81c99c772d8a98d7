"""A learned start for several resolutions. Shapes as in mdeq.py."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.arguments import arguments_of


class PyramidStart(nn.Module):
    """h_0 = g(u), h_i = g(h_{i-1}) at half the resolution; z_i = sum over j >= i of W_ij h_j, upsampled.

    g is a depthwise convolution, a pointwise one and a gelu: a fraction of a step's multiplications, and yet each
    z_i sees as far as the coarsest branch. Zero before training.
    """

    def __init__(self, *, channels: Iterable[int], kernel: int = 5):
        super().__init__()
        channels = list(channels)
        self.config = arguments_of(locals())
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that it has a middle, not {kernel}")
        self.depthwise, self.mix = nn.ModuleList(), nn.ModuleList()
        out: list[nn.ModuleList] = []
        for i, width in enumerate(channels):
            before = channels[max(i - 1, 0)]
            self.depthwise.append(
                nn.Conv2d(
                    before,
                    before,
                    kernel,
                    stride=2 if i else 1,
                    padding=kernel // 2,
                    groups=before,
                )
            )
            self.mix.append(nn.Conv2d(before, width, 1))
            out.append(
                nn.ModuleList(
                    nn.Conv2d(source, width, 1, bias=j == 0)
                    for j, source in enumerate(channels[i:])
                )
            )
        self.out = nn.ModuleList(out)
        for weight in self.out.parameters():
            nn.init.zeros_(weight)

    def output_layers(self) -> list[list[nn.Module]]:
        """The linear layers at the end, for each branch."""
        return [list(row) for row in self.out]  # type: ignore[call-overload]

    def forward(self, context: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, levels = context[0], []
        for depthwise, mix in zip(self.depthwise, self.mix, strict=True):
            h = F.gelu(mix(depthwise(h)))
            levels.append(h)
        parts = []
        for i, row in enumerate(self.out):
            total = row[0](levels[i])  # type: ignore[index]
            for j, layer in enumerate(row[1:], start=1):  # type: ignore[index]
                total = total + F.interpolate(
                    layer(levels[i + j]), scale_factor=2**j, mode="nearest"
                )
            parts.append(total)
        return tuple(parts)
