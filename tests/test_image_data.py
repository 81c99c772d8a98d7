"""Reading images: the public formats, and class folders in memory."""

import gzip
import os
import struct
import sys

import numpy
import pytest
import torch
from PIL import Image

from cdeq.data import (
    IMAGE_SETS,
    FolderBatches,
    FolderImages,
    MissingDataError,
    data_folder,
    image_formats,
    image_sets,
    images,
    is_image_set_available,
    load_images,
    read_class_folders,
    require_image_files,
)
from image_files import flat, random_bytes, write_cifar, write_fashion, write_folders

# CIFAR-10.


@pytest.fixture
def few_kept(monkeypatch):
    """Small files: two validation images of each class."""
    monkeypatch.setattr(image_formats, "VALID_PER_CLASS", 2)


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
    chosen = images.validation_places(labels, range(10), 200).nonzero().flatten()
    assert 4000 < chosen.double().mean() < 6000  # neither the first ones nor the last
    assert len(chosen) == 2000
    # Frozen: with another choice results on validation images could not be compared.
    few = images.validation_places(torch.arange(24) % 2, "ab", 3)
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
    monkeypatch.setattr(image_formats, "FASHION_DEBIAN", tmp_path / "nowhere")
    assert not is_image_set_available(name, tmp_path)
    for ask in (require_image_files, load_images):
        with pytest.raises(MissingDataError, match=r"Get it from .* CDEQ_DATA at the folder"):
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


def test_fashion_is_read_packed_or_not_and_from_debians_place(tmp_path, few_kept, monkeypatch):
    pixels = write_fashion(tmp_path / "plain")
    write_fashion(tmp_path / "packed", packed=True)
    monkeypatch.setattr(image_formats, "FASHION_DEBIAN", tmp_path / "packed")
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
    monkeypatch.setattr(image_formats, "FASHION_DEBIAN", tmp_path / "nowhere")
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


@pytest.mark.slow
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
    with pytest.raises(ValueError, match=r"011\.png .* more than 8 bits in a channel"):
        load_images(two_classes)


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
