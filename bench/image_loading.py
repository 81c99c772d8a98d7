"""Whether images are made ready faster than a model learns from them.

    python bench/image_loading.py [--threads 1] [--repeats 5] [--json FILE]

Images a second of each way to a batch, and of one training update of the small scale's MDEQ on images of 32 pixels
(4 unrolled steps, forward and backward), all in one run, taking turns. The ratio is how many times faster than the
update a way is: below 1 training waits for its images. JPEG files of smooth random images are made for it.
`--threads` is that of torch and of the decoders; batches of files are not begun ahead here, so that all is timed.
Beside the JSON stands the table as Markdown.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from cdeq.data.image_folders import IMAGENET_STANDARD, FolderBatches, FolderImages
from cdeq.data.image_sets import read_class_folders
from cdeq.data.images import Images
from cdeq.evaluation import median_times, write_measurements
from cdeq.files import atomic_write_text
from cdeq.training.images import ImageBatches
from cdeq_experiments.image_scales import SCALES

UPDATE = "one update, 32 px"
STEPS = 4
UPDATE_BATCH = 64
BATCH = 128
IN_MEMORY = 2048
SMALL_FILES = (4, 96)  # classes, training images of each, 64 x 64
LARGE_FILES = (2, 32)  # the same, 500 x 375
LARGE_BATCH = 32
COLUMNS = ("images/s", "images/CPU s", "ratio", "CPU ratio")


def smooth_image(width: int, height: int, generator: torch.Generator) -> Image.Image:
    """Clouds of random colour, with a little grain: a JPEG of them is about as large as a photograph's."""
    clouds = functional.interpolate(
        torch.rand(1, 3, 12, 16, generator=generator), size=(height, width), mode="bicubic"
    )
    grain = 0.05 * torch.randn(1, 1, height, width, generator=generator)
    pixels = (255 * (clouds + grain)).clamp(0, 255).byte()[0].permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def write_folders(place: Path, counts: tuple[int, int], width: int, height: int) -> None:
    """Class folders of JPEG files in `place`/train, and one image a class in `place`/val."""
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
    model = SCALES["small"][0].build(10)
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
    with FolderBatches(files=files, batch=LARGE_BATCH, workers=threads, ahead=0) as batches:
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
        ready = {name: lambda work=work: work for name, (_, work) in works.items()}
        times = median_times(ready, repeats)
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


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["way"],
        f"{row['images_per_second']:.0f}",
        f"{row['images_per_cpu_second']:.0f}",
        f"{row['ratio']:.2f}",
        f"{row['cpu_ratio']:.2f}",
    )


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("images", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown_of(rows: list[dict[str, Any]], threads: int) -> str:
    lines = [
        f"Images made ready a second, and how many times faster than a training update (threads: {threads}):",
        "",
        f"| images | {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * len(COLUMNS)}",
        *(f"| {' | '.join(cells(row))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="cdeq-images-") as room:
        rows = measure(Path(room), options.threads, options.repeats)
    console = Console(width=100)
    console.print(table_of(rows))
    console.print("ratio: over the model's update; below 1 training waits for its images.")
    console.print("CPU: the same of CPU time, which a busy machine disturbs less.")
    console.print(f"threads {options.threads}, load {before[0]:.1f} to {os.getloadavg()[0]:.1f}")
    if options.json:
        write_measurements(
            options.json,
            rows,
            load_before=before,
            load_after=os.getloadavg(),
            steps=STEPS,
            repeats=options.repeats,
        )
        atomic_write_text(options.json.with_suffix(".md"), markdown_of(rows, options.threads))


if __name__ == "__main__":
    main()
