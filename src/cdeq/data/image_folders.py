"""Image files in class folders, path/SPLIT/CLASS/*.JPEG as ImageNet has them, listed and decoded as they are needed.

Shapes: N files, B of them in a batch, images of S x S pixels, crops of width x height.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cdeq.data.folders import MissingDataError
from cdeq.data.images import Standard

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
TRAIN, TEST = "train", "val"

IMAGENET_STANDARD = Standard(mean=(0.485, 0.456, 0.406), deviation=(0.229, 0.224, 0.225))
CENTRE_SHARE = 224 / 256  # of the shorter side, the part of an image that is looked at in reporting

# RandomResizedCrop, after Szegedy et al. 2015, section 6.
CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
CROP_TRIES = 10
DRAWS = 2 * CROP_TRIES + 3  # area and ratio of each try, left and top, mirror

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


class FolderImages:
    """The image files of `path/split`, none of them read: `files` below it and `labels` (N,).

    A label is the place of the class folder's name in `classes`, the sorted names in `path/train`. Files are in the
    order of classes and, in a class, of paths.
    """

    def __init__(self, path: str | Path, split: str = TRAIN):
        self.path = Path(path).expanduser() / split
        self.classes = class_folders(path, split)
        self.files: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = _image_files(self.path, name)
            if not found:
                raise MissingDataError(
                    f"the class folder {self.path / name} has no images ({' '.join(IMAGE_SUFFIXES)})"
                )
            self.files += found
            labels += [label] * len(found)
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.files)

    def file(self, place: int) -> Path:
        return self.path / self.files[place]

    def take(self, chosen: Tensor) -> FolderImages:
        """Only the files at these places (K,), or where these booleans (N,) say."""
        part = copy.copy(self)
        part.labels = self.labels[chosen]
        part.files = [self.files[place] for place in torch.arange(len(self))[chosen].tolist()]
        return part


def class_folders(path: str | Path, split: str = TRAIN) -> tuple[str, ...]:
    """The sorted names of the class folders of `path/split`, which must be those of `path/train` if that is there."""
    place = Path(path).expanduser()
    names = _folders_in(place / split)
    trained = _folders_in(place / TRAIN) if (place / TRAIN).is_dir() else names
    if absent := sorted({*trained} - {*names}):
        raise MissingDataError(
            f"{place / split} has no class folder {absent[0]}, which {place / TRAIN} has "
            f"({len(absent)} missing): sort its images into a folder for each class"
        )
    if unknown := sorted({*names} - {*trained}):
        raise ValueError(
            f"{place / split} has a class folder {unknown[0]}, which {place / TRAIN} has not: "
            "a label needs its class in both"
        )
    return names


Key = tuple[int, list[float] | None]
"""The place of a file in its list, and the draws that choose a part of it; None for the middle."""


class FolderBatches:
    """Training batches (x (B, 3, S, S), y (B,)) from files, each a function of its number and the seed alone.

    Each epoch has an order of its own, in which an image comes at most once; those that do not fill a batch are left
    out. With `augment` an image is a random part of its file, of 0.08 to all of the area and a ratio of 3/4 to 4/3,
    mirrored or not; without, the middle of it. `part` (rank, world): only this one of `world` equal parts of each batch
    is decoded, for processes that share it. `workers` processes decode ahead as long as batches are asked for one after
    another; with none, a batch is decoded when it is asked for.
    """

    def __init__(
        self,
        *,
        files: FolderImages,
        standard: Standard = IMAGENET_STANDARD,
        batch: int,
        size: int = 224,
        seed: int = 0,
        augment: bool = True,
        part: tuple[int, int] = (0, 1),
        workers: int = 2,
    ):
        if not 1 <= batch <= len(files):
            raise ValueError(f"a batch of {batch} cannot be drawn from {len(files)} images")
        if size < 1 or workers < 0:
            raise ValueError(
                f"size must be at least 1 and workers at least 0, not {size} and {workers}"
            )
        if batch % part[1]:
            raise ValueError(
                f"a batch of {batch} images cannot be shared evenly by {part[1]} processes"
            )
        pillow()  # a user without it should learn of it here, not from a process
        self.files, self.standard, self.batch, self.size = files, standard, batch, size
        self.seed, self.augment, self.part, self.workers = seed, augment, part, workers
        self._stream: Iterator[tuple[Tensor, Tensor]] | None = None
        self._next = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.files) // self.batch

    def at(self, update: int) -> tuple[Tensor, Tensor]:
        """The batch of an update. Asking for the next one is fast; for any other, the workers start again."""
        if self._stream is None or update != self._next:
            self._stream = self.starting_at(update)
        stream, self._stream = self._stream, None  # after a failure the next call starts again
        found = next(stream)
        self._stream, self._next = stream, update + 1
        return found

    def close(self) -> None:
        """End the workers of `at`; asking for a batch starts them again."""
        self._stream = None

    def starting_at(self, update: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this update and all after it, without end."""
        rank, size = self.part[0], self.batch // self.part[1]
        own = slice(rank * size, (rank + 1) * size)
        return self._decoded(self._keys(number)[own] for number in count(update))

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, the middle of each, as they are listed; the last batch may be smaller."""
        places = torch.arange(len(self.files)).split(self.batch)
        return self._decoded([(place, None) for place in part.tolist()] for part in places)

    def _keys(self, update: int) -> list[Key]:
        """What is in a batch. All is drawn here, so that workers draw nothing."""
        epoch, place = divmod(update, len(self))
        order = _epoch_order(len(self.files), self.seed, epoch)
        chosen = order[place * self.batch : (place + 1) * self.batch].tolist()
        if not self.augment:
            return [(place, None) for place in chosen]
        # Not the stream of random numbers that the orders of epochs are drawn from.
        generator = _numbered_generator(self.seed + 7919, update)
        draws = torch.rand(self.batch, DRAWS, generator=generator, dtype=torch.float64).tolist()
        return list(zip(chosen, draws, strict=True))

    def _decoded(self, batches: Iterable[list[Key]]) -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(
            _Squares(self.files, self.size),
            batch_sampler=batches,
            num_workers=self.workers,
            generator=torch.Generator(),  # else it would draw from torch's own
        )
        decoded = iter(loader)
        try:
            for pixels, labels in decoded:
                yield self.standard(pixels), labels
        except Exception as error:
            # The frames of torch's error refer to each other and to the workers. Workers that are
            # left to the garbage collector end five seconds late each: end them here.
            del decoded
            raise error.with_traceback(None) from None


class _Squares(Dataset[tuple[Tensor, int]]):
    """Files as squares of bytes (3, size, size) with their labels, by key."""

    def __init__(self, files: FolderImages, size: int):
        self.files, self.size = files, size

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        place, draws = key
        part = middle if draws is None else partial(random_part, draws=draws)
        mirror = draws is not None and draws[-1] < 0.5
        square = read_square(self.files.file(place), self.size, part, mirror)
        return square, int(self.files.labels[place])


def middle(width: int, height: int, share: float = CENTRE_SHARE) -> Box:
    """The square in the middle of an image, with `share` of its shorter side."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_part(width: int, height: int, draws: Sequence[float]) -> Box:
    """RandomResizedCrop: area and log ratio are uniform, drawn until the part fits; else the largest one in the middle.

    `draws` are DRAWS uniform numbers in [0, 1), so that a worker draws none itself.
    """
    least, most = (math.log(ratio) for ratio in CROP_RATIO)
    *tries, across, down, _ = draws
    for area_draw, ratio_draw in zip(tries[::2], tries[1::2], strict=True):
        area = width * height * (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * area_draw)
        ratio = math.exp(least + (most - least) * ratio_draw)
        part = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 1 <= part[0] <= width and 1 <= part[1] <= height:
            left = math.floor(across * (width - part[0] + 1))
            top = math.floor(down * (height - part[1] + 1))
            return left, top, left + part[0], top + part[1]
    widest, highest = min(width, height * CROP_RATIO[1]), min(height, width / CROP_RATIO[0])
    left_over, top_over = (width - widest) / 2, (height - highest) / 2
    return left_over, top_over, left_over + widest, top_over + highest


