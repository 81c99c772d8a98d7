"""Dropout on dense states and on sparse features. Shapes: N nodes, F features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cdeq.data.sparse import SparseMatrix


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
    order = _transposed_order(matrix)
    return SparseMatrix(_with_values(matrix, values), _with_values(transpose, values[order]))


_ORDERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _transposed_order(matrix: Tensor) -> Tensor:
    """The entries of a matrix in the order of its transpose; sorted once for as long as the matrix lives."""
    if matrix not in _ORDERS:
        # Entries lie in order of rows, so that a stable sort by column lists them as the transpose does.
        _ORDERS[matrix] = torch.sort(matrix.col_indices().int(), stable=True).indices
    return _ORDERS[matrix]


def _with_values(matrix: Tensor, values: Tensor) -> Tensor:
    """The same places with other values; checking again that the places are well formed would take longer than all."""
    return torch.sparse_csr_tensor(
        matrix.crow_indices(),
        matrix.col_indices(),
        values,
        size=matrix.shape,
        check_invariants=False,
    )
