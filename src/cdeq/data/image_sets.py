"""Labelled images by name, or from any folder with class folders in train/ and val/, as tensors of bytes."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cdeq.data.folders import MissingDataError, as_path, data_folder, require_in_folder
from cdeq.data.image_folders import (
    TEST,
    TRAIN,
    FolderImages,
    class_folders,
    in_rgb,
    middle,
    opened,
    pillow,
    read_square,
    to_bytes,
)
from cdeq.data.images import Images, ImageSet
from cdeq.files import atomic_write_bytes, sha256_of_file

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

VALID_SEED = 20_260
VALID_A_CLASS = 200  # of CIFAR-10 and Fashion-MNIST
FOLDER_VALID_A_CLASS = 25  # of class folders: at most, and at most this share of the smallest class
FOLDER_VALID_SHARE = 12
MIXED_SIZE = 64  # of images that come in several sizes, unless told
CACHE_VERSION = 1
CHUNK = 64  # files a thread is given at once: handing over costs as much as opening a small one
KEY_DIGITS = 16  # of the key, in the name of a cache's file; the file holds all of it


Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Public images: find(folder) gives the place of their files or says what is missing, read(place, cache) reads."""

    find: Callable[[str | Path | None], Path]
    read: Callable[[Path, Path | None], ImageSet]


def load_images(
    name: str | Path, folder: str | Path | None = None, cache: str | Path | None = None
) -> ImageSet:
    """Public images from the data folder (`data_folder(folder)`), or those of a folder given by its path.

    The test split is the official one; the validation split is taken out of the training files, as many images of
    each class. A path is told from a name by its separator ("./birds"); it is read by `read_class_folders`. `cache`
    is a folder where images of class folders are kept decoded.
    """
    chosen = _image_files(name)
    return chosen.read(chosen.find(folder), None if cache is None else Path(cache).expanduser())


def require_image_files(name: str | Path, folder: str | Path | None = None) -> None:
    """A `MissingDataError` that says what to do, if files of a set are not where they should be."""
    _image_files(name).find(folder)


def is_image_set_available(name: str | Path, folder: str | Path | None = None) -> bool:
    """Whether all files of a set are where they should be."""
    try:
        require_image_files(name, folder)
    except MissingDataError:
        return False
    return True


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
        valid=VALID_A_CLASS,
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
    return split_images("fashion-mnist", train, test, classes=FASHION_CLASSES, valid=VALID_A_CLASS)


def read_class_folders(
    path: str | Path,
    *,
    name: str | None = None,
    size: int | None = None,
    workers: int | None = None,
    cache: str | Path | None = None,
) -> ImageSet:
    """All images of `path/train/CLASS` and `path/val/CLASS` in memory, RGB; `path/val` is the test split.

    With `size` they are squares, the middle of each image. Without it images that all have one size are kept as they
    are; others become squares of 64. Of each training class 25 images, or a twelfth of the smallest class if that is
    less, are the validation split. Classes are named by `path/words.txt`, lines "FOLDER<tab>name", if it is there.
    `workers` threads decode (default: one a core).
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1 pixel, not {size}")
    place = Path(path).expanduser()
    listed = {split: FolderImages(place, split) for split in (TRAIN, TEST)}
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        pixels = _with_cache(place, listed, size, pool, None if cache is None else Path(cache))
    train, test = (
        Images(pixels=pixels[split], labels=listed[split].labels) for split in (TRAIN, TEST)
    )
    smallest = int(train.labels.bincount().min())
    return split_images(
        name or place.resolve().name or "images",
        train,
        test,
        classes=_class_names(place / "words.txt", listed[TRAIN].classes),
        valid=max(1, min(FOLDER_VALID_A_CLASS, smallest // FOLDER_VALID_SHARE)),
    )


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
    """The names in batches.meta.txt, a line each; the usual ones without it."""
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


def _class_names(path: Path, folders: tuple[str, ...]) -> tuple[str, ...]:
    """The names that words.txt gives to class folders; the folders' own where it has none."""
    if not path.is_file():
        return folders
    lines = path.read_text(encoding="utf-8").splitlines()
    names = {folder: name.strip() for folder, _, name in (line.partition("\t") for line in lines)}
    return tuple(names.get(folder) or folder for folder in folders)


def _with_cache(
    place: Path,
    listed: dict[str, FolderImages],
    size: int | None,
    pool: ThreadPoolExecutor,
    cache: Path | None,
) -> dict[str, Tensor]:
    """The pixels of each split; with a folder `cache`, those decoded before from the same files and size."""
    if cache is None:
        return _decoded(listed, size, pool)
    key = _key(listed, size, pool)
    kept = cache.expanduser() / f"{place.resolve().name or 'images'}-{key[:KEY_DIGITS]}.safetensors"
    pixels = _from_cache(kept, key)
    if pixels is None:
        pixels = _decoded(listed, size, pool)
        if _key(listed, size, pool) == key:  # else a file was changed while it was read
            kept.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"key": key} | {split: _digest(part) for split, part in pixels.items()}
            atomic_write_bytes(kept, save(pixels, metadata=metadata))
    return pixels


