"""A graph as a suite: one batch, whose training, validation and test nodes share everything but their labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdeq.data.block_graphs import block_model
from cdeq.data.embedded import digits_graph
from cdeq.data.graph_sets import load_graph, require_graph_files
from cdeq.data.graphs import NodeTask
from cdeq.data.label_chains import chain_graphs
from cdeq.data.subgraphs import grouped_tasks, induced, partition, sampled_task
from cdeq.evaluation import Metric, accuracy
from cdeq.models.learned_solvers import IGNNSolver
from cdeq.placement import moved
from cdeq.training.draws import numbered_generator
from cdeq.training.supervised import SupervisedObjective
from cdeq.trajectories.fingerprint import BatchDigest
from cdeq.trajectories.nesting import flatten_batch
from cdeq.trajectories.sparse import dense_pieces
from cdeq_experiments.rivals.graph_convolutions import explicit_loss
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.suites.contract import Batch, Data, Model

PARTS = 8
"""Parts, or samples, that a student may be distilled on in place of the whole graph."""

CHAINS = (5, 10, 20, 40, 70, 100)
"""Lengths of the chains."""


EMBEDDED: dict[str, Callable[..., NodeTask]] = {
    **{f"chains-{n}": partial(chain_graphs, n) for n in CHAINS},
    "digits": digits_graph,
    "blocks": partial(
        block_model, 600, classes=4, degree=8.0, homophily=0.8, features=16, noise=2.0
    ),
}
"""Graphs that need no files: chains, scikit-learn's digits, and a small stochastic block model."""


class Nodes(NamedTuple):
    """What training may know, and the graph that is tested on: the same, unless some test nodes are unseen."""

    seen: NodeTask
    whole: NodeTask


class GraphSuite(Suite):
    """A graph, its IGNN and what is made from it; the seed of the teacher also draws the split."""

    def require_data(self) -> None:
        if self.config.data.name not in EMBEDDED:
            require_graph_files(self.config.data.name, self.options.data)

    @cached_property
    def nodes(self) -> Nodes:
        data, seed = self.config.data, self.teacher_seed
        if data.name in EMBEDDED:
            nodes = EMBEDDED[data.name](seed=seed)
        else:
            nodes = load_graph(data.name, self.options.data, seed=seed)
        if not data.unseen:
            return Nodes(nodes, nodes)
        seen = seen_nodes(nodes, data.unseen, seed)
        part = induced(nodes, seen.nonzero().squeeze(1))
        return Nodes(part, nodes._replace(test=nodes.test & ~seen))

    def open_data(self) -> Data:
        seen, whole = self.nodes
        training = seen.labelled(seen.train)
        classes = int(seen.labels.max()) + 1
        return Data(
            digest=digest_of(whole),
            sizes={"features": seen.graph.features.shape[1], "classes": classes},
            batch_at=lambda update: training,
            valid=lambda: [seen.labelled(seen.valid)],
            test=lambda: [whole.labelled(whole.test)],
        )

    @property
    def metrics(self) -> dict[str, Metric]:
        return {"metric": accuracy()}

    def recorded_batches(self, mode: str, inputs: str) -> list[Batch]:
        """`training`: what the teacher was trained on; `parts` or `samples` of it; or the `whole` graph."""
        seen, whole = self.nodes
        pieces: dict[str, Callable[[], list[NodeTask]]] = {
            "parts": partial(graph_parts, seen, self.teacher_seed),
            "samples": partial(graph_samples, seen, self.teacher_seed),
            "whole": lambda: [whole],
            "training": lambda: [seen],
        }
        return [part.labelled(part.train) for part in pieces[inputs]()]

    def explicit_objective(self, model: nn.Module) -> nn.Module:
        return SupervisedObjective(model, explicit_loss, self.teacher_seed)

    def build_learned_solver(self, teacher: Model) -> IGNNSolver:
        return IGNNSolver(width=teacher.config["width"])

    def probes(self, teacher: Model) -> Iterator[Any]:
        yield self.timed_input()

    def timed_input(self) -> Any:
        return moved(self.nodes.whole.graph, self.options.placement.device)

    def sample_input(self) -> Any:
        return induced(self.nodes.whole, torch.arange(40)).graph


def digest_of(nodes: NodeTask) -> str:
    """A SHA-256 that is the same on every processor: numbers that were computed may be rounded in another way.

    Whole numbers count as they are; of others, which are not zero, and two digits of their mean.
    """
    structure, tensors = flatten_batch(*nodes.labelled(nodes.train))
    found, means, exact = BatchDigest(), dict[str, str](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        for part, piece in dense_pieces(tensor).items():
            key = f"{name} {part}"
            exact[key] = piece != 0 if piece.is_floating_point() else piece
            means[key] = f"{float(piece.double().mean()):.2g}"
    found.update({"tree": structure, "means": means}, exact)
    return found.hexdigest()


def seen_nodes(nodes: NodeTask, unseen: float, seed: int) -> Tensor:
    """The mask (N,) of the nodes that training may know: all but a share of the test nodes."""
    drawn = torch.rand(len(nodes.labels), generator=numbered_generator(seed, 0))
    return ~(nodes.test & (drawn < unseen))


def graph_parts(nodes: NodeTask, seed: int) -> list[NodeTask]:
    """All nodes, in groups of small parts."""
    small = partition(nodes.graph.adjacency, PARTS**2, seed=seed)
    return grouped_tasks(nodes, small, PARTS, seed=seed)


def graph_samples(nodes: NodeTask, seed: int) -> list[NodeTask]:
    """Random-walk samples, each of an eighth of the nodes."""
    size = len(nodes.labels) // PARTS
    return [
        sampled_task(nodes, size=size, generator=numbered_generator(seed, number))
        for number in range(PARTS)
    ]
