"""Dropout on dense states and on sparse features. Shapes: N nodes, F features."""

from __future__ import annotations

import torch
from torch import Tensor

from cdeq.data.sparse import SparseMatrix, csr_from_pointers


def checked_probability(dropout: float) -> float:
    """The probability, refused unless it is at least 0 and less than 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
    return dropout


def drop(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout; torch's own takes four times as long on a CPU, where it draws one number after another."""
    if not training or probability == 0:
        return x
    return x * (torch.rand_like(x) >= probability) / (1 - probability)


def drop_features(
    features: Tensor | SparseMatrix, probability: float, training: bool
) -> Tensor | SparseMatrix:
    """Dropout on features (N, F); of sparse ones only the stored entries need a draw."""
    if isinstance(features, Tensor):
        return drop(features, probability, training)
    if not training or probability == 0:
        return features
    matrix, transpose = features
    values = drop(matrix.values(), probability, training)
    # Entries lie in order of rows, so that a stable sort by column lists them as the transpose does.
    order = torch.sort(matrix.col_indices().int(), stable=True).indices
    return SparseMatrix(_with_values(matrix, values), _with_values(transpose, values[order]))


def _with_values(matrix: Tensor, values: Tensor) -> Tensor:
    shape = (matrix.shape[0], matrix.shape[1])
    return csr_from_pointers(matrix.crow_indices(), matrix.col_indices(), values, shape)
