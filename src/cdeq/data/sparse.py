"""Sparse matrices in compressed rows (CSR), the layout that products with them are fastest in."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor


class SparseMatrix(NamedTuple):
    """A CSR matrix (M, N) and its transpose (N, M), computed once: a product needs one, its gradient the other."""

    matrix: Tensor
    transpose: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> SparseMatrix:
        return cls(matrix, transposed(matrix))

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape


class Edges(NamedTuple):
    """A square sparse matrix (N, N) as dense tensors, each (E,): where its entries are and what they are.

    For torch's compiler and for exported files, neither of which know sparse tensors. Elsewhere CSR is faster.
    """

    rows: Tensor
    columns: Tensor
    weights: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Edges:
        """Of a CSR matrix; copies, since the compiler takes no view of a sparse tensor either."""
        return cls(row_indices(matrix), matrix.col_indices().clone(), matrix.values().clone())

    def __matmul__(self, x: Tensor) -> Tensor:
        """Times x (N, D)."""
        return torch.zeros_like(x).index_add(0, self.rows, self.weights[:, None] * x[self.columns])


def csr_from_pointers(
    pointers: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]
) -> Tensor:
    """A CSR matrix from its three arrays; a ValueError if they do not fit together."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                pointers,
                columns,
                values,
                size=shape,
                check_invariants=True,  # unset, torch warns
            )
    except RuntimeError as error:
        raise ValueError(f"not a CSR matrix of shape {shape}: {error}") from None


def csr_from_entries(
    rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]
) -> Tensor:
    """A CSR matrix from the coordinates and values of its entries, each place named once, in any order."""
    order = torch.argsort(rows * shape[1] + columns)
    counts = torch.bincount(rows, minlength=shape[0])
    pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return csr_from_pointers(pointers, columns[order], values[order], shape)


def row_indices(matrix: Tensor) -> Tensor:
    """The row of each stored entry of a CSR matrix, in order."""
    pointers = matrix.crow_indices()
    return torch.repeat_interleave(
        torch.arange(matrix.shape[0], device=matrix.device), pointers.diff()
    )


def transposed(matrix: Tensor) -> Tensor:
    """The transpose of a CSR matrix, again in CSR."""
    shape = (matrix.shape[1], matrix.shape[0])
    return csr_from_entries(matrix.col_indices(), row_indices(matrix), matrix.values(), shape)