def _key(listed: dict[str, FolderImages], size: int | None, pool: ThreadPoolExecutor) -> str:
    """A digest of all that decoded images depend on."""
    contents = {
        split: list(zip(part.files, _of_each(part, sha256_of_file, pool), strict=True))
        for split, part in listed.items()
    }
    described = {"version": CACHE_VERSION, "size": size, "contents": contents}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _from_cache(path: Path, key: str) -> dict[str, Tensor] | None:
    """The pixels kept in a file; None if there is none, or a damaged one."""
    try:
        with safe_open(path, framework="pt") as file:
            recorded = file.metadata() or {}
            pixels = {split: file.get_tensor(split) for split in (TRAIN, TEST)}
    except (OSError, SafetensorError):
        return None
    found = {"key": key} | {split: _digest(part) for split, part in pixels.items()}
    return pixels if recorded == found else None


def _decoded(
    listed: dict[str, FolderImages], size: int | None, pool: ThreadPoolExecutor
) -> dict[str, Tensor]:
    """The pixels (N, 3, H, W) of each split."""
    pillow()  # a user without it should hear of it before threads are at work
    if size is None:
        sizes = {found for part in listed.values() for found in _of_each(part, _size_of, pool)}
        if len(sizes) > 1:
            size = MIXED_SIZE
        else:
            width, height = sizes.pop()
    if size is not None:
        width = height = size
    pixels = {}
    for split, part in listed.items():
        into = torch.empty(len(part), 3, height, width, dtype=torch.uint8)
        for place, image in enumerate(_of_each(part, partial(_read, size=size), pool)):
            into[place] = image
        pixels[split] = into
    return pixels


def _read(path: Path, size: int | None) -> Tensor:
    if size is not None:
        return read_square(path, size, partial(middle, share=1.0))
    with opened(path) as image:
        return to_bytes(in_rgb(image))


def _size_of(path: Path) -> tuple[int, int]:
    with opened(path) as image:
        return image.size


def _of_each(
    part: FolderImages, function: Callable[[Path], Found], pool: ThreadPoolExecutor
) -> Iterator[Found]:
    """What a function gives for each file, in their order."""

    def of_chunk(start: int) -> list[Found]:
        stop = min(start + CHUNK, len(part))
        return [function(part.file(place)) for place in range(start, stop)]

    for found in pool.map(of_chunk, range(0, len(part), CHUNK)):
        yield from found


def _digest(tensor: Tensor) -> str:
    """Of type and shape, too: a damaged header may read the same bytes as something else."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _find_cifar10(folder: str | Path | None) -> Path:
    home = "Krizhevsky's page at the University of Toronto (cifar-10-binary.tar.gz)"
    require_in_folder("cifar-10", (*CIFAR_TRAIN, CIFAR_TEST), home, folder)
    return data_folder(folder)


def _find_fashion_mnist(folder: str | Path | None) -> Path:
    """The data folder, or Debian's place if only that has the files."""
    given = data_folder(folder)
    for place in (given, FASHION_DEBIAN):
        if all(_packed_or_not(place / file).is_file() for file in FASHION_FILES):
            return place
    paths = (_packed_or_not(given / file).relative_to(given).as_posix() for file in FASHION_FILES)
    require_in_folder("fashion-mnist", tuple(paths), FASHION_HOME, folder)
    return given


def _find_class_folders(name: str, home: str, folder: str | Path | None) -> Path:
    place = data_folder(folder)
    if absent := [split for split in (TRAIN, TEST) if not (place / name / split).is_dir()]:
        raise MissingDataError(
            f"{name} needs the folder {name}/{absent[0]} with a folder for each class, looked for in {place}. "
            f"It can be had from {home}. Point --data-dir or CDEQ_DATA at the folder that holds {name}/."
        )
    return _checked(place / name)


def _checked(path: Path) -> Path:
    """The folder itself, if it has the same class folders in train and val."""
    for split in (TRAIN, TEST):
        class_folders(path, split)
    return path


def _class_folder_set(name: str, home: str) -> ImageFiles:
    return ImageFiles(
        find=partial(_find_class_folders, name, home),
        read=lambda place, cache: read_class_folders(place, name=name, cache=cache),
    )


IMAGE_SETS: dict[str, ImageFiles] = {
    "cifar-10": ImageFiles(find=_find_cifar10, read=lambda place, cache: read_cifar10(place)),
    "fashion-mnist": ImageFiles(
        find=_find_fashion_mnist, read=lambda place, cache: read_fashion_mnist(place)
    ),
    "tiny-imagenet-40": _class_folder_set(
        "tiny-imagenet-40",
        "Tiny-ImageNet-200 of Stanford's course CS231n: every fifth class, 300 training images of each, "
        "and the validation images sorted into folders for each class",
    ),
    "imagenet": _class_folder_set(
        "imagenet",
        "image-net.org (ILSVRC 2012), the validation images sorted into folders for each class",
    ),
}


def _image_files(name: str | Path) -> ImageFiles:
    if (path := as_path(name)) is not None:
        return ImageFiles(
            find=lambda folder: _checked(path),
            read=lambda place, cache: read_class_folders(place, cache=cache),
        )
    if name not in IMAGE_SETS:
        raise ValueError(
            f"no images {str(name)!r}; there are {', '.join(IMAGE_SETS)}, and any folder with train/ and val/ "
            f"by its path, such as {os.path.join('.', name)}"
        )
    return IMAGE_SETS[str(name)]
