"""What the explicit image classifiers share. Shapes: B images, C channels, H x W pixels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# Up to here the published stems, made for 224 pixels, would leave too few positions.
SMALL_IMAGE = 64
# Each classifier halves its maps three times after the stem.
SMALLEST_IMAGE = 8


def stem_stride(image_size: int, published: int) -> int:
    """The stride of the first convolution: 1 up to 32 pixels, 2 up to 64, the published one above.

    So images of 32 and of 64 pixels both leave it as maps of 32 x 32.
    """
    if image_size > SMALL_IMAGE:
        return published
    return 1 if image_size <= SMALL_IMAGE // 2 else 2


def conv_norm(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, relu: bool = True
) -> nn.Sequential:
    """relu(BN(conv(x))), (B, inputs, H, W) to (B, outputs, ceil(H / stride), ceil(W / stride)).

    The kernel is odd. The convolution has no bias, which the batch norm would take away again.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    if relu:
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def he_weights(module: nn.Module) -> None:
    """Weights of variance 2 / fan-in (He et al. 2015, equation 10) and no bias, for a layer before a ReLU.

    For `Module.apply`: layers other than convolutions and linear ones stay as they are.
    """
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def check_sizes(config: dict[str, Any], *names: str) -> None:
    """Refuses, by name, sizes that are not positive whole numbers, and images of too few pixels."""
    for name in names:
        size = config[name]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {size!r}")
    if config["image_size"] < SMALLEST_IMAGE:
        raise ValueError(
            f"image_size must be at least {SMALLEST_IMAGE}, not {config['image_size']}: the maps are halved "
            "three times; enlarge the images first"
        )


def check_images(x: Tensor, in_channels: int, image_size: int | None = None) -> None:
    """Refuses what is not a batch of images (B, in_channels, H, W), of `image_size` pixels if it is given."""
    side = "H" if image_size is None else str(image_size)
    expected = f"(B, {in_channels}, {side}, {'W' if image_size is None else side})"
    fits = x.ndim == 4 and x.shape[1] == in_channels
    if fits and image_size is not None:
        fits = tuple(x.shape[2:]) == (image_size, image_size)
    if not fits:
        raise ValueError(
            f"images must have the shape {expected}, not {tuple(x.shape)}: resize them, or build "
            "the model with their in_channels and image_size"
        )
