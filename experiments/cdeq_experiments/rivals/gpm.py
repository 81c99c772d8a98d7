"""The neural graph pattern machine (Wang et al. 2025), a rival that passes no messages.

Shapes: N nodes, B of them at a time, P patterns of a node, L steps of a pattern, D width, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.data.graphs import Graph
from cdeq.data.walks import anonymous_paths, distinct_paths, random_walks
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
