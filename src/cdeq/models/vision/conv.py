"""A single-stream convolutional equilibrium model. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.arguments import arguments_of


class ConvDEQ(nn.Module):
    """f(z, x) = GN(relu(keep z + GN(x + conv(GN(relu(conv(z))))))), a block that repeats itself.

    `channels` is the width of the state, `inner` that of the block's middle (default: the same),
    `groups` that of all group norms. `keep`, the weight of z in the residual sum, and `gain`, the
    scale of the block's last convolution before training, set how strongly f contracts at first.
    `pool` is the side of the squares averaged by the readout.
    """

    batched = True

    def __init__(
        self,
        *,
        in_channels: int = 1,
        channels: int = 32,
        classes: int = 10,
        image_size: int = 8,
        inner: int | None = None,
        kernel: int = 3,
        groups: int = 8,
        gain: float = 0.5,
        keep: float = 0.25,
        pool: int = 2,
    ):
        super().__init__()
        inner = channels if inner is None else inner
        self.config = arguments_of(locals())
        self.keep, self.pool = keep, pool
        padding = kernel // 2
        self.injection = nn.Conv2d(in_channels, channels, kernel, padding=padding)
        self.injection_norm = nn.GroupNorm(groups, channels)
        self.expand = nn.Conv2d(channels, inner, kernel, padding=padding, bias=False)
        self.contract = nn.Conv2d(inner, channels, kernel, padding=padding, bias=False)
        self.norm_inner = nn.GroupNorm(groups, inner)
        self.norm_sum = nn.GroupNorm(groups, channels)
        self.norm_out = nn.GroupNorm(groups, channels)
        side = image_size // pool
        self.head = nn.Linear(channels * side * side, classes)
        with torch.no_grad():
            self.contract.weight.mul_(gain)

    def inject(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to (B, C, H, W)."""
        return self.injection_norm(self.injection(x))

    def start(self, context: Tensor) -> Tensor:
        return torch.zeros_like(context)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        inner = self.norm_inner(F.relu(self.expand(z)))
        block = self.norm_sum(context + self.contract(inner))
        return self.norm_out(F.relu(self.keep * z + block))

    def readout(self, z: Tensor, context: Tensor) -> Tensor:
        """Logits (B, classes)."""
        return self.head(F.avg_pool2d(z, self.pool).flatten(1))

    def start_network(self) -> nn.Module:
        """A depthwise and two pointwise convolutions: a fraction of a step's multiplications."""
        return ConvStart(self.config["channels"])


class ConvStart(nn.Module):
    """s(x) = W2 gelu(W1 depthwise(x)), zero before training."""

    def __init__(self, channels: int, kernel: int = 5):
        super().__init__()
        padding = kernel // 2
        self.depthwise = nn.Conv2d(channels, channels, kernel, padding=padding, groups=channels)
        self.mix = nn.Conv2d(channels, channels, 1)
        self.out = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def output_layers(self) -> list[list[nn.Module]]:
        """The linear layers at the end, for the one tensor of the state."""
        return [[self.out]]

    def forward(self, context: Tensor) -> Tensor:
        return self.out(F.gelu(self.mix(self.depthwise(context))))
