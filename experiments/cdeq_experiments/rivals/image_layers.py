"""What the explicit image classifiers share. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Up to here the published stems, made for 224 pixels, would leave too few positions.
SMALL_IMAGE = 64


class ImageClassifier(nn.Module):
    """logits = head(features(x)); each network has its own `features`, (B, in_channels, H, W) to (B, F)."""

    fixed_size = False
    """Whether images must have the `image_size` that it was built for, which else only rules the stem."""
    config: dict[str, Any]
    features: Callable[[Tensor], Tensor]

    def finish(self, features: int) -> None:
        """Draw the weights of all layers so far, which stand before a ReLU, and add the head, which does not."""
        self.apply(he_weights)
        self.head = nn.Linear(features, self.config["classes"])

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to logits (B, classes)."""
        channels, size = self.config["in_channels"], self.config["image_size"]
        fits = x.ndim == 4 and x.shape[1] == channels
        if not fits or (self.fixed_size and x.shape[2:] != (size, size)):
            sides = f"{size}, {size}" if self.fixed_size else "H, W"
            raise ValueError(
                f"images must have the shape (B, {channels}, {sides}), not {tuple(x.shape)}"
            )
        return self.head(self.features(x))


def stem_stride(image_size: int, published: int) -> int:
    """The stride of the first convolution: 1 up to 32 pixels, 2 up to 64, the published one above.

    So images of 32 and of 64 pixels both leave it as maps of 32 x 32.
    """
    if image_size > SMALL_IMAGE:
        return published
    return 1 if image_size <= SMALL_IMAGE // 2 else 2


def conv_norms(inputs: int, *layers: tuple[int, ...], relu: bool = True) -> nn.Sequential:
    """x <- relu(BN(conv(x))) for each (outputs, kernel) or (outputs, kernel, stride); `relu`: after the last too.

    Maps (B, C, H, W) become (B, outputs, ceil(H / stride), ceil(W / stride)). Kernels are odd. The
    convolutions have no bias, which the batch norm would take away again.
    """
    chain: list[nn.Module] = []
    for outputs, kernel, *more in layers:
        stride = more[0] if more else 1
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        chain += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        inputs = outputs
    return nn.Sequential(*(chain if relu else chain[:-1]))


def he_weights(module: nn.Module) -> None:
    """Weights of variance 2 / fan-in (He et al. 2015, equation 10) and no bias, for a layer before a ReLU.

    For `Module.apply`: layers other than convolutions and linear ones stay as they are.
    """
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
