"""Explicit graph networks, rivals of the implicit ones. Shapes: N nodes, F features, D width, C classes.

Their layers come from torch_geometric (the extra `graphs`); sums over neighbours in GCN and GCNII go
through our own sparse product, nine times as fast there as gathering along edges, so that nothing
slows the rivals down. The adjacency of a `Graph` is normalised and has its self-loops already.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.data.graphs import Graph
from cdeq.labels import IGNORED
from cdeq.models.graph.dropout import drop, drop_features
from cdeq.models.graph.sparse import project_features, sparse_product
from cdeq_experiments.rivals.arguments import checked_arguments
from cdeq_experiments.rivals.gpm import GPM


class _Convolutions(nn.Module):
    """Convolutions with an activation and dropout between them, on projected features.

    The first weight is `project`, outside its layer, so that features may be sparse: A (X W_1). The layer itself
    has the identity in W_1's place, which makes the same function.
    """

    activation: Callable[[Tensor], Tensor]
    layer: Callable[[int, int, int], nn.Module]
    """From the numbers of inputs, of outputs of a head, and of heads."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config, self.dropout = config, config["dropout"]
        heads = (config["width"], config.get("heads", 1))
        shapes = [*[heads] * (config["layers"] - 1), (config["classes"], 1)]
        widths = [width * count for width, count in shapes]
        self.project = nn.Linear(config["features"], widths[0], bias=False)
        nn.init.xavier_uniform_(self.project.weight)  # as a torch_geometric layer starts it
        self.convs = nn.ModuleList(
            self.layer(before, *shape)
            for before, shape in zip([widths[0], *widths], shapes, strict=False)
        )
        self.convs[0].lin = nn.Identity()

    def forward(self, x: Graph) -> Tensor:
        """Logits (N, C)."""
        h = project_features(self.project, drop_features(x.features, self.dropout, self.training))
        h = self.convs[0](h, x.adjacency)
        for conv in self.convs[1:]:
            h = conv(drop(self.activation(h), self.dropout, self.training), x.adjacency)
        return h


class GCN(_Convolutions):
    """H_l = relu(A H_{l-1} W_l + b_l), H_0 = X, no relu at the end (Kipf and Welling 2017)."""

    activation = staticmethod(F.relu)

    def __init__(
        self,
        *,
        features: int,
        classes: int,
        width: int = 64,
        layers: int = 2,
        dropout: float = 0.5,
    ):
        super().__init__(checked_arguments(locals()))

    def layer(self, before: int, after: int, heads: int) -> nn.Module:
        return _with_our_product("GCNConv", before, after)


class GAT(_Convolutions):
    """h_i = sum_j a_ij W x_j, a_ij = softmax_j(leaky(u.W x_i + v.W x_j)), j in i's row of A (Velickovic et al. 2018).

    As published: `heads` heads of `width` side by side with elu between layers, one head at the end,
    dropout on inputs and on a_ij. The values of the adjacency are not used, its self-loops are.
    """

    activation = staticmethod(F.elu)

    def __init__(
        self,
        *,
        features: int,
        classes: int,
        width: int = 8,
        layers: int = 2,
        dropout: float = 0.6,
        heads: int = 8,
    ):
        super().__init__(checked_arguments(locals()))

    def layer(self, before: int, after: int, heads: int) -> nn.Module:
        # The adjacency has self-loops; taking them out and in again would cost at each call.
        options = {"heads": heads, "dropout": self.dropout, "add_self_loops": False}
        return _torch_geometric().GATConv(before, after, **options)


class GCNII(nn.Module):
    """H_l = relu(S ((1 - b_l) I + b_l W_l)), S = (1 - alpha) A H_{l-1} + alpha H_0 (Chen et al. 2020).

    b_l = log(theta / l + 1) and H_0 = relu(X W_in + bias); a linear layer turns the last state into logits.
    """

    def __init__(
        self,
        *,
        features: int,
        classes: int,
        width: int = 64,
        layers: int = 16,
        dropout: float = 0.5,
        alpha: float = 0.1,
        theta: float = 0.5,
    ):
        super().__init__()
        self.config, self.dropout = checked_arguments(locals()), dropout
        self.lin_in = nn.Linear(features, width)
        self.convs = nn.ModuleList(
            _with_our_product("GCN2Conv", width, alpha, theta, layer)
            for layer in range(1, layers + 1)
        )
        self.lin_out = nn.Linear(width, classes)

    def forward(self, x: Graph) -> Tensor:
        """Logits (N, C)."""
        features = drop_features(x.features, self.dropout, self.training)
        first = h = F.relu(project_features(self.lin_in, features))
        for conv in self.convs:
            h = F.relu(conv(drop(h, self.dropout, self.training), first, x.adjacency))
        return self.lin_out(drop(h, self.dropout, self.training))


def explicit_loss(model: nn.Module, x: Graph, labels: Tensor) -> Tensor:
    """Mean cross entropy over the labelled nodes; in `labels` (N,) the others are -100.

    GPM answers for these nodes alone; the others always compute the whole graph.
    """
    nodes = (labels != IGNORED).nonzero().squeeze(1)
    if len(nodes) == 0:
        raise ValueError(f"all {len(labels)} labels are {IGNORED}: give at least one node a label")
    logits = model(x, nodes) if isinstance(model, GPM) else model(x)[nodes]
    return F.cross_entropy(logits, labels[nodes])


def _torch_geometric() -> Any:
    """The layers of torch_geometric, imported only when a model needs them."""
    try:
        with warnings.catch_warnings():
            # Loading it compiles functions in a way that torch is about to give up.
            warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
            from torch_geometric import nn as layers
    except ImportError as error:
        raise ImportError(
            "GCN, GAT and GCNII need torch_geometric: pip install 'cdeq[graphs]'"
        ) from error
    return layers


def _with_our_product(name: str, *sizes: float) -> Any:
    """A layer whose sum over neighbours is our sparse product; a plain function, so that it can be pickled."""
    conv = getattr(_torch_geometric(), name)(*sizes, normalize=False)
    conv.propagate = _propagate
    return conv


def _propagate(
    edge_index: Tensor, size: Any = None, *, x: Tensor, edge_weight: Tensor | None = None
) -> Tensor:
    return sparse_product(edge_index, x)
