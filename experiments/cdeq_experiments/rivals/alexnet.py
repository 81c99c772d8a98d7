"""AlexNet, an explicit image classifier. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from cdeq_experiments.rivals.arguments import checked_arguments
from cdeq_experiments.rivals.image_layers import SMALL_IMAGE, ImageClassifier, stem_stride

POOLED = (0, 1, 4)
"""The convolutions before a max pool."""


class AlexNet(ImageClassifier):
    """y = W3 relu(W2 relu(W1 c(x))), c five convolutions with ReLUs and three max pools (Krizhevsky 2012).

    The one-tower form of Krizhevsky 2014. Its convolutions have 1, 3, 6, 4 and 4 times `width`
    channels: 64, 192, 384, 256 and 256 as published. `hidden` is the width of the two linear layers
    before the last, each behind a dropout. The local response normalisation of 2012 is left out;
    `batch_norm` puts a batch norm behind each convolution instead. Weights start as He et al. (2015)
    draw them, not from the paper's normal of deviation 0.01, which depends on the published sizes.

    Above 64 pixels the first convolution is the published one, 11 x 11 with stride 4, and the pools
    have no padding: 224 pixels become 55, 27, 13 and 6. Up to 64 pixels it is 5 x 5 with stride 1
    (up to 32 pixels) or 2, and each pool halves its map: 32 and 64 pixels become 32, 16, 8 and 4.
    """

    fixed_size = True

    def __init__(
        self,
        *,
        classes: int,
        in_channels: int = 3,
        image_size: int = 224,
        width: int = 64,
        hidden: int = 4096,
        dropout: float = 0.5,
        batch_norm: bool = False,
    ):
        super().__init__()
        self.config = checked_arguments(locals())
        small, times = image_size <= SMALL_IMAGE, (1, 3, 6, 4, 4)
        channels = [in_channels, *(width * each for each in times)]
        kernels = [5 if small else 11, 5, 3, 3, 3]
        strides = [stem_stride(image_size, published=4), 1, 1, 1, 1]
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(pairwise(channels)):
            kernel, bias = kernels[i], not batch_norm
            padding = min(kernel // 2, 2)
            layers.append(nn.Conv2d(inputs, outputs, kernel, strides[i], padding, bias=bias))
            layers += [nn.BatchNorm2d(outputs)] if batch_norm else []
            layers.append(nn.ReLU(inplace=True))
            if i in POOLED:
                layers.append(nn.MaxPool2d(3, stride=2, padding=int(small)))
        self.convolutions = nn.Sequential(*layers)
        side = (image_size + 4 - kernels[0]) // strides[0] + 1
        for _ in POOLED:
            side = (side + 2 * small - 3) // 2 + 1
        self.hidden = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels[-1] * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
        )
        self.finish(hidden)

    def features(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to (B, hidden)."""
        return self.hidden(self.convolutions(x).flatten(1))
