"""Images as a suite: in memory, or in class folders that are read as they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from torch import Tensor, nn

from cdeq.data.embedded import digits_set
from cdeq.data.folders import data_folder
from cdeq.data.image_folders import FolderBatches, FolderImages
from cdeq.data.image_sets import load_images, require_image_files
from cdeq.data.images import Augmentation, ImageSet
from cdeq.evaluation import Metric, accuracy, top_accuracy
from cdeq.models.learned_solvers import HyperDEQ
from cdeq.training import process_rank
from cdeq.training.images import ImageBatches, in_order
from cdeq.training.supervised import SupervisedObjective
from cdeq.training.task_loss import cross_entropy
from cdeq_experiments.configs.images import ImageData
from cdeq_experiments.suites.base import Suite
from cdeq_experiments.suites.contract import Data, Model

PROBES = 2
"""Test batches that residuals are measured on."""


class ImageSuite(Suite):
    """A set of images, its MDEQ and what is made from it. Shapes: x (B, C, H, W), y (B,)."""

    def require_data(self) -> None:
        if self.config.data.name != "digits":
            require_image_files(self.config.data.name, self.options.data)

    def open_data(self) -> Data:
        data, folder = self.config.data, self.options.data
        if data.streamed:
            return images_in_folders(data, data_folder(folder) / data.name)
        if data.name == "digits":
            return images_in_memory(data, digits_set())
        return images_in_memory(data, load_images(data.name, folder, self.options.runs / "images"))

    @property
    def metrics(self) -> dict[str, Metric]:
        return {"metric": accuracy(), "top5": top_accuracy(5)}

    def explicit_objective(self, model: nn.Module) -> nn.Module:
        loss = lambda model, x, y: cross_entropy(model(x), y)  # noqa: E731
        return SupervisedObjective(model, loss, self.teacher_seed)

    def build_learned_solver(self, teacher: Model) -> HyperDEQ:
        """With the student's kind of start."""
        width = tuple(teacher.config["channels"])
        return HyperDEQ(width=width, initial=teacher.start_network(), feature_axis=1)

    def probes(self, teacher: Model) -> Iterator[Tensor]:
        for x, _ in islice(self.data.test(), PROBES):
            yield x

    def certified_input(self, teacher: Model) -> Tensor:
        return super().certified_input(teacher)[: self.config.data.batch]

    def sample_input(self) -> Tensor:
        return next(iter(self.data.test()))[0][:4]

    def timed_input(self) -> Tensor:
        """As many test images as a training batch has."""
        return next(iter(self.data.test()))[0][: self.config.data.batch]


def images_in_memory(data: ImageData, images: ImageSet) -> Data:
    """Small images, all in memory."""
    standard = images.standard()
    augmentation = Augmentation(padding=data.padding, flip=data.flip)
    return Data(
        batch_at=ImageBatches(
            images=images.train, standard=standard, batch=data.batch, augmentation=augmentation
        ).at,
        valid=partial(in_order, images.valid, standard, data.test_batch),
        test=partial(in_order, images.test, standard, data.test_batch),
        sizes={"classes": len(images.classes)},
        digest=images.digest,
    )


def images_in_folders(data: ImageData, path: Path) -> Data:
    """ImageNet's layout, read as it is needed; its validation images are the test images."""
    train, test = FolderImages(path, "train"), FolderImages(path, "val")
    digest = hashlib.sha256()  # of the names of all files: their content is a hundred gigabytes
    for images in (train, test):
        for place in range(len(images)):
            digest.update(str(images.file(place).relative_to(path)).encode() + b"\n")
    batches = partial(FolderBatches, files=train, batch=data.batch, size=data.size)
    return Data(
        batch_at=batches().at,
        own_at=batches(part=process_rank()).at,
        valid=list,
        test=FolderBatches(files=test, batch=data.test_batch, size=data.size).in_order,
        sizes={"classes": len(train.classes)},
        digest=digest.hexdigest(),
    )
