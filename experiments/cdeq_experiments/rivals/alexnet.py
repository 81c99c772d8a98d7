"""AlexNet, an explicit image classifier. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

from torch import Tensor, nn

from cdeq.models.arguments import arguments_of
from cdeq_experiments.rivals.image_layers import (
    SMALL_IMAGE,
    check_images,
    check_sizes,
    he_weights,
    stem_stride,
)


class AlexNet(nn.Module):
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
        self.config = arguments_of(locals())
        check_sizes(self.config, "classes", "in_channels", "image_size", "width", "hidden")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")
        small = image_size <= SMALL_IMAGE
        stride = stem_stride(image_size, published=4)
        kernel = 5 if small else 11
        pool_padding = 1 if small else 0

        def convolution(
            inputs: int, outputs: int, kernel: int, *, padding: int, stride: int = 1
        ) -> list[nn.Module]:
            layers: list[nn.Module] = [
                nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=not batch_norm)
            ]
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            return [*layers, nn.ReLU(inplace=True)]

        def pool() -> nn.Module:
            return nn.MaxPool2d(3, stride=2, padding=pool_padding)

        self.convolutions = nn.Sequential(
            *convolution(in_channels, width, kernel, padding=2, stride=stride),
            pool(),
            *convolution(width, 3 * width, 5, padding=2),
            pool(),
            *convolution(3 * width, 6 * width, 3, padding=1),
            *convolution(6 * width, 4 * width, 3, padding=1),
            *convolution(4 * width, 4 * width, 3, padding=1),
            pool(),
        )
        side = (image_size + 4 - kernel) // stride + 1
        for _ in range(3):
            side = (side + 2 * pool_padding - 3) // 2 + 1
        self.hidden = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(4 * width * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
        )
        self.apply(he_weights)
        # After the draw above, which is for layers before a ReLU.
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to logits (B, classes); H and W are `image_size`."""
        check_images(x, self.config["in_channels"], self.config["image_size"])
        return self.head(self.hidden(self.convolutions(x).flatten(1)))
