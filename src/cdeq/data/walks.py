"""Random walks on a graph, and their shapes without names. Shapes: N nodes, B starts, M walks, L steps of a walk."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def random_walks(
    adjacency: Tensor, starts: Tensor, walks: int, length: int, generator: torch.Generator
) -> Tensor:
    """Nodes (B, walks, length + 1) of unbiased random walks along a CSR adjacency (N, N) from `starts` (B,).

    Each step goes to one of the node's neighbours, all equally likely, never along its self-loop;
    a node without neighbours stays where it is. The generator is one of the CPU.
    """
    pointers, columns = adjacency.crow_indices(), adjacency.col_indices()
    visited = [starts.repeat_interleave(walks)]
    for _ in range(length if len(columns) else 0):
        at = visited[-1]
        first = pointers[at]
        degree = pointers[at + 1] - first
        # In double precision, where a number below 1 times a degree stays below the degree.
        draws = torch.rand(2, len(at), dtype=torch.float64, generator=generator).to(at.device)
        last = (first + degree - 1).clamp_min(0)
        # Where the draw is the node itself, again from the row without its last entry; should that be the node
        # too, that entry. With d entries, self-loop among them, a neighbour is then drawn with chance
        # 1/d + 1/d 1/(d - 1) = 1/(d - 1): evenly, without a list of self-loops.
        once = columns[torch.minimum(first + (draws[0] * degree).long(), last)]
        again = columns[torch.minimum(first + (draws[1] * (degree - 1)).long(), last)]
        again = torch.where(again == at, columns[last], again)
        step = torch.where(once == at, again, once)
        visited.append(torch.where(degree == 0, at, step))
    visited += visited[:1] * (length + 1 - len(visited))
    return torch.stack(visited, dim=1).view(len(starts), walks, length + 1)


def anonymous_paths(walks: Tensor) -> Tensor:
    """Each node of walks (M, L + 1) by its rank of first visit: (a, b, a, c) becomes (0, 1, 0, 2)."""
    same = walks.unsqueeze(-1) == walks.unsqueeze(-2)  # (M, L + 1, L + 1)
    first_visit = same.to(torch.uint8).argmax(dim=-1)  # argmax names the first of equals
    new = first_visit == torch.arange(walks.shape[-1], device=walks.device)
    return (new.cumsum(dim=-1) - 1).gather(-1, first_visit)


def distinct_paths(paths: Tensor) -> tuple[Tensor, Tensor]:
    """Anonymous paths (M, L + 1) without repeats (K, L + 1), and where each of the M stands among them.

    Few paths differ, so each need be read only once. The entry at place i is at most i, so a number with
    i + 1 for its ith base names the path, and numbers sort faster than rows; int64 holds 20 places.
    """
    places = paths.shape[1]
    if places > 20:
        return torch.unique(paths, dim=0, return_inverse=True)
    bases = torch.tensor([math.factorial(i) for i in range(places)], device=paths.device)
    names, where = torch.unique((paths * bases).sum(dim=1), return_inverse=True)
    example = where.new_empty(len(names))
    example[where] = torch.arange(len(paths), device=paths.device)
    return paths[example], where
