"""Batches of images for training and for reporting."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cdeq.data.images import Augmentation, Images, Standard
from cdeq.training.draws import numbered_generator


@dataclass(frozen=True, kw_only=True)
class ImageBatches:
    """Training batches (x (B, C, H, W), y (B,)), each a function of its number and the seed alone.

    Each epoch has an order of its own, in which an image comes at most once; those that do not fill a batch are
    left out.
    """

    images: Images
    standard: Standard
    batch: int
    seed: int = 0
    augmentation: Augmentation | None = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= len(self.images):
            raise ValueError(
                f"a batch of {self.batch} cannot be drawn from {len(self.images)} images"
            )

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.images) // self.batch

    def at(self, update: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(update, len(self))
        order = torch.randperm(len(self.images), generator=numbered_generator(self.seed, epoch))
        chosen = order[place * self.batch : (place + 1) * self.batch]
        pixels = self.images.pixels[chosen]
        if self.augmentation is not None:
            # Not the stream of random numbers that the orders of epochs are drawn from.
            pixels = self.augmentation(pixels, numbered_generator(self.seed + 7919, update))
        return self.standard(pixels), self.images.labels[chosen]


def in_order(images: Images, standard: Standard, batch: int) -> list[tuple[Tensor, Tensor]]:
    """All images once, as they are; the last batch may be smaller."""
    return [
        (standard(pixels), labels)
        for pixels, labels in zip(
            images.pixels.split(batch), images.labels.split(batch), strict=True
        )
    ]
