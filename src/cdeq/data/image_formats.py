"""CIFAR-10 and Fashion-MNIST, from the files that their authors publish."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

from cdeq.data.folders import data_folder, require_in_folder
from cdeq.data.images import Images, ImageSet, split_images

CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_TRAIN = tuple(f"{CIFAR_FOLDER}/data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = f"{CIFAR_FOLDER}/test_batch.bin"
CIFAR_SHAPE = (3, 32, 32)
CIFAR_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

FASHION_FOLDER = "fashion-mnist"
FASHION_DEBIAN = Path("/usr/share/datasets")  # where Debian's dataset-fashion-mnist puts the folder
FASHION_FILES = tuple(
    f"{FASHION_FOLDER}/{part}-{kind}-ubyte"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
FASHION_HOME = (
    "the fashion-mnist repository on GitHub (zalandoresearch/fashion-mnist), folder data/fashion, "
    "packed (.gz) or not, or Debian's package dataset-fashion-mnist"
)
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

VALID_PER_CLASS = 200  # training images of each class that are kept for validation


def read_cifar10(folder: str | Path) -> ImageSet:
    """CIFAR-10 in its binary version: records of a label byte and 3 x 32 x 32 bytes, from CIFAR_FOLDER in `folder`."""
    place = Path(folder)
    parts = [_cifar_records(place / file) for file in CIFAR_TRAIN]
    pixels, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    test_pixels, test_labels = _cifar_records(place / CIFAR_TEST)
    return split_images(
        "cifar-10",
        Images(pixels=pixels, labels=labels),
        Images(pixels=test_pixels, labels=test_labels),
        classes=_cifar_classes(place / CIFAR_FOLDER / "batches.meta.txt"),
        valid=VALID_PER_CLASS,
    )


def read_fashion_mnist(folder: str | Path) -> ImageSet:
    """Fashion-MNIST from its four idx files, packed with gzip or not, in FASHION_FOLDER in `folder`."""
    contents = [_idx(_packed_or_not(Path(folder) / file)) for file in FASHION_FILES]
    parts = []
    for pixels, labels, file in zip(
        contents[::2], contents[1::2], FASHION_FILES[1::2], strict=True
    ):
        if len(pixels) != len(labels):
            raise ValueError(
                f"{Path(folder) / file} has {len(labels)} labels for {len(pixels)} images"
            )
        _require_labels(Path(folder) / file, labels, len(FASHION_CLASSES))
        parts.append(Images(pixels=pixels.unsqueeze(1), labels=labels.long()))
    train, test = parts
    return split_images(
        "fashion-mnist", train, test, classes=FASHION_CLASSES, valid=VALID_PER_CLASS
    )


def _cifar_records(path: Path) -> tuple[Tensor, Tensor]:
    """Pixels (N, 3, 32, 32) and labels (N,) of one file."""
    record = 1 + math.prod(CIFAR_SHAPE)
    content = numpy.fromfile(path, dtype=numpy.uint8)
    if len(content) == 0 or len(content) % record:
        raise ValueError(
            f"{path} has {len(content)} bytes, which is no whole number of records of {record}: "
            "it is damaged or not of CIFAR-10's binary version"
        )
    records = torch.from_numpy(content).view(-1, record)
    labels = records[:, 0].long()
    _require_labels(path, labels, len(CIFAR_CLASSES))
    return records[:, 1:].contiguous().view(-1, *CIFAR_SHAPE), labels


def _cifar_classes(path: Path) -> tuple[str, ...]:
    """The names in batches.meta.txt, one in each line; the usual ones without it."""
    if not path.is_file():
        return CIFAR_CLASSES
    names = tuple(path.read_text(encoding="utf-8").split())
    if len(names) != len(CIFAR_CLASSES):
        raise ValueError(f"{path} has {len(names)} names of classes, not {len(CIFAR_CLASSES)}")
    return names


def _require_labels(path: Path, labels: Tensor, classes: int) -> None:
    if (wrong := labels >= classes).any():
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"{path}: image {place} has the label {int(labels[place])}, "
            f"and there are {classes} classes: the file is damaged"
        )


def _packed_or_not(path: Path) -> Path:
    """The file itself if it is there, else its name when packed."""
    return path if path.is_file() else path.with_name(f"{path.name}.gz")


def _idx(path: Path) -> Tensor:
    """Bytes of the shape that an idx file gives: two zeros, 8 (bytes), the number of axes, their lengths, the data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    axes = 3 if "idx3" in path.name else 1
    if (magic := content[:4]) != bytes((0, 0, 8, axes)):
        raise ValueError(
            f"{path} begins with {magic.hex(' ')} and not with 00 00 08 0{axes}: "
            f"it is no idx file of bytes with {axes} axes"
        )
    start = 4 + 4 * axes
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) < start or len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} should have {' x '.join(map(str, shape))} bytes after its head of {start}, "
            f"and has {max(len(content) - start, 0)}: it is damaged"
        )
    return torch.from_numpy(numpy.frombuffer(content, dtype=numpy.uint8, offset=start).copy()).view(
        shape
    )


def find_cifar10(folder: str | Path | None) -> Path:
    home = "Krizhevsky's page at the University of Toronto (cifar-10-binary.tar.gz)"
    require_in_folder("cifar-10", (*CIFAR_TRAIN, CIFAR_TEST), home, folder)
    return data_folder(folder)


def find_fashion_mnist(folder: str | Path | None) -> Path:
    """The data folder, or Debian's place if only that has the files."""
    given = data_folder(folder)
    for place in (given, FASHION_DEBIAN):
        if all(_packed_or_not(place / file).is_file() for file in FASHION_FILES):
            return place
    paths = (_packed_or_not(given / file).relative_to(given).as_posix() for file in FASHION_FILES)
    require_in_folder("fashion-mnist", tuple(paths), FASHION_HOME, folder)
    return given
