"""Learned corrections of a residual: N(r), linear in r, so that N(0) = 0 and the equilibrium stays where it is.

A corrected step goes to z + r + N(r), r = f(z) - z under the teacher's own weights. The best N is (I - J)^-1 - I, J the
Jacobian of f: then one step is Newton's. N sees what is cheap to see: the features of one position, and for images
their means over squares of several sizes, as a multigrid method does. Gates let it depend on the input and on the
state, as J does; they see the state's image f(z), which is nearer to the equilibrium than the state itself. They follow
it for the first steps and then stay as they are: where a correction went on changing with the state, r + N(r; z) = 0
could have other solutions than r = 0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from cdeq.consistency.blocks import ImageBlock, PointwiseBlock
from cdeq.consistency.groups import Group, groups_of, joined, sources_of, state_like
from cdeq.equilibrium.contract import Context
from cdeq.equilibrium.states import State, tensors_of

FOLLOWED = 3
"""Steps at which gates follow the rollout."""


class Gates(NamedTuple):
    """The gates of each block at a state, the context's share in them, and the network that made them."""

    now: list[Any]
    shares: list[Any]
    network: LearnedCorrection


class LearnedCorrection(nn.Module):
    """N(r) = W r + V (gate * U r), group by group; zero before it is fitted."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__()
        self.config = {"groups": groups}
        self.groups = [Group.from_dict(group) for group in groups]
        self.blocks = nn.ModuleList(
            ImageBlock(group) if group.is_image else PointwiseBlock(group) for group in self.groups
        )

    @classmethod
    def matching(
        cls, context: Context, state: State, axes: list[int], shared: Collection[int] = ()
    ) -> LearnedCorrection:
        """The network for contexts and states like these; it does not see what of the context is `shared`."""
        return cls([group.to_dict() for group in groups_of(context, state, axes, shared)])

    def gate(self, context: Context, z: State) -> Gates:
        """The gates at an image f(z)."""
        shares = [block.share(sources_of(group, context)) for group, block in self._parts()]
        return self._gates(z, shares)

    def follow(self, gates: Gates, context: Context, z: State) -> Gates:
        """The gates at another image of the same input: its share in them stays, if this network made it."""
        return self._gates(z, gates.shares) if gates.network is self else self.gate(context, z)

    def _gates(self, z: State, shares: list[Any]) -> Gates:
        pairs = zip(self._parts(), shares, strict=True)
        now = [block.gate(joined(group, z), share) for (group, block), share in pairs]
        return Gates(now, shares, self)

    def forward(self, r: State, gates: Gates) -> State:
        pairs = zip(self._parts(), gates.now, strict=True)
        parts = [block(joined(group, r), gate) for (group, block), gate in pairs]
        return state_like(r, self.groups, parts)

    def corrected(
        self, z: State, f: State, gates: Gates, gain: Tensor, out: State, image: State
    ) -> None:
        """Write p = r + gain N(r) of r = f - z to `out`, and z + p to `image`: states of the same shapes.

        Without gradients, and with fewer passes over memory than if all were written one after the other.
        """
        for (group, block), gate in zip(self._parts(), gates.now, strict=True):
            given = [joined(group, state) for state in (z, f)]
            places = [joined(group, state) for state in (out, image)]
            block.corrected(*given, gate, gain, *places)
            if len(group.members) > 1:  # joined is copied
                for state, place in zip((out, image), places, strict=True):
                    pieces = place.split(list(group.features), dim=group.axis)
                    for i, piece in zip(group.members, pieces, strict=True):
                        tensors_of(state)[i].copy_(piece)

    def _parts(self) -> list[tuple[Group, Any]]:
        return list(zip(self.groups, self.blocks, strict=True))
