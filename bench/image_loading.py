"""Whether images are made ready faster than a model learns from them.

    python bench/image_loading.py [--threads 1] [--repeats 5] [--json FILE]

Images per second of each way to a batch, and of one training update of the small scale's MDEQ on images of 32 pixels
(4 unrolled steps, forward and backward), all in one run, taking turns. The ratio is how many times faster than the
update a way is: below 1 training waits for its images. JPEG files of smooth random images are made for it, and
decoded in this process, without workers that read ahead, so that all is timed. CPU time is disturbed less by a busy
machine. Beside the JSON stands the table as Markdown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from PIL import Image
from torch import Tensor
from torch.nn import functional

from cdeq.data.image_folders import IMAGENET_STANDARD, FolderBatches, FolderImages
from cdeq.data.image_sets import read_class_folders
from cdeq.data.images import Images
from cdeq.evaluation import median_times
from cdeq.training.images import ImageBatches
from cdeq_experiments.configs.images import CIFAR_10
from common import Measurement, Options, markdown_table

UPDATE = "one update, 32 px"
STEPS = 4
UPDATE_BATCH = 64
BATCH = 128
IN_MEMORY = 2048
SMALL_FILES = (4, 96)  # classes, training images of each, 64 x 64
LARGE_FILES = (2, 32)  # the same, 500 x 375
LARGE_BATCH = 32
COLUMNS = ("images", "per second", "per CPU second", "ratio", "CPU ratio")


def smooth_image(width: int, height: int, generator: torch.Generator) -> Image.Image:
    """Clouds of random colour, with a little grain: a JPEG of them is about as large as a photograph's."""
    clouds = functional.interpolate(
        torch.rand(1, 3, 12, 16, generator=generator), size=(height, width), mode="bicubic"
    )
    grain = 0.05 * torch.randn(1, 1, height, width, generator=generator)
    pixels = (255 * (clouds + grain)).clamp(0, 255).byte()[0].permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def write_folders(place: Path, counts: tuple[int, int], width: int, height: int) -> None:
    """Class folders of JPEG files in `place`/train, and one image of each class in `place`/val."""
    generator = torch.Generator().manual_seed(0)
    classes, images = counts
    for split, number in (("train", images), ("val", 1)):
        for label in range(classes):
            folder = place / split / f"class{label}"
            folder.mkdir(parents=True)
            for count in range(number):
                image = smooth_image(width, height, generator)
                image.save(folder / f"{count}.JPEG", quality=90)


def from_memory(size: int) -> Callable[[], object]:
    """A batch of moved and mirrored images of size x size."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (IN_MEMORY, 3, size, size), generator=generator)
    images = Images(pixels=pixels.byte(), labels=torch.zeros(IN_MEMORY, dtype=torch.int64))
    batches = ImageBatches(images=images, standard=IMAGENET_STANDARD, batch=BATCH)
    return lambda: batches.at(0)


def update_of_model() -> Callable[[], object]:
    """A training update, without the optimiser's part."""
    generator = torch.Generator().manual_seed(0)
    model = CIFAR_10.teacher.build(classes=10)
    x: Tensor = torch.randn(UPDATE_BATCH, 3, 32, 32, generator=generator)
    y = torch.randint(10, (UPDATE_BATCH,), generator=generator)

    @torch.enable_grad()  # the timing switches gradients off
    def update() -> None:
        context = model.inject(x)
        z = model.start(context)
        for _ in range(STEPS):
            z = model.step(z, context)
        functional.cross_entropy(model.readout(z, context), y).backward()

    return update


def measure(room: Path, threads: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each way to a batch, the model's update last."""
    small, large = room / "small", room / "large"
    write_folders(small, SMALL_FILES, 64, 64)
    write_folders(large, LARGE_FILES, 500, 375)
    files = FolderImages(large)
    jpeg_bytes = sum(files.file(place).stat().st_size for place in range(len(files)))
    batches = FolderBatches(files=files, batch=LARGE_BATCH, workers=0)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "in memory, 32 px": (BATCH, from_memory(32)),
        "in memory, 64 px": (BATCH, from_memory(64)),
        "class folders into memory, 64 px": (
            SMALL_FILES[0] * (SMALL_FILES[1] + 1),
            lambda: read_class_folders(small, workers=threads),
        ),
        "JPEG of 500 x 375 to 224 px": (LARGE_BATCH, lambda: batches.at(0)),
        UPDATE: (UPDATE_BATCH, update_of_model()),
    }
    times = median_times({name: lambda w=work: w for name, (_, work) in works.items()}, repeats)
    rates = {name: [count / s for s in times[name]] for name, (count, _) in works.items()}
    return [
        {
            "way": name,
            "images": works[name][0],
            "images_per_second": wall,
            "images_per_cpu_second": cpu,
            "ratio": wall / rates[UPDATE][0],
            "cpu_ratio": cpu / rates[UPDATE][1],
            **({"jpeg_kilobytes": jpeg_bytes / len(files) / 1000} if "JPEG" in name else {}),
        }
        for name, (wall, cpu) in rates.items()
    ]


def markdown_of(rows: list[dict[str, Any]], threads: int) -> str:
    return markdown_table(
        "Images made ready per second, and how many times faster than a training update "
        f"(threads: {threads}):",
        COLUMNS,
        [
            (
                row["way"],
                f"{row['images_per_second']:.0f}",
                f"{row['images_per_cpu_second']:.0f}",
                f"{row['ratio']:.2f}",
                f"{row['cpu_ratio']:.2f}",
            )
            for row in rows
        ],
    )


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Options):
    repeats: int = 5


def main() -> None:
    options = tyro.cli(ImageOptions, description=__doc__)
    measurement = Measurement(options)
    with tempfile.TemporaryDirectory(prefix="cdeq-images-") as room:
        rows = measure(Path(room), options.threads, options.repeats)
    table = markdown_of(rows, options.threads)
    print(table)
    measurement.finish(rows, table, steps=STEPS)


if __name__ == "__main__":
    main()
