"""Small files in the formats of public images."""

import gzip
import struct

import numpy
from PIL import Image


def random_bytes(*shape, seed=0):
    return numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)


def write_cifar(folder, a_file=40, names=None):
    """Files of CIFAR-10's binary version; returns their records (6, N, 3073), the test file's last."""
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    records = random_bytes(6, a_file, 3073)
    records[:, :, 0] = numpy.arange(a_file) % 10
    for number, part in enumerate(records[:5], start=1):
        part.tofile(place / f"data_batch_{number}.bin")
    records[5].tofile(place / "test_batch.bin")
    if names:
        (place / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    return records


def write_fashion(folder, packed=False, train=60, test=20):
    place = folder / "fashion-mnist"
    place.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        pixels, labels = random_bytes(count, 28, 28), (numpy.arange(count) % 10).astype("u1")
        for name, head, data in (
            ("images-idx3", struct.pack(">IIII", 0x803, count, 28, 28), pixels),
            ("labels-idx1", struct.pack(">II", 0x801, count), labels),
        ):
            content, path = head + data.tobytes(), place / f"{part}-{name}-ubyte"
            if packed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
    return random_bytes(test, 28, 28)


def flat(colour, width=16, height=16, mode="RGB"):
    return Image.new(mode, (width, height), colour)


def write_folders(folder, images, split="train", form="png"):
    """{class: [image]} as files 000.png and so on."""
    for name, ones in images.items():
        place = folder / split / name
        place.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(ones):
            image.save(place / f"{number:03}.{form}")


def ramp(width, height):
    """Red grows from left to right, green from top to bottom, both from 0 to 255."""
    x = numpy.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = numpy.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(numpy.stack((x, y, 0 * x), 2).round().astype(numpy.uint8))
