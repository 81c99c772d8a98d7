"""Equilibrium models behind the four-method contract; `MODELS[name](**config)` rebuilds one."""

from torch import nn

from cdeq.models.graph.eignn import EIGNN
from cdeq.models.graph.ignn import IGNN
from cdeq.models.graph.mignn import MIGNN
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.models.vision.conv import ConvDEQ
from cdeq.models.vision.mdeq import MDEQ

MODELS: dict[str, type[nn.Module]] = {
    "ConvDEQ": ConvDEQ,
    "DEQTransformer": DEQTransformer,
    "EIGNN": EIGNN,
    "IGNN": IGNN,
    "MDEQ": MDEQ,
    "MIGNN": MIGNN,
    "TransformerDEQ": TransformerDEQ,
}
"""Classes by the name under which a saved student keeps its teacher's."""

__all__ = [
    "EIGNN",
    "IGNN",
    "MDEQ",
    "MIGNN",
    "MODELS",
    "ConvDEQ",
    "DEQTransformer",
    "TransformerDEQ",
]
