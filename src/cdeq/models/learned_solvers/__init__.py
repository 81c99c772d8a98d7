"""Learned solvers: small networks that start and mix the iterates of a frozen teacher."""

from cdeq.models.learned_solvers.hyperdeq import ConvolutionalStart, HyperDEQ
from cdeq.models.learned_solvers.ignn_solver import IGNNSolver
from cdeq.models.learned_solvers.mixing import (
    LearnedSolver,
    MixingNetwork,
    SolverLossWeights,
    SolverObjective,
    centred,
    mixed_state,
)

__all__ = [
    "ConvolutionalStart",
    "HyperDEQ",
    "IGNNSolver",
    "LearnedSolver",
    "MixingNetwork",
    "SolverLossWeights",
    "SolverObjective",
    "centred",
    "mixed_state",
]
