"""A learned start for any teacher: a small pointwise network from the context to the state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdeq.consistency.features import FeatureLinear
from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State, tensors_of
from cdeq.equilibrium.trees import tensors_in


def context_tensors(context: Context) -> list[Tensor]:
    """The dense floating tensors of a context, in order."""
    return [
        tensor
        for tensor in tensors_in(context)
        if tensor.layout == torch.strided and tensor.is_floating_point()
    ]


class PointwiseStart(nn.Module):
    """z_0 = V gelu(U u) at each position, u the context's tensors that share the state's positions.

    It sees one position at a time, so it is cheap, and causal where the teacher is. Starts at zero.
    """

    def __init__(
        self,
        sources: list[list[int]],
        inputs: list[int],
        features: list[int],
        axes: list[int],
        is_tuple: bool,
    ):
        super().__init__()
        self.config = {
            "sources": sources,
            "inputs": inputs,
            "features": features,
            "axes": axes,
            "is_tuple": is_tuple,
        }
        self.sources, self.axes, self.is_tuple = sources, axes, is_tuple
        sizes = list(zip(inputs, features, axes, strict=True))
        self.inner = nn.ModuleList(FeatureLinear(i, f, a) for i, f, a in sizes)
        self.outer = nn.ModuleList(FeatureLinear(f, f, a) for _, f, a in sizes)
        for layer in self.outer:
            nn.init.zeros_(layer.linear.weight)  # type: ignore[union-attr, arg-type]
            nn.init.zeros_(layer.linear.bias)  # type: ignore[union-attr, arg-type]

    @classmethod
    def matching(cls, context: Context, state: State, axes: list[int]) -> PointwiseStart:
        """The network for contexts and states like these."""
        tensors, sources = context_tensors(context), []
        for z, axis in zip(tensors_of(state), axes, strict=True):
            positions = _without(z.shape, axis)
            found = [
                i
                for i, u in enumerate(tensors)
                if u.ndim == z.ndim and _without(u.shape, axis) == positions
            ]
            if not found:
                raise ValueError(
                    "start='learned': no tensor of the context has the state's positions "
                    f"{tuple(z.shape)}; give the teacher a start_network(), or use start='zero'"
                )
            sources.append(found)
        inputs = [sum(tensors[i].shape[a] for i in s) for s, a in zip(sources, axes, strict=True)]
        return cls(
            sources,
            inputs,
            [z.shape[a] for z, a in zip(tensors_of(state), axes, strict=True)],
            axes,
            not isinstance(state, Tensor),
        )

    def forward(self, context: Context) -> State:
        tensors = context_tensors(context)
        parts = []
        for i, axis in enumerate(self.axes):
            seen = torch.cat([tensors[s] for s in self.sources[i]], dim=axis)
            parts.append(self.outer[i](functional.gelu(self.inner[i](seen))))
        return tuple(parts) if self.is_tuple else parts[0]


def _without(shape: torch.Size, axis: int) -> tuple[int, ...]:
    return tuple(size for i, size in enumerate(shape) if i != axis)
