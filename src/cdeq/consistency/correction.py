"""Learned corrections of a residual: N(r), linear in r, so that N(0) = 0 and the equilibrium stays where it is.

A corrected step goes to z + r + N(r), r = f(z) - z under the teacher's own weights. The best N is (I - J)^-1 - I, J the
Jacobian of f: then one step is Newton's. N sees what is cheap to see: the features of one position, and for images
their means over squares, as a multigrid method does, those of all resolutions together. Gates let it depend on the
input and on the state, as J does; they see the state's image f(z), which is nearer to the equilibrium than the state
itself. They follow it for the first steps and then stay as they are: where a correction went on changing with the
state, r + N(r; z) = 0 could have other solutions than r = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from cdeq.consistency.blocks import PointwiseBlock
from cdeq.consistency.groups import Group, groups_of, joined, sources_of, state_like
from cdeq.consistency.image_blocks import FEW_CHANNELS, SQUARE, ImageBlock, PyramidBlock
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
    """N(r) = W r + V (gate * U r), block by block; zero before it is fitted.

    `units`: for each block the places of its groups, and for images of many channels the sides of their squares;
    without them each group is by itself.
    """

    def __init__(
        self, groups: list[dict[str, Any]], units: Sequence[Sequence[Sequence[int]]] | None = None
    ):
        super().__init__()
        self.groups = [Group.from_dict(group) for group in groups]
        units = units or [([i], [SQUARE] * is_wide(g)) for i, g in enumerate(self.groups)]
        self.config = {"groups": groups, "units": units}
        self.members = [list(members) for members, _ in units]
        self.blocks = nn.ModuleList(
            _block([self.groups[i] for i in members], sides) for members, sides in units
        )

    @classmethod
    def matching(
        cls, context: Context, state: State, axes: list[int], shared: Collection[int] = ()
    ) -> LearnedCorrection:
        """The network for contexts and states like these; it does not see what of the context is `shared`."""
        groups = groups_of(context, state, axes, shared)
        wide = [i for i, group in enumerate(groups) if is_wide(group)]
        images = [joined(groups[i], state) for i in wide]
        units = [([i], list[int]()) for i in range(len(groups)) if i not in wide]
        if wide and (sides := PyramidBlock.sides_of(images)) is not None:
            units.append((wide, sides))
        else:  # resolutions that no common grid has: each by itself
            units += [([i], [SQUARE]) for i in wide]
        return cls([group.to_dict() for group in groups], units)

    def gate(self, context: Context, z: State) -> Gates:
        """The gates at an image f(z)."""
        sources = self._arrays(lambda group: sources_of(group, context))
        shares = [block.share(own) for block, own in zip(self._blocks(), sources, strict=True)]
        return self._gates(z, shares)

    def follow(self, gates: Gates, context: Context, z: State) -> Gates:
        """The gates at another image of the same input: its share in them stays, if this network made it."""
        return self._gates(z, gates.shares) if gates.network is self else self.gate(context, z)

    def _gates(self, z: State, shares: list[Any]) -> Gates:
        given = zip(self._blocks(), self.arrays(z), shares, strict=True)
        return Gates([block.gate(own, share) for block, own, share in given], shares, self)

    def forward(self, r: State, gates: Gates) -> State:
        given = zip(self._blocks(), self.arrays(r), gates.now, strict=True)
        found = [part for block, own, gate in given for part in block(own, gate)]
        return state_like(r, [self.groups[i] for members in self.members for i in members], found)

    def corrected(
        self, z: State, f: State, gates: Gates, gain: Tensor, out: State, image: State
    ) -> None:
        """Write p = r + gain N(r) of r = f - z to `out`, and z + p to `image`: states of the same shapes.

        Without gradients, and with fewer passes over memory than if all were written one after the other.
        """
        given = zip(*map(self.arrays, (z, f, out, image)), strict=True)
        for block, members, gate, (starts, ends, places, images) in zip(
            self._blocks(), self.members, gates.now, given, strict=True
        ):
            block.corrected(starts, ends, gate, gain, places, images)
            for i, place, moved in zip(members, places, images, strict=True):
                _put_back(self.groups[i], place, out)
                _put_back(self.groups[i], moved, image)

    def arrays(self, state: State) -> list[list[Tensor]]:
        """The groups of each block, joined."""
        return self._arrays(lambda group: joined(group, state))

    def _arrays(self, of: Callable[[Group], Any]) -> list[list[Any]]:
        return [[of(self.groups[i]) for i in members] for members in self.members]

    def _blocks(self) -> list[Any]:
        return list(self.blocks)


def is_wide(group: Group) -> bool:
    """Whether it is images of many channels."""
    return group.is_image and group.width > FEW_CHANNELS


def _block(groups: list[Group], sides: Sequence[int]) -> nn.Module:
    if sides:
        return PyramidBlock(groups, sides)
    return ImageBlock(*groups) if groups[0].is_image else PointwiseBlock(*groups)


def _put_back(group: Group, array: Tensor, state: State) -> None:
    """Write what was joined, and so copied, to the tensors of a state."""
    if len(group.members) > 1:
        pieces = array.split(list(group.features), dim=group.axis)
        for i, piece in zip(group.members, pieces, strict=True):
            tensors_of(state)[i].copy_(piece)
