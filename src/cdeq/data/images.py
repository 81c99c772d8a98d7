"""Labelled images in memory, and what is done to them on the way to a model.

Shapes: N images, B of them in a batch, C channels, H x W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Images:
    """`pixels` (N, C, H, W) uint8, `labels` (N,) int64."""

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.ndim != 4 or self.pixels.dtype != torch.uint8:
            raise ValueError(
                f"pixels must be bytes (N, C, H, W), not {self.pixels.dtype} {tuple(self.pixels.shape)}"
            )
        if self.labels.shape != self.pixels.shape[:1] or self.labels.dtype != torch.int64:
            raise ValueError(
                f"{len(self.pixels)} images need as many labels (int64), "
                f"not {self.labels.dtype} {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: Tensor) -> Images:
        """The images at these places (K,)."""
        return Images(pixels=self.pixels[chosen], labels=self.labels[chosen])


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Images to train on, to choose settings by and to report; `digest` changes with any of their bytes."""

    name: str
    train: Images
    valid: Images
    test: Images
    classes: tuple[str, ...]
    digest: str

    def standard(self) -> Standard:
        """Mean and deviation of each channel of the training images."""
        pixels = self.train.pixels
        mean, deviation = [], []
        for channel in range(pixels.shape[1]):
            counts = torch.bincount(pixels[:, channel].reshape(-1), minlength=256).double()
            values = torch.arange(256, dtype=torch.float64)
            first = (counts * values).sum() / counts.sum()
            second = (counts * (values - first) ** 2).sum() / counts.sum()
            mean.append(float(first) / 255)
            deviation.append(max(float(second.sqrt()) / 255, 1e-6))
        return Standard(mean=tuple(mean), deviation=tuple(deviation))


@dataclass(frozen=True, kw_only=True)
class Standard:
    """What is taken off the pixels, in [0, 1], and what they are divided by; one number a channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Bytes (B, C, H, W) to floats of about zero mean and unit deviation."""
        if pixels.shape[1] != len(self.mean):
            raise ValueError(
                f"images of {len(self.mean)} channels were expected, not {pixels.shape[1]}"
            )
        mean, deviation = (
            torch.tensor(values, device=pixels.device).reshape(-1, 1, 1)
            for values in (self.mean, self.deviation)
        )
        return pixels.float().div(255).sub_(mean).div_(deviation)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The usual for small images: `padding` black pixels all around, a crop of the old size, mirrored or not."""

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding must not be negative, not {self.padding}")

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Bytes (B, C, H, W) to bytes of the same shape, each image moved and mirrored by itself."""
        batch, _, height, width = pixels.shape
        offsets = torch.randint(2 * self.padding + 1, (2, batch), generator=generator).tolist()
        mirrored = torch.rand(batch, generator=generator) < 0.5
        around = functional.pad(pixels, (self.padding,) * 4)
        moved = torch.stack(
            [
                image[:, top : top + height, left : left + width]
                for image, top, left in zip(around, *offsets, strict=True)
            ]
        )
        if not self.flip:
            return moved
        return torch.where(mirrored[:, None, None, None], moved.flip(3), moved)
