"""Linear maps along the feature axis of a state, whatever the axes around it.

Shapes: ... x F along the feature axis; (B, C, H, W) has its features on axis 1, other states on the last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def feature_axis_of(tensor: Tensor, axis: int | None = None) -> int:
    """The axis of the features, counted from the front."""
    if axis is None:
        axis = 1 if tensor.ndim == 4 else tensor.ndim - 1
    return axis % tensor.ndim


class FeatureLinear(nn.Module):
    """y = W x + b along one axis."""

    def __init__(self, inputs: int, outputs: int, axis: int, bias: bool = True):
        super().__init__()
        self.axis = axis
        self.linear = nn.Linear(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._along(x, self.linear.weight, self.linear.bias)

    def part(self, x: Tensor, first: int, bias: Tensor | None = None) -> Tensor:
        """The share of some of the inputs in y, from the `first` on."""
        return self._along(x, self.linear.weight[:, first : first + x.shape[self.axis]], bias)

    def _along(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.axis == 1 and x.ndim == 4:
            return functional.conv2d(x, weight[:, :, None, None], bias)
        if self.axis == x.ndim - 1:
            return functional.linear(x, weight, bias)
        return functional.linear(x.movedim(self.axis, -1), weight, bias).movedim(-1, self.axis)


class TimeHead(nn.Module):
    """h = W [f || t], t broadcast along the feature axis (paper, eq:G_phi). Starts as the identity."""

    def __init__(self, features: int, axis: int):
        super().__init__()
        self.linear = FeatureLinear(features + 1, features, axis)
        with torch.no_grad():
            weight = self.linear.linear.weight
            weight.zero_()
            weight[:, :features].fill_diagonal_(1.0)
            self.linear.linear.bias.zero_()

    def forward(self, f: Tensor, t: float) -> Tensor:
        clock = torch.full_like(f.narrow(self.linear.axis, 0, 1), t)
        return self.linear(torch.cat([f, clock], dim=self.linear.axis))
