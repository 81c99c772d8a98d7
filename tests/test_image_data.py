"""Reading images: the public formats, class folders in memory, and batches decoded as they are needed."""

import gzip
import importlib.util
import io
import json
import math
import os
import struct
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cdeq.data import (
    IMAGE_SETS,
    IMAGENET_STANDARD,
    FolderBatches,
    FolderImages,
    MissingDataError,
    Standard,
    data_folder,
    image_sets,
    is_image_set_available,
    load_images,
    read_class_folders,
    require_image_files,
)
from cdeq.data.image_folders import CROP_AREA, CROP_RATIO, DRAWS, middle, random_part, read_square

PLAIN = Standard(mean=(0.0,) * 3, deviation=(1.0,) * 3)


def random_bytes(*shape, seed=0):
    return numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)


# CIFAR-10.


@pytest.fixture
def few_kept(monkeypatch):
    """Small files: two validation images a class."""
    monkeypatch.setattr(image_sets, "VALID_A_CLASS", 2)


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


def rows_of(images):
    """Label and pixels of each image, as bytes."""
    labels = images.labels.to(torch.uint8)[:, None]
    return [bytes(row) for row in torch.cat((labels, images.pixels.flatten(1)), 1).numpy()]


def test_cifar_records_become_images_and_each_is_in_one_split(tmp_path, few_kept):
    records = write_cifar(tmp_path, names=[f"class{label}" for label in range(10)])
    found = load_images("cifar-10", tmp_path)
    assert found.name == "cifar-10"
    assert found.classes == tuple(f"class{label}" for label in range(10))
    assert found.test.pixels.shape == (40, 3, 32, 32)
    red = torch.from_numpy(records[5, 7, 1 : 1 + 1024].reshape(32, 32))
    assert torch.equal(found.test.pixels[7, 0], red)
    assert rows_of(found.test) == [bytes(row) for row in records[5]]
    written = [bytes(row) for row in records[:5].reshape(-1, 3073)]
    assert sorted(rows_of(found.train) + rows_of(found.valid)) == sorted(written)
    for part, a_class in ((found.train, 18), (found.valid, 2)):
        assert part.labels.bincount().tolist() == [a_class] * 10
        places = [written.index(row) for row in rows_of(part)]
        assert places == sorted(places)


