"""Labelled images by name, or from any folder with class folders in train/ and val/, as tensors of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from cdeq.data.cache import KEY_DIGITS, keep_tensors, kept_tensors, key_of
from cdeq.data.folders import MissingDataError, as_path, data_folder
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
from cdeq.data.image_formats import (
    find_cifar10,
    find_fashion_mnist,
    read_cifar10,
    read_fashion_mnist,
)
from cdeq.data.images import Images, ImageSet, split_images
from cdeq.files import sha256_of_file

VALID_PER_CLASS = 25  # of class folders: at most, and at most this share of the smallest class
VALID_SHARE = 12
MIXED_SIZE = 64  # of images that come in several sizes, unless told
CACHE_VERSION = 1
CHUNK = (
    64  # files that a thread is given at once: handing over costs as much as opening a small one
)

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
    each class. A path is recognised by its separator ("./birds"); it is read by `read_class_folders`. `cache`
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
    `workers` threads decode (default: one for each core).
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
        valid=max(1, min(VALID_PER_CLASS, smallest // VALID_SHARE)),
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
    pixels = kept_tensors(kept, {"key": key})
    if pixels is None:
        pixels = _decoded(listed, size, pool)
        if _key(listed, size, pool) == key:  # else a file was changed while it was read
            keep_tensors(kept, pixels, {"key": key})
    return pixels


def _key(listed: dict[str, FolderImages], size: int | None, pool: ThreadPoolExecutor) -> str:
    """A digest of all that decoded images depend on."""
    contents = {
        split: list(zip(part.files, _of_each(part, sha256_of_file, pool), strict=True))
        for split, part in listed.items()
    }
    return key_of(version=CACHE_VERSION, size=size, contents=contents)


def _decoded(
    listed: dict[str, FolderImages], size: int | None, pool: ThreadPoolExecutor
) -> dict[str, Tensor]:
    """The pixels (N, 3, H, W) of each split."""
    pillow()  # a user without it should learn of it before threads are at work
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


def _find_class_folders(name: str, home: str, folder: str | Path | None) -> Path:
    place = data_folder(folder)
    if absent := [split for split in (TRAIN, TEST) if not (place / name / split).is_dir()]:
        raise MissingDataError(
            f"{name} needs the folder {name}/{absent[0]} with a folder for each class, looked for in {place}. "
            f"Get it from {home}. Point --data-dir or CDEQ_DATA at the folder that holds {name}/."
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
    "cifar-10": ImageFiles(find=find_cifar10, read=lambda place, cache: read_cifar10(place)),
    "fashion-mnist": ImageFiles(
        find=find_fashion_mnist, read=lambda place, cache: read_fashion_mnist(place)
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