def read_square(
    path: Path, size: int, choose: Callable[[int, int], Box], mirror: bool = False
) -> Tensor:
    """The part of an image file that choose(width, height) says, as bytes (3, size, size)."""
    with opened(path) as image:
        width, height = image.size
        left, top, right, bottom = choose(width, height)
        # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size for less; never so small that the part has to grow.
        wanted = (
            math.ceil(width * size / (right - left)),
            math.ceil(height * size / (bottom - top)),
        )
        drafted = image.draft(None, wanted)
        scale = 1.0 if drafted is None else drafted[1][2] / width
        box = (scale * left, scale * top, scale * right, scale * bottom)
        part = in_rgb(image).resize((size, size), pillow().Resampling.BILINEAR, box=box)
        pixels = to_bytes(part)
    return pixels.flip(2) if mirror else pixels


@contextmanager
def opened(path: Path) -> Iterator[Image]:
    """An image file of which only the header is read; what is wrong with it is a ValueError that names it."""
    pil = pillow()
    try:
        with pil.open(path) as image:
            yield image
    except FileNotFoundError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, pil.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def in_rgb(image: Image) -> Image:
    """Grey, CMYK and the like as RGB."""
    if image.mode.startswith(("I", "F")):
        # Pillow would cut its values off at 255, and leave a white image.
        raise ValueError(f"its pixels ({image.mode}) have more than 8 bits in a channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the way Pillow asks for, with a warning
    return image if image.mode == "RGB" else image.convert("RGB")


def to_bytes(image: Image) -> Tensor:
    """An RGB image as bytes (3, H, W)."""
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def pillow() -> Any:
    """The module PIL.Image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "image files are read by Pillow, which is not installed: pip install 'cdeq[images]'"
        ) from error
    return Image


def _numbered_generator(seed: int, number: int) -> torch.Generator:
    """As training numbers its generators, which data may not import."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


@lru_cache(maxsize=1)
def _epoch_order(files: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(files, generator=_numbered_generator(seed, epoch))


def _folders_in(place: Path) -> tuple[str, ...]:
    if not place.is_dir():
        raise MissingDataError(f"there is no folder {place} to read class folders from")
    with os.scandir(place) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise MissingDataError(f"there are no class folders in {place}")
    return tuple(names)


def _image_files(place: Path, name: str) -> list[str]:
    """The images in a class folder or below it, by their sorted paths below `place`."""
    return sorted(
        Path(folder, file).relative_to(place).as_posix()
        for folder, _, files in os.walk(place / name)
        for file in files
        if file.lower().endswith(IMAGE_SUFFIXES) and not file.startswith(".")
    )
