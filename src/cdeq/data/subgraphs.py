"""Parts of a graph as graphs of their own, for graphs that do not fit, or nodes not seen in training.

Shapes: N nodes, E stored entries of the adjacency, n nodes of a subgraph, P parts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cdeq.data.graphs import Graph, NodeTask, normalised_adjacency
from cdeq.data.sparse import SparseMatrix, csr_from_pointers, row_indices

BALANCE = 0.2
"""How far the size of a part may lie from N / P, as a fraction of it."""

REFINEMENTS = 40
"""Rounds of moving nodes to where most of their neighbours are; they stop early once they gain little."""

COUNTED_AT_ONCE = 2**22
"""Numbers in a table of neighbours by part: N / P rows of it at a time, so that memory stays small."""

WALK_LENGTH = 64
"""Steps of a random walk before it starts elsewhere: about how many nodes hang together in a sample."""


def induced(task: NodeTask, nodes: Tensor) -> NodeTask:
    """The subgraph on `nodes` (n,), in their order: the edges among them, normalised by their degrees there."""
    adjacency, features = task.graph
    total = adjacency.shape[0]
    _check_nodes(nodes, total)
    local = torch.full((total,), -1, device=nodes.device, dtype=torch.long)
    local[nodes] = torch.arange(len(nodes), device=nodes.device)
    entries, sources = _entries_of_rows(adjacency, nodes)
    targets = local[adjacency.col_indices()[entries]]
    edge = (targets >= 0) & (targets != sources)  # the loops are the normalisation's
    own = normalised_adjacency(torch.stack([sources[edge], targets[edge]]), len(nodes))
    return NodeTask(
        Graph(own.to(adjacency.dtype), _feature_rows(features, nodes)),
        *(part[nodes] for part in (task.labels, task.train, task.valid, task.test)),
    )


def with_halo(adjacency: Tensor, nodes: Tensor, hops: int) -> Tensor:
    """The nodes, as they are given, then all others up to `hops` edges away, in ascending order."""
    if hops < 0:
        raise ValueError(f"hops must not be negative, not {hops}")
    _check_nodes(nodes, adjacency.shape[0])
    inside = torch.zeros(adjacency.shape[0], dtype=torch.bool, device=nodes.device)
    inside[nodes] = True
    frontier, columns = nodes, adjacency.col_indices()
    for _ in range(hops):
        reached = columns[_entries_of_rows(adjacency, frontier)[0]]
        frontier = reached[~inside[reached]].unique()
        inside[frontier] = True
    inside[nodes] = False
    return torch.cat([nodes, inside.nonzero().flatten()])


def part_tasks(task: NodeTask, parts: list[Tensor], hops: int = 1) -> list[NodeTask]:
    """Each part with its halo as a task; splits hold on the part's own nodes, which come first.

    Over a cover by disjoint parts every node counts once. A halo node is there for its neighbours only.
    """
    found = []
    for part in parts:
        near = induced(task, with_halo(task.graph.adjacency, part, hops))
        own = torch.arange(len(near.labels), device=part.device) < len(part)
        found.append(
            near._replace(train=near.train & own, valid=near.valid & own, test=near.test & own)
        )
    return found


def grouped_tasks(
    task: NodeTask, parts: list[Tensor], groups: int, *, seed: int = 0
) -> list[NodeTask]:
    """The parts dealt at random into `groups` of them, each group a subgraph (Chiang et al. 2019, Cluster-GCN).

    A single part is often of one class; a group of many has something of all, and the edges between its parts.
    """
    if not 1 <= groups <= len(parts):
        raise ValueError(f"groups must be from 1 to the {len(parts)} parts, not {groups}")
    order = _shuffled(torch.arange(len(parts)), torch.Generator().manual_seed(seed)).tolist()
    dealt = [order[first::groups] for first in range(groups)]
    return [induced(task, torch.cat([parts[i] for i in group]).sort().values) for group in dealt]


def sampled_task(task: NodeTask, *, size: int, generator: torch.Generator) -> NodeTask:
    """The subgraph on `size` nodes that random walks pass through (Zeng et al. 2020, GraphSAINT), in ascending order.

    Walks start at random nodes not yet seen, and again once they are long or find nothing new, so
    that small components and lone nodes have their share.
    """
    adjacency = task.graph.adjacency
    total = adjacency.shape[0]
    if not 1 <= size <= total:
        raise ValueError(f"size must be from 1 to the graph's {total} nodes, not {size}")
    pointers, columns = adjacency.crow_indices(), adjacency.col_indices()
    degrees = pointers.diff()
    seen = torch.zeros(total, dtype=torch.bool, device=adjacency.device)
    walks, left = math.ceil(size / WALK_LENGTH), size

    def visit(nodes: Tensor) -> int:
        """Mark new nodes as seen, in random order and no more than are wanted; how many they were."""
        nonlocal left
        new = _shuffled(nodes[~seen[nodes]].unique(), generator)[:left]
        seen[new] = True
        left -= len(new)
        return len(new)

    while left:
        unseen = (~seen).nonzero().flatten()
        at = _shuffled(unseen, generator)[: min(walks, left)]
        visit(at)
        for _ in range(WALK_LENGTH):
            draws = torch.rand(len(at), generator=generator, device=generator.device).to(at.device)
            choice = (draws * degrees[at]).long().clamp_max(degrees[at] - 1)
            # A row without entries stays where it is.
            at = torch.where(choice < 0, at, columns[(pointers[at] + choice).clamp_min(0)])
            if not left or not visit(at):
                break
    return induced(task, seen.nonzero().flatten())


def partition(adjacency: Tensor, parts: int, *, seed: int = 0) -> list[Tensor]:
    """Disjoint parts that cover the graph, with few edges between them: each its nodes in ascending order.

    Parts grow from random nodes, one ring of neighbours in each round, up to equal sizes. Then nodes move
    to the part that most of their neighbours are in, while every size stays within a fifth of N / P
    (or within one node of it, where parts are tiny). Time is linear in the edges, for a given P.
    """
    nodes = adjacency.shape[0]
    if adjacency.shape[0] != adjacency.shape[1]:
        raise ValueError(f"an adjacency is square, not of shape {tuple(adjacency.shape)}")
    if not 1 <= parts <= max(nodes, 1):
        raise ValueError(f"parts must be from 1 to the graph's {nodes} nodes, not {parts}")
    if parts == 1:
        return [torch.arange(nodes, device=adjacency.device)]
    generator = torch.Generator().manual_seed(seed)
    label = _refined(adjacency, _grown(adjacency, parts, generator), parts, generator)
    order = torch.argsort(label, stable=True)
    return list(order.split(torch.bincount(label, minlength=parts).tolist()))


def cut_fraction(adjacency: Tensor, parts: list[Tensor]) -> float:
    """The share of edges, self-loops aside, whose two ends lie in different parts."""
    label = torch.full((adjacency.shape[0],), -1, device=adjacency.device, dtype=torch.long)
    for number, part in enumerate(parts):
        label[part] = number
    rows, columns = row_indices(adjacency), adjacency.col_indices()
    edges = int((rows != columns).sum())
    return float((label[rows] != label[columns]).sum()) / max(edges, 1)


def _check_nodes(nodes: Tensor, total: int) -> None:
    if nodes.dtype != torch.long or nodes.dim() != 1:
        raise ValueError(
            f"nodes are a vector of indices (torch.long), not {tuple(nodes.shape)} of {nodes.dtype}; "
            "of a mask take mask.nonzero().flatten()"
        )
    if not len(nodes):
        raise ValueError("nodes is empty: a subgraph needs at least one node")
    if int(nodes.min()) < 0 or int(nodes.max()) >= total:
        raise ValueError(
            f"nodes must lie from 0 to {total - 1}: {int(nodes.min())}, {int(nodes.max())}"
        )
    if len(nodes.unique()) < len(nodes):
        raise ValueError("nodes names a node more than once; take nodes.unique()")


def _entries_of_rows(matrix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the entries of these rows of a CSR matrix are stored, and which of `rows` each is in (0 ... n - 1)."""
    pointers = matrix.crow_indices()
    first, counts = pointers[rows], pointers[rows + 1] - pointers[rows]
    ends = counts.cumsum(0)
    owner = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
    within = torch.arange(len(owner), device=rows.device) - (ends - counts)[owner]
    return first[owner] + within, owner