def test_validation_images_are_drawn_and_always_the_same(tmp_path, few_kept):
    write_cifar(tmp_path)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_images("cifar-10", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = load_images("cifar-10", tmp_path)
    assert first.digest == second.digest
    assert torch.equal(first.valid.pixels, second.valid.pixels)
    assert first.classes[0] == "airplane"
    labels = torch.arange(10_000) % 10
    chosen = image_sets.validation_places(labels, range(10), 200).nonzero().flatten()
    assert 4000 < chosen.double().mean() < 6000  # neither the first ones nor the last
    assert len(chosen) == 2000
    # Frozen: with another choice results on validation images could not be compared.
    few = image_sets.validation_places(torch.arange(24) % 2, "ab", 3)
    assert few.nonzero().flatten().tolist() == [0, 5, 9, 11, 14, 18]


@pytest.mark.parametrize("where", ["test", "train", "label", "names"])
def test_the_digest_changes_with_any_byte_and_name(tmp_path, few_kept, where):
    write_cifar(tmp_path / "a")
    old = load_images("cifar-10", tmp_path / "a")
    place = tmp_path / "a" / "cifar-10-batches-bin"
    if where == "names":
        (place / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    else:
        path = place / ("test_batch.bin" if where != "train" else "data_batch_3.bin")
        content = bytearray(path.read_bytes())
        content[3073 * 5 if where == "label" else 3073 * 5 + 99] ^= 1
        path.write_bytes(content)
    assert load_images("cifar-10", tmp_path / "a").digest != old.digest


def test_damaged_cifar_files_are_refused_by_name(tmp_path, few_kept):
    write_cifar(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    whole = path.read_bytes()
    for content in (whole[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"data_batch_2\.bin has \d+ bytes.*records of 3073"):
            load_images("cifar-10", tmp_path)
    path.write_bytes(whole[: 3073 * 4] + b"\x0a" + whole[3073 * 4 + 1 :])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: image 4 has the label 10"):
        load_images("cifar-10", tmp_path)
    path.write_bytes(whole)
    (path.parent / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(ValueError, match="2 names of classes, not 10"):
        load_images("cifar-10", tmp_path)


def test_too_few_images_for_a_validation_split(tmp_path):
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match="airplane has 20 training images, too few to keep 200"):
        load_images("cifar-10", tmp_path)


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_missing_files_say_what_to_do(tmp_path, monkeypatch, name):
    monkeypatch.setattr(image_sets, "FASHION_DEBIAN", tmp_path / "nowhere")
    assert not is_image_set_available(name, tmp_path)
    for ask in (require_image_files, load_images):
        with pytest.raises(MissingDataError, match=r"can be had from .* CDEQ_DATA at the folder"):
            ask(name, tmp_path)


def test_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match=r"no images 'mnist'; there are cifar-10, fashion.*\./mnist"
    ):
        is_image_set_available("mnist")


def test_real_cifar_has_its_known_counts():
    if not os.environ.get("CDEQ_DATA") or not is_image_set_available("cifar-10"):
        pytest.skip("CDEQ_DATA names no folder with CIFAR-10")
    found = load_images("cifar-10", data_folder())
    together = torch.cat((found.train.labels, found.valid.labels))
    assert together.bincount().tolist() == [5000] * 10
    assert found.test.labels.bincount().tolist() == [1000] * 10
    assert found.valid.labels.bincount().tolist() == [200] * 10
    # Known from many papers, to three digits, of all 50,000 images; 2,000 are left out here.
    assert found.standard().mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=1e-3)


# Fashion-MNIST.


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


def test_fashion_is_read_packed_or_not_and_from_debians_place(tmp_path, few_kept, monkeypatch):
    pixels = write_fashion(tmp_path / "plain")
    write_fashion(tmp_path / "packed", packed=True)
    monkeypatch.setattr(image_sets, "FASHION_DEBIAN", tmp_path / "packed")
    found = {place: load_images("fashion-mnist", tmp_path / place) for place in ("plain", "packed")}
    found["debian"] = load_images("fashion-mnist", tmp_path / "empty")
    assert len({images.digest for images in found.values()}) == 1
    images = found["plain"]
    assert torch.equal(images.test.pixels, torch.from_numpy(pixels)[:, None])
    assert images.test.labels.tolist() == [*range(10), *range(10)]
    assert images.classes[9] == "Ankle boot"
    assert (len(images.train), len(images.valid)) == (40, 20)
    assert len(images.standard().mean) == 1


def test_only_the_missing_fashion_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(image_sets, "FASHION_DEBIAN", tmp_path / "nowhere")
    write_fashion(tmp_path)
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        MissingDataError, match=r"needs the file fashion-mnist/t10k-labels-idx1\S+,"
    ):
        require_image_files("fashion-mnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train-images-idx3", lambda c: b"\0\0\x08\x01" + c[4:], "begins with 00 00 08 01"),
        ("train-labels-idx1", lambda c: c[::-1], "no idx file of bytes with 1 axes"),
        ("t10k-images-idx3", lambda c: c[:-1], "20 x 28 x 28 bytes after its head of 16, and has"),
        ("t10k-images-idx3", lambda c: c[:9], "is damaged"),
        ("t10k-images-idx3", lambda c: c + b"\0", "is damaged"),
        ("train-labels-idx1", lambda c: c[:-1] + b"\x0a", "image 59 has the label 10"),
        (
            "train-labels-idx1",
            lambda c: struct.pack(">II", 0x801, 59) + c[8:-1],
            "has 59 labels for 60 images",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_idx_files_are_refused_by_name(tmp_path, few_kept, file, change, message, packed):
    write_fashion(tmp_path, packed=packed)
    path = tmp_path / "fashion-mnist" / f"{file}-ubyte{'.gz' if packed else ''}"
    unpack, pack = (gzip.decompress, gzip.compress) if packed else (bytes, bytes)
    path.write_bytes(pack(change(unpack(path.read_bytes()))))
    with pytest.raises(ValueError, match=message) as caught:
        load_images("fashion-mnist", tmp_path)
    assert str(path) in str(caught.value) or file in str(caught.value)


@pytest.mark.parametrize("change", [lambda c: c[:-9], lambda c: b"no gzip", lambda c: c[:30]])
def test_damaged_gzip_is_refused_by_name(tmp_path, few_kept, change):
    write_fashion(tmp_path, packed=True)
    path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        load_images("fashion-mnist", tmp_path)


# Class folders in memory.


def flat(colour, width=16, height=16, mode="RGB"):
    return Image.new(mode, (width, height), colour)


def write_folders(folder, images, split="train", form="png"):
    """{class: [image]} as files 000.png and so on."""
    for name, ones in images.items():
        place = folder / split / name
        place.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(ones):
            image.save(place / f"{number:03}.{form}")


@pytest.fixture
def two_classes(tmp_path):
    """Classes b (red of 0, 1, 2 ...) and a (green), 26 training and 2 test images each, 16 x 16."""
    folder = tmp_path / "birds"
    for split, count in (("train", 26), ("val", 2)):
        reds = [flat((number, 0, 0)) for number in range(count)]
        greens = [flat((0, 100 + number, 0)) for number in range(count)]
        write_folders(folder, {"b": reds, "a": greens}, split)
    return folder


def test_class_folders_are_read_in_the_order_of_their_names(two_classes):
    (two_classes / "words.txt").write_text("b\tred bird\nz\tnone\n")
    (two_classes / "train" / "a" / "notes.txt").write_text("no image")
    (two_classes / "train" / "a" / "._000.png").write_text("no image either")
    found = load_images(two_classes)
    assert found.name == "birds"
    assert found.classes == ("a", "red bird")
    assert found.test.labels.tolist() == [0, 0, 1, 1]
    assert found.test.pixels[:, :, 3, 4].tolist() == [
        [0, 100, 0],
        [0, 101, 0],
        [0, 0, 0],
        [1, 0, 0],
    ]
    # A twelfth of 26 is 2.
    assert found.valid.labels.tolist() == [0, 0, 1, 1]
    assert len(found.train) == 48
    reds = found.train.pixels[found.train.labels == 1][:, 0, 0, 0].tolist()
    assert reds == sorted(set(range(26)) - set(found.valid.pixels[2:, 0, 0, 0].tolist()))
    assert load_images(f"{two_classes}{os.sep}").digest == found.digest


def test_a_named_set_of_class_folders_is_found_in_the_data_folder(two_classes, tmp_path):
    two_classes.rename(tmp_path / "tiny-imagenet-40")
    assert is_image_set_available("tiny-imagenet-40", tmp_path)
    found = load_images("tiny-imagenet-40", tmp_path)
    assert (found.name, len(found.test)) == ("tiny-imagenet-40", 4)


def test_at_most_25_images_a_class_are_kept_for_validation(tmp_path):
    for name, count in (("a", 330), ("b", 312)):
        write_folders(tmp_path, {name: [flat(9, 2, 2)] * count}, form="bmp")
    write_folders(tmp_path, {"a": [flat(9, 2, 2)], "b": [flat(9, 2, 2)]}, "val")
    found = read_class_folders(tmp_path)
    assert found.valid.labels.bincount().tolist() == [25, 25]
    assert found.train.labels.bincount().tolist() == [305, 287]


def test_grey_cmyk_and_palette_images_become_rgb(tmp_path):
    grey, cmyk = flat(70, mode="L"), flat((0, 255, 255, 0), mode="CMYK")
    clear = flat((10, 20, 30)).quantize(4)
    write_folders(tmp_path, {"a": [grey] * 2})
    (tmp_path / "val" / "a").mkdir(parents=True)
    cmyk.save(tmp_path / "val" / "a" / "0.JPEG", quality=95)
    clear.save(tmp_path / "val" / "a" / "1.png", transparency=bytes((0, 9, 9, 9)))
    found = read_class_folders(tmp_path)
    assert (found.train.pixels == 70).all()
    red = torch.tensor([255, 0, 0])[:, None, None]
    assert (found.test.pixels[0].int() - red).abs().max() <= 4
    assert found.test.pixels[1, :, 0, 0].tolist() == [10, 20, 30]


def test_images_of_other_sizes_are_squares_of_64_or_as_told(tmp_path):
    # Left third black, the middle square grey 90, right third white: only the middle may be seen.
    strip = Image.new("RGB", (120, 40), (90, 90, 90))
    strip.paste((0, 0, 0), (0, 0, 39, 40))
    strip.paste((255, 255, 255), (81, 0, 120, 40))
    write_folders(tmp_path, {"a": [strip, strip.rotate(90, expand=True)]})
    write_folders(tmp_path, {"a": [strip]}, "val")
    found = read_class_folders(tmp_path)
    assert found.test.pixels.shape == (1, 3, 64, 64)
    small = read_class_folders(tmp_path, size=20)
    assert small.train.pixels.shape == (1, 3, 20, 20)
    for part in (small.train, small.valid, small.test):
        assert (part.pixels == 90).all()
    with pytest.raises(ValueError, match="size must be at least 1"):
        read_class_folders(tmp_path, size=0)


def test_images_of_one_size_are_kept_as_they_are(tmp_path):
    images = [Image.fromarray(random_bytes(20, 30, 3, seed=seed)) for seed in range(3)]
    write_folders(tmp_path, {"a": images[:2]})
    write_folders(tmp_path, {"a": images[2:]}, "val")
    found = read_class_folders(tmp_path)
    expected = torch.from_numpy(random_bytes(20, 30, 3, seed=2)).permute(2, 0, 1)
    assert torch.equal(found.test.pixels[0], expected)


def test_the_number_of_threads_does_not_matter(two_classes):
    digests = {read_class_folders(two_classes, workers=n, size=8).digest for n in (1, 2, 5)}
    assert len(digests) == 1


def test_a_cache_is_used_and_follows_files_and_size(two_classes, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = load_images(two_classes, cache=cache)
    (kept,) = cache.iterdir()
    decoded = []
    usual = image_sets._read
    monkeypatch.setattr(
        image_sets, "_read", lambda path, size: decoded.append(path) or usual(path, size)
    )
    again = load_images(two_classes, cache=cache)
    assert not decoded
    assert again.digest == first.digest
    assert torch.equal(again.train.pixels, first.train.pixels)
    read_class_folders(two_classes, cache=cache, size=8)
    assert len(decoded) == 56
    path = two_classes / "val" / "a" / "000.png"
    then = path.stat()
    flat((1, 2, 3)).save(path)
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    changed = load_images(two_classes, cache=cache)
    assert changed.test.pixels[0, :, 0, 0].tolist() == [1, 2, 3]
    path.rename(path.with_name("999.png"))
    assert load_images(two_classes, cache=cache).test.pixels[1, 2, 0, 0] == 3
    assert kept in cache.iterdir()


@pytest.mark.parametrize("damage", ["cut", "pixel", "head", "empty"])
def test_a_damaged_cache_is_rebuilt(two_classes, tmp_path, monkeypatch, damage):
    first = load_images(two_classes, cache=tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    content = bytearray(kept.read_bytes())
    content[{"pixel": -5, "head": 3}.get(damage, 0)] ^= 1
    kept.write_bytes({"cut": content[:-5], "empty": b""}.get(damage, content))
    assert load_images(two_classes, cache=tmp_path / "cache").digest == first.digest
    monkeypatch.setattr(image_sets, "_read", None)  # from here on there is only the cache
    assert load_images(two_classes, cache=tmp_path / "cache").digest == first.digest


def test_images_changed_while_they_are_read_are_not_cached(two_classes, tmp_path, monkeypatch):
    usual = image_sets._decoded

    def changing(*given):
        found = usual(*given)
        flat((7, 7, 7)).save(two_classes / "train" / "b" / "003.png")
        return found

    monkeypatch.setattr(image_sets, "_decoded", changing)
    load_images(two_classes, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_corrupt_image_is_refused_by_its_name(two_classes):
    path = two_classes / "train" / "b" / "011.png"
    whole = path.read_bytes()
    for content in (whole[:40], b"nothing", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"b.011\.png cannot be read as an image"):
            load_images(two_classes)
    Image.fromarray(numpy.full((16, 16), 40_000, dtype=numpy.uint16)).save(path)
    with pytest.raises(ValueError, match=r"011\.png .* more than 8 bits a channel"):
        load_images(two_classes)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10**6), place=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_jpeg_is_read_or_refused_by_name(tmp_path_factory, cut, place, value):
    content = io.BytesIO()
    Image.fromarray(random_bytes(24, 32, 3)).save(content, "JPEG")
    damaged = bytearray(content.getvalue())
    damaged[place % len(damaged)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.jpg"
    path.write_bytes(damaged[: cut % len(damaged) + 1])
    try:
        message, shape = "", read_square(path, 8, middle).shape
    except ValueError as error:
        message, shape = str(error), None
    assert shape == (3, 8, 8) or f"{path} cannot be read as an image" in message


def test_folders_that_do_not_match_are_refused(two_classes):
    (two_classes / "val" / "c").mkdir()
    with pytest.raises(ValueError, match=r"a class folder c, which .*train has not"):
        load_images(two_classes)
    (two_classes / "train" / "c").mkdir()
    with pytest.raises(MissingDataError, match=r"class folder .*c has no images"):
        load_images(two_classes)
    (two_classes / "val" / "c").rmdir()
    with pytest.raises(MissingDataError, match=r"val has no class folder c, .*\(1 missing\)"):
        load_images(two_classes)
    assert not is_image_set_available(two_classes)
    (two_classes / "val").rename(two_classes / "valid")
    with pytest.raises(MissingDataError, match=r"no folder .*val to read"):
        load_images(two_classes)


def test_a_folder_without_classes_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(MissingDataError, match="no class folders in"):
        require_image_files(tmp_path)


def test_without_pillow_the_extra_is_named(two_classes, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    for ask in (
        lambda: load_images(two_classes),
        lambda: FolderBatches(files=FolderImages(two_classes), batch=2),
    ):
        with pytest.raises(ImportError, match=r"pip install 'cdeq\[images\]'"):
            ask()


# Files decoded as they are needed.


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """23 JPEG files of three classes and several sizes."""
    folder = tmp_path_factory.mktemp("photographs")
    for split, count in (("train", 23), ("val", 3)):
        for number in range(count):
            width, height = 40 + 7 * (number % 5), 64 - 5 * (number % 4)
            image = Image.fromarray(random_bytes(8, 8, 3, seed=number)).resize((width, height))
            place = folder / split / f"c{number % 3}"
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{number:02}.JPEG", quality=95)
    return folder


def batches_of(folder, **changes):
    given = {"files": FolderImages(folder), "standard": PLAIN, "batch": 4, "size": 12, "seed": 3}
    return FolderBatches(**{**given, **changes})


def test_files_are_listed_with_the_labels_of_their_folders(photographs, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # nothing is read
    files = FolderImages(photographs, "val")
    assert files.files == ["c0/00.JPEG", "c1/01.JPEG", "c2/02.JPEG"]
    assert files.labels.tolist() == [0, 1, 2]
    assert files.file(1) == photographs / "val" / "c1" / "01.JPEG"
    chosen = image_sets.validation_places(FolderImages(photographs).labels, files.classes, 2)
    kept = FolderImages(photographs).take(chosen)
    assert kept.labels.bincount().tolist() == [2, 2, 2]
    assert [Path(file).parent.name for file in kept.files] == [f"c{y}" for y in kept.labels]


def test_an_epoch_has_every_image_at_most_once_and_orders_differ(photographs):
    with batches_of(photographs, augment=False) as batches:
        assert len(batches) == 5
        epochs = [[batches._chosen(5 * e + u).tolist() for u in range(5)] for e in range(2)]
        x, y = batches.at(2)
    for epoch in epochs:
        counts = Counter(place for batch in epoch for place in batch)
        assert (len(counts), set(counts.values())) == (20, {1})
    assert epochs[0] != epochs[1]
    files = batches.files
    expected = [read_square(files.file(place), 12, middle) for place in epochs[0][2]]
    assert torch.equal(x, torch.stack(expected).float() / 255)
    assert torch.equal(y, files.labels[epochs[0][2]])


@settings(max_examples=15, deadline=None)
@given(
    updates=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    ahead=st.integers(0, 3),
    workers=st.integers(1, 4),
)
def test_a_batch_depends_on_its_number_alone(photographs, updates, ahead, workers):
    with batches_of(photographs, ahead=ahead, workers=workers) as batches:
        found = [batches.at(update) for update in updates]
    with batches_of(photographs, ahead=0, workers=1) as plain:
        for update, (x, y) in zip(updates, found, strict=True):
            expected_x, expected_y = plain.at(update)
            assert torch.equal(x, expected_x)
            assert torch.equal(y, expected_y)


@pytest.mark.parametrize("update", [0, 7])
def test_parts_and_mirrors_are_drawn_from_seed_and_number(photographs, update):
    generator = torch.Generator().manual_seed((3 + 7919) * 1_000_003 + update)
    draws = torch.rand(20, DRAWS, generator=generator, dtype=torch.float64).tolist()
    with batches_of(photographs, batch=20) as batches:
        x, _ = batches.at(update)
        places = batches._chosen(update).tolist()
    mirrored = [drawn[-1] < 0.5 for drawn in draws]
    assert 4 < sum(mirrored) < 16
    for image, place, drawn, mirror in zip(x, places, draws, mirrored, strict=True):
        part = partial(random_part, draws=drawn)
        expected = read_square(batches.files.file(place), 12, part).float() / 255
        assert torch.equal(image, expected.flip(2) if mirror else expected)


def test_seeds_and_numbers_change_a_batch(photographs):
    with batches_of(photographs) as batches, batches_of(photographs, seed=4) as others:
        assert not torch.equal(batches.at(0)[0], batches.at(5)[0])
        assert not torch.equal(batches.at(0)[0], others.at(0)[0])


def test_the_next_batches_are_begun_and_the_threads_end(photographs):
    before = threading.active_count()
    batches = batches_of(photographs, ahead=2)
    batches.at(4)
    assert sorted(batches._begun) == [5, 6]
    batches.at(0)
    assert sorted(batches._begun) == [1, 2]
    expected = batches.at(1)[0]
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with batches:
        assert torch.equal(batches.at(1)[0], expected)
    assert threading.active_count() == before


def test_after_a_failure_the_other_batches_and_the_mended_one_come(photographs, tmp_path):
    write_folders(tmp_path, {"a": [flat((9 * n, 0, 0)) for n in range(6)]})
    with batches_of(tmp_path, batch=2, ahead=2) as batches:
        whole = [batches.at(update) for update in range(3)]
        broken = batches.files.file(int(batches._chosen(1)[1]))
        content = broken.read_bytes()
        broken.write_bytes(content[:30])
        batches.close()  # forgets what was decoded
        for _ in range(2):
            assert torch.equal(batches.at(0)[0], whole[0][0])
            with pytest.raises(ValueError, match=f"{broken.name} cannot be read as an image"):
                batches.at(1)
            assert torch.equal(batches.at(2)[0], whole[2][0])
        broken.write_bytes(content)
        batches.close()
        assert torch.equal(batches.at(1)[0], whole[1][0])


def test_in_order_gives_all_images_as_listed(photographs):
    files = FolderImages(photographs)
    expected = torch.stack([read_square(files.file(place), 12, middle) for place in range(23)])
    for ahead in (0, 2, 50):
        with batches_of(photographs, batch=5, ahead=ahead, standard=IMAGENET_STANDARD) as batches:
            found = list(batches.in_order())
            assert [len(y) for _, y in found] == [5, 5, 5, 5, 3]
            assert torch.equal(torch.cat([x for x, _ in found]), IMAGENET_STANDARD(expected))
            assert torch.equal(torch.cat([y for _, y in found]), files.labels)
            next(batches.in_order())  # left at once: the rest is called off


def test_impossible_settings_are_refused(photographs):
    with pytest.raises(ValueError, match="a batch of 24 cannot be drawn from 23 images"):
        batches_of(photographs, batch=24)
    for wrong in ({"size": 0}, {"workers": 0}, {"ahead": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            batches_of(photographs, **wrong)


# Parts of images.


@given(
    width=st.integers(1, 900),
    height=st.integers(1, 900),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=DRAWS, max_size=DRAWS),
)
def test_a_random_part_is_inside_the_image(width, height, draws):
    left, top, right, bottom = random_part(width, height, draws)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_parts_have_the_areas_and_ratios_asked_for():
    draws = torch.rand(4000, DRAWS, generator=torch.Generator().manual_seed(0)).tolist()
    width, height = 1000, 1000
    boxes = torch.tensor([random_part(width, height, drawn) for drawn in draws]).double()
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, ratio = across * down / (width * height), across / down
    assert area.min() >= CROP_AREA[0] - 0.005
    assert area.max() <= 1
    assert ratio.min() >= CROP_RATIO[0] - 0.01
    assert ratio.max() <= CROP_RATIO[1] + 0.01
    # Small parts always fit, so below 0.6 nothing is rejected and areas are uniform there.
    small = area[area < 0.6]
    assert small.mean() == pytest.approx(0.34, abs=0.01)
    assert small.var() == pytest.approx(0.52**2 / 12, rel=0.06)
    assert ratio[area < 0.6].log().mean() == pytest.approx(0, abs=0.01)
    # Given its size, a part is anywhere it fits, and mirrored half of the time.
    assert (boxes[:, 0] / (width - across).clamp(1)).mean() == pytest.approx(0.5, abs=0.02)
    assert (boxes[:, 1] / (height - down).clamp(1)).mean() == pytest.approx(0.5, abs=0.02)


def test_no_fitting_part_leaves_the_largest_in_the_middle():
    whole = [1 - 1e-12, 0.5] * 10 + [0.0, 0.0, 0.0]  # all of the area and square: fits no strip
    assert random_part(400, 100, whole) == pytest.approx(
        (400 / 2 - 200 / 3, 0, 400 / 2 + 200 / 3, 100)
    )
    assert random_part(100, 400, whole) == pytest.approx(
        (0, 400 / 2 - 200 / 3, 100, 400 / 2 + 200 / 3)
    )


def ramp(width, height):
    """Red grows from left to right, green from top to bottom, both from 0 to 255."""
    x = numpy.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = numpy.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(numpy.stack((x, y, 0 * x), 2).round().astype(numpy.uint8))


@pytest.mark.parametrize("form", ["JPEG", "png"])
@pytest.mark.parametrize("box", [(0, 0, 640, 480), (37, 101, 611, 467), (5, 9, 100, 80)])
def test_a_part_is_resized_from_its_place_whatever_scale_the_file_is_decoded_at(
    tmp_path, form, box
):
    ramp(640, 480).save(tmp_path / f"ramp.{form}", quality=98)
    size = 24
    pixels = read_square(tmp_path / f"ramp.{form}", size, lambda width, height: box)
    left, top, right, bottom = box
    centres = (torch.arange(size) + 0.5) / size
    red = 255 * ((left + centres * (right - left)) - 0.5) / 639
    green = 255 * ((top + centres * (bottom - top)) - 0.5) / 479
    inner = slice(1, -1)  # averages at the border see one side only
    assert (pixels[0].float() - red)[:, inner].abs().max() <= 2.5
    assert (pixels[1].float() - green[:, None])[inner].abs().max() <= 2.5
    mirrored = read_square(tmp_path / f"ramp.{form}", size, lambda width, height: box, mirror=True)
    assert torch.equal(mirrored, pixels.flip(2))


def test_a_large_jpeg_is_decoded_smaller(tmp_path, monkeypatch):
    ramp(640, 480).save(tmp_path / "a.JPEG")
    sizes = []
    usual = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, *a, **k: sizes.append(self.size) or usual(self, *a, **k)
    )
    for size in (24, 100, 400):
        read_square(tmp_path / "a.JPEG", size, lambda width, height: (0, 0, 480, 480))
    assert sizes == [(80, 60), (160, 120), (640, 480)]


def test_the_middle_is_the_crop_of_224_from_a_shorter_side_of_256():
    left, top, right, bottom = middle(500, 256)
    assert (left, top, right, bottom) == ((500 - 224) / 2, 16, (500 + 224) / 2, 240)
    assert middle(90, 200, share=1.0) == (0, 55, 90, 145)
    assert math.isclose(right - left, 224)


# The benchmark.


def test_bench_times_every_way_against_an_update(tmp_path, monkeypatch, capsys):
    path = Path(__file__).parents[1] / "bench" / "image_loading.py"
    spec = importlib.util.spec_from_file_location("bench_image_loading", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    smaller = {"IN_MEMORY": 8, "BATCH": 4, "UPDATE_BATCH": 2, "LARGE_BATCH": 2}
    for name, value in {**smaller, "SMALL_FILES": (2, 3), "LARGE_FILES": (2, 1)}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    target = tmp_path / "new" / "images.json"
    monkeypatch.setattr(sys, "argv", ["image_loading.py", "--repeats", "1", "--json", str(target)])
    bench.main()
    shown = capsys.readouterr().out
    rows = json.loads(target.read_text())["rows"]
    assert len(rows) == 5
    assert rows[-1]["ratio"] == 1
    for row in rows:
        expected = row["images_per_second"] / rows[-1]["images_per_second"]
        assert row["ratio"] == pytest.approx(expected)
        assert f"| {row['way']} |" in target.with_suffix(".md").read_text()
        assert row["way"] in shown
