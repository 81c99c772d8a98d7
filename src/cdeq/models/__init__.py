"""Equilibrium models behind the four-method contract; `MODELS[name](**config)` rebuilds one."""

from torch import nn

from cdeq.models.graph.ignn import IGNN
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.models.vision.conv import ConvDEQ

MODELS: dict[str, type[nn.Module]] = {
    "ConvDEQ": ConvDEQ,
    "IGNN": IGNN,
    "TransformerDEQ": TransformerDEQ,
}

__all__ = ["IGNN", "MODELS", "ConvDEQ", "TransformerDEQ"]
