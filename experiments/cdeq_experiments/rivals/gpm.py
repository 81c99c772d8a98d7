"""The neural graph pattern machine (Wang et al. 2025), a rival that passes no messages.

Shapes: N nodes, B of them at a time, P patterns of a node, L steps of a pattern, D width, C classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.data.graphs import Graph
from cdeq.models.graph.sparse import project_features
from cdeq_experiments.rivals.arguments import checked_arguments


class GPM(nn.Module):
    """logits_v = head(mean_p T(p_1 .. p_P)), p = semantic(X W along a walk) + weight anonymous(walk).

    A pattern of node v is a random walk of `length` steps from it, read twice: a GRU over the
    projected features of the nodes it visits, and a GRU over its anonymous path, the order in which
    they were first visited. The transformer T looks at all `patterns` of a node together, so that
    those that matter weigh more.

    Each call in training draws new walks; evaluation draws the same ones each time, from `seed`, for
    the same list of nodes. The buffer `calls` counts training calls, so a resumed run goes on with
    the walks that it would have had. At most `chunk` nodes are in work at a time.

    Simpler than the published model: one walk length, no positional features of nodes, no edge
    features, no extra walks at test time, and by default fewer patterns.
    """

    calls: Tensor

    def __init__(
        self,
        *,
        features: int,
        classes: int,
        width: int = 64,
        layers: int = 1,
        dropout: float = 0.1,
        patterns: int = 16,
        length: int = 8,
        heads: int = 4,
        anonymous_weight: float = 1.0,
        seed: int = 0,
        chunk: int = 2048,
    ):
        super().__init__()
        self.config = checked_arguments(locals())
        if width % heads:
            raise ValueError(f"width ({width}) must be a multiple of heads ({heads})")
        self.patterns, self.length, self.chunk = patterns, length, chunk
        self.anonymous_weight, self.seed, self.dropout = anonymous_weight, seed, dropout
        self.project = nn.Linear(features, width)
        self.semantic = nn.GRU(width, width)
        self.anonymous = nn.GRU(length + 1, width)
        self.select = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True),
            layers,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(width, classes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Graph, nodes: Tensor | None = None) -> Tensor:
        """Logits (B, C) of `nodes` (B,), or of all."""
        adjacency, features = x
        if nodes is None:
            nodes = torch.arange(adjacency.shape[0], device=adjacency.device)
        if len(nodes) == 0:
            raise ValueError("nodes is empty: give at least one node, or None for all")
        self.calls += self.training
        # Call 0 is evaluation's; the stride keeps the calls of neighbouring seeds apart.
        call = int(self.calls) if self.training else 0
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + call)
        projected = project_features(self.project, features)
        projected = F.dropout(projected, self.dropout, self.training)
        one_hot = torch.eye(self.length + 1, dtype=projected.dtype, device=projected.device)
        logits = []
        for part in nodes.split(self.chunk):
            walks = random_walks(adjacency, part, self.patterns, self.length, generator)
            walks = walks.flatten(0, 1)  # (B P, L + 1)
            meaning = read_paths(self.semantic, projected, walks)
            paths, path_of_walk = distinct_paths(anonymous_paths(walks))
            structure = F.embedding(path_of_walk, read_paths(self.anonymous, one_hot, paths))
            encoded = meaning + self.anonymous_weight * structure
            encoded = self.select(encoded.view(len(part), self.patterns, -1))
            logits.append(self.head(encoded.mean(dim=1)))
        return torch.cat(logits)


def read_paths(gru: nn.GRU, symbols: Tensor, paths: Tensor) -> Tensor:
    """The GRU's last state (M, D) along paths (M, L + 1) of indices into its inputs, `symbols` (K, .).

    r, z = sigmoid(i + U h), n = tanh(i + r * U h), h <- (1 - z) n + z h. The input's part i is computed
    once for each symbol, not at each visit, which halves the time that nn.GRU itself would take.
    """
    width = gru.hidden_size
    of_input, of_state, input_bias, state_bias = gru.all_weights[0]
    inputs = F.linear(symbols, of_input, input_bias)
    h = inputs.new_zeros(len(paths), width)
    for visited in paths.unbind(dim=1):
        i = F.embedding(visited, inputs)
        u = F.linear(h, of_state, state_bias)
        r, z = torch.sigmoid(i[:, : 2 * width] + u[:, : 2 * width]).chunk(2, dim=1)
        n = torch.tanh(torch.addcmul(i[:, 2 * width :], r, u[:, 2 * width :]))
        h = torch.lerp(n, h, z)
    return h


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
