"""How gradients pass through an equilibrium, whatever solver found it; and the map's Jacobian."""

from cdeq.gradients.base import AtEquilibrium, Gradient
from cdeq.gradients.implicit import Implicit
from cdeq.gradients.jacobian import jacobian_penalty, spectral_radius
from cdeq.gradients.jacobian_free import JacobianFree
from cdeq.gradients.phantom import Phantom
from cdeq.gradients.solve import solve_with_gradient
from cdeq.gradients.unrolled import Unrolled

GRADIENTS: dict[str, type] = {
    "implicit": Implicit,
    "phantom": Phantom,
    "jacobian_free": JacobianFree,
    "unrolled": Unrolled,
}
"""Classes of gradients, by name."""

__all__ = [
    "GRADIENTS",
    "AtEquilibrium",
    "Gradient",
    "Implicit",
    "JacobianFree",
    "Phantom",
    "Unrolled",
    "jacobian_penalty",
    "solve_with_gradient",
    "spectral_radius",
]
