"""Labelled images in memory, and what is done to them on the way to a model.

Shapes: N images, B of them in a batch, C channels, H x W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

VALID_SEED = 20_260  # of the training images that are kept for validation


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
    """What is taken off the pixels, in [0, 1], and what they are divided by; one number for each channel."""

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


def split_images(
    name: str, train: Images, test: Images, *, classes: tuple[str, ...], valid: int
) -> ImageSet:
    """A set whose validation split is `valid` training images of each class; both parts keep the order of the files."""
    chosen = validation_places(train.labels, classes, valid)
    parts = (train.take(~chosen), train.take(chosen), test)
    return ImageSet(
        name=name,
        train=parts[0],
        valid=parts[1],
        test=parts[2],
        classes=classes,
        digest=images_digest(parts, classes),
    )


def validation_places(labels: Tensor, classes: Sequence[str], valid: int) -> Tensor:
    """Booleans (N,), true for `valid` images of each class, always the same ones."""
    generator = torch.Generator().manual_seed(VALID_SEED)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label, title in enumerate(classes):
        places = (labels == label).nonzero().flatten()
        if len(places) <= valid:
            raise ValueError(
                f"the class {title} has {len(places)} training images, "
                f"too few to keep {valid} for validation"
            )
        chosen[places[torch.randperm(len(places), generator=generator)[:valid]]] = True
    return chosen


def images_digest(parts: tuple[Images, Images, Images], classes: tuple[str, ...]) -> str:
    """SHA-256 of the pixels and labels of train, valid and test, and the names of the classes."""
    digest = hashlib.sha256("\n".join(classes).encode())
    for part in parts:
        for tensor in (part.pixels, part.labels):
            digest.update(f"\n{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