def _feature_rows(features: Tensor | SparseMatrix, nodes: Tensor) -> Tensor | SparseMatrix:
    if isinstance(features, Tensor):
        return features[nodes]
    matrix = features.matrix
    entries, owner = _entries_of_rows(matrix, nodes)
    counts = torch.bincount(owner, minlength=len(nodes))
    pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    columns, values = matrix.col_indices()[entries], matrix.values()[entries]
    shape = (len(nodes), matrix.shape[1])
    return SparseMatrix.of(csr_from_pointers(pointers, columns, values, shape))


def _shuffled(items: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(len(items), generator=generator, device=generator.device)
    return items[order.to(items.device)]


def _grown(adjacency: Tensor, parts: int, generator: torch.Generator) -> Tensor:
    """A label (N,) for each node, by breadth-first growth of all parts at once; sizes differ by at most one."""
    nodes, device = adjacency.shape[0], adjacency.device
    columns = adjacency.col_indices()
    label = torch.full((nodes,), -1, device=device, dtype=torch.long)
    room = torch.full((parts,), nodes // parts, device=device)
    room[: nodes % parts] += 1
    waiting = _shuffled(torch.arange(nodes, device=device), generator)  # to start from
    frontier, seeds = waiting[:0], 1
    while bool((room > 0).any()):
        if not len(frontier):
            # All that is left lies in other components, or behind parts that are full. More seeds
            # each time, or a graph of many small components would take a round for each.
            waiting = waiting[label[waiting] < 0]
            open_parts = (room > 0).nonzero().flatten().repeat(seeds)[: len(waiting)]
            reached, owner, seeds = waiting[: len(open_parts)], open_parts, seeds + 1
        else:
            entries, source = _entries_of_rows(adjacency, frontier)
            reached, owner = columns[entries], label[frontier][source]
            free = label[reached] < 0
            reached, owner = reached[free], owner[free]
        label, frontier = _joined(label, room, reached, owner)
    return label


def _joined(label: Tensor, room: Tensor, nodes: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Give each of the free `nodes` to one of the parts that reached it, while that has room: new labels, new nodes."""
    label[nodes] = owner  # of several owners of a node, one
    nodes = nodes.unique()
    accepted = _within_limits(label[nodes], torch.ones_like(nodes), room)
    label[nodes[~accepted]] = -1
    nodes = nodes[accepted]
    room -= torch.bincount(label[nodes], minlength=len(room))
    return label, nodes


def _within_limits(groups: Tensor, worth: Tensor, limits: Tensor) -> Tensor:
    """Of the members of each group the `limits[group]` of the highest worth, as a mask."""
    order = torch.argsort(worth, descending=True, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    counts = torch.bincount(groups, minlength=len(limits))
    begins = (counts.cumsum(0) - counts)[groups[order]]
    place = torch.arange(len(order), device=order.device) - begins
    kept = torch.zeros_like(groups, dtype=torch.bool)
    kept[order] = place < limits[groups[order]]
    return kept


def _refined(adjacency: Tensor, label: Tensor, parts: int, generator: torch.Generator) -> Tensor:
    """Labels after rounds of size-capped label propagation (Ugander and Backstrom 2013)."""
    nodes = len(label)
    low = min(math.ceil((1 - BALANCE) * nodes / parts), nodes // parts)
    high = max(math.floor((1 + BALANCE) * nodes / parts), math.ceil(nodes / parts))
    rows, columns = row_indices(adjacency), adjacency.col_indices()
    edge = rows != columns
    rows, columns = rows[edge], columns[edge]
    best_cut = int((label[rows] != label[columns]).sum())
    patience = 3
    for _ in range(REFINEMENTS):
        gain, target = _best_moves(rows, columns, label, parts)
        # Half of the nodes at a time: two neighbours that swap parts for each other gain nothing.
        awake = torch.rand(nodes, generator=generator).to(label.device) < 0.5
        movers = ((gain > 0) & awake).nonzero().flatten()
        for end, bound in ((target, 1), (label, -1)):
            sizes = torch.bincount(label, minlength=parts)
            limits = (high - sizes if bound > 0 else sizes - low).clamp_min(0)
            movers = movers[_within_limits(end[movers], gain[movers], limits)]
        label[movers] = target[movers]
        cut = int((label[rows] != label[columns]).sum())
        patience = 3 if cut < 0.995 * best_cut else patience - 1
        best_cut = min(cut, best_cut)
        if not patience or not len(movers):
            break
    return label


def _best_moves(rows: Tensor, columns: Tensor, label: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """For each node the part with most of its neighbours, and how many more they are than in its own."""
    nodes = len(label)
    step = max(COUNTED_AT_ONCE // parts, 1)
    bounds = torch.arange(0, nodes + step, step, device=rows.device).clamp_max(nodes)
    cuts = torch.searchsorted(rows, bounds).tolist()
    gains, targets = [], []
    for first, begin, end in zip(range(0, nodes, step), cuts, cuts[1:], strict=False):
        own = label[first : first + step]
        keys = (rows[begin:end] - first) * parts + label[columns[begin:end]]
        counts = torch.bincount(keys, minlength=len(own) * parts).view(len(own), parts)
        most, where = counts.max(dim=1)
        gains.append(most - counts.gather(1, own[:, None]).squeeze(1))
        targets.append(where)
    return torch.cat(gains), torch.cat(targets)
