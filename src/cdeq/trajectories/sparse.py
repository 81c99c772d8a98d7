"""Sparse matrices as the dense tensors that they are made of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def dense_pieces(tensor: Tensor) -> dict[str, Tensor]:
    """The dense tensors of a tensor by name; of a dense one, itself, without a name."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return {"indices": tensor.indices(), "values": tensor.values()}
    if tensor.layout in BY_ROWS:
        rows, columns = tensor.crow_indices(), tensor.col_indices()
        return {"rows": rows, "columns": columns, "values": tensor.values()}
    if tensor.layout in BY_COLUMNS:
        rows, columns = tensor.row_indices(), tensor.ccol_indices()
        return {"column_ends": columns, "row_indices": rows, "values": tensor.values()}
    return {"": tensor}


def from_pieces(layout: torch.layout, pieces: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
    """The inverse of `dense_pieces` for COO and CSR; a ValueError if the pieces do not fit together."""
    if layout not in (torch.sparse_coo, torch.sparse_csr):
        raise TypeError(f"a {layout} tensor cannot be put together again")
    shape = tuple(int(size) for size in shape)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            if layout == torch.sparse_csr:
                parts = (pieces["rows"], pieces["columns"], pieces["values"])
                return torch.sparse_csr_tensor(*parts, shape, check_invariants=True)
            return torch.sparse_coo_tensor(
                pieces["indices"], pieces["values"], shape, is_coalesced=True, check_invariants=True
            )
    except RuntimeError as error:
        raise ValueError(f"not a sparse tensor of shape {shape}: {error}") from None
