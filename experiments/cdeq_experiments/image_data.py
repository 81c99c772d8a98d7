"""Images as an experiment meets them, in memory or in folders: batches to train on, to record, to report."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from torch import Tensor

from cdeq.data.embedded import digits_set
from cdeq.data.folders import data_folder
from cdeq.data.image_folders import FolderBatches, FolderImages
from cdeq.data.image_sets import load_images
from cdeq.data.images import Augmentation, ImageSet
from cdeq.training.images import ImageBatches, in_order

Batch = tuple[Tensor, Tensor]


class ImageData(Protocol):
    """Batches (x, y) of one data set. `digest` changes with the data."""

    @property
    def digest(self) -> str: ...

    @property
    def classes(self) -> int: ...

    def batch_at(self, update: int) -> Batch:
        """A training batch, augmented, by its number."""
        ...

    def test(self) -> Iterable[Batch]:
        """All test images once, in order."""
        ...

    def valid(self) -> Iterable[Batch]:
        """All validation images once, in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class ImagesInMemory:
    """A set of small images, all in memory; test batches are `test_batch` images each."""

    images: ImageSet
    batch: int
    test_batch: int
    augmentation: Augmentation | None

    @property
    def digest(self) -> str:
        return self.images.digest

    @property
    def classes(self) -> int:
        return len(self.images.classes)

    @cached_property
    def _batches(self) -> ImageBatches:
        return ImageBatches(
            images=self.images.train,
            standard=self.images.standard(),
            batch=self.batch,
            augmentation=self.augmentation,
        )

    def batch_at(self, update: int) -> Batch:
        return self._batches.at(update)

    def test(self) -> Iterable[Batch]:
        return in_order(self.images.test, self._batches.standard, self.test_batch)

    def valid(self) -> Iterable[Batch]:
        return in_order(self.images.valid, self._batches.standard, self.test_batch)


@dataclass(frozen=True, kw_only=True)
class ImagesInFolders:
    """ImageNet's layout, read as it is needed. There is no third split: settings are the published ones."""

    path: Path
    batch: int
    test_batch: int
    size: int = 224
    workers: int = 2

    @cached_property
    def _train(self) -> FolderImages:
        return FolderImages(self.path, "train")

    @cached_property
    def _test(self) -> FolderImages:
        return FolderImages(self.path, "val")

    @cached_property
    def _batches(self) -> FolderBatches:
        return FolderBatches(
            files=self._train, batch=self.batch, size=self.size, workers=self.workers
        )

    @cached_property
    def digest(self) -> str:
        """Of the names of all files: to read a hundred gigabytes for a name would be too much."""
        found = hashlib.sha256()
        for images in (self._train, self._test):
            for place in range(len(images)):
                found.update(str(images.file(place).relative_to(self.path)).encode() + b"\n")
        return found.hexdigest()

    @property
    def classes(self) -> int:
        return len(self._train.classes)

    def batch_at(self, update: int) -> Batch:
        return self._batches.at(update)

    def test(self) -> Iterable[Batch]:
        return FolderBatches(
            files=self._test, batch=self.test_batch, size=self.size, workers=self.workers
        ).in_order()

    def valid(self) -> Iterable[Batch]:
        raise NotImplementedError("class folders have no third split")


def open_images(
    name: str,
    folder: Path | None,
    cache: Path,
    *,
    batch: int,
    test_batch: int,
    padding: int,
    flip: bool,
    size: int | None,
) -> ImageData:
    """A set by name; with a `size`, class folders that are read as they are needed."""
    if size is not None:
        return ImagesInFolders(
            path=data_folder(folder) / name, batch=batch, test_batch=test_batch, size=size
        )
    images = digits_set() if name == "digits" else load_images(name, folder, cache)
    augmentation = Augmentation(padding=padding, flip=flip)
    return ImagesInMemory(
        images=images, batch=batch, test_batch=test_batch, augmentation=augmentation
    )
