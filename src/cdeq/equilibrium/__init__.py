"""What is solved: the four-method contract, states, and models adapted to them."""

from cdeq.equilibrium.contract import (
    Contraction,
    EquilibriumModel,
    FunctionModel,
    check_contract,
    from_functions,
    is_batched,
)
from cdeq.equilibrium.states import State, StateLayout
from cdeq.equilibrium.torchdeq import CapturedContext, TorchDEQModel, from_torchdeq

__all__ = [
    "CapturedContext",
    "Contraction",
    "EquilibriumModel",
    "FunctionModel",
    "State",
    "StateLayout",
    "TorchDEQModel",
    "check_contract",
    "from_functions",
    "from_torchdeq",
    "is_batched",
]
