"""Image files in class folders, decoded as they are needed, and the parts of them that are looked at."""

import io
import math
import multiprocessing
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cdeq.data import IMAGENET_STANDARD, FolderBatches, FolderImages, Standard
from cdeq.data.image_folders import CROP_AREA, CROP_RATIO, DRAWS, middle, random_part, read_square
from cdeq.data.images import validation_places
from image_files import flat, ramp, random_bytes, write_folders

PLAIN = Standard(mean=(0.0,) * 3, deviation=(1.0,) * 3)


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
    """Batches of 4 images of 12 x 12 pixels, decoded in this process."""
    usual = {"standard": PLAIN, "batch": 4, "size": 12, "seed": 3, "workers": 0}
    return FolderBatches(files=FolderImages(folder), **(usual | changes))


def test_files_are_listed_with_the_labels_of_their_folders(photographs, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # nothing is read
    files = FolderImages(photographs, "val")
    assert files.files == ["c0/00.JPEG", "c1/01.JPEG", "c2/02.JPEG"]
    assert files.labels.tolist() == [0, 1, 2]
    assert files.file(1) == photographs / "val" / "c1" / "01.JPEG"
    chosen = validation_places(FolderImages(photographs).labels, files.classes, 2)
    kept = FolderImages(photographs).take(chosen)
    assert kept.labels.bincount().tolist() == [2, 2, 2]
    assert [Path(file).parent.name for file in kept.files] == [f"c{y}" for y in kept.labels]


def places_of(batches, update):
    """The places of a batch's files in their list."""
    return [place for place, _ in batches._keys(update)]


def test_an_epoch_has_every_image_at_most_once_and_orders_differ(photographs):
    batches = batches_of(photographs, augment=False)
    assert len(batches) == 5
    epochs = [[places_of(batches, 5 * e + u) for u in range(5)] for e in range(2)]
    for epoch in epochs:
        counts = Counter(place for batch in epoch for place in batch)
        assert (len(counts), set(counts.values())) == (20, {1})
    assert epochs[0] != epochs[1]
    x, y = batches.at(2)
    files = batches.files
    expected = [read_square(files.file(place), 12, middle) for place in epochs[0][2]]
    assert torch.equal(x, torch.stack(expected).float() / 255)
    assert torch.equal(y, files.labels[epochs[0][2]])


@settings(max_examples=15)
@given(updates=st.lists(st.integers(0, 12), min_size=1, max_size=8))
def test_a_batch_depends_on_its_number_alone(photographs, updates):
    batches = batches_of(photographs)
    for update in updates:
        x, y = batches.at(update)
        expected_x, expected_y = batches_of(photographs).at(update)
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_decode_the_same_batches_and_draw_nothing_of_torch(photographs, workers):
    batches, plain = batches_of(photographs, workers=workers), batches_of(photographs)
    before, children = torch.get_rng_state(), {*multiprocessing.active_children()}
    for update in (3, 4, 5, 1):  # goes on, then starts again, as a resumed run does
        for found, expected in zip(batches.at(update), plain.at(update), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({*multiprocessing.active_children()} - children) == workers
    batches.close()
    assert {*multiprocessing.active_children()} <= children


@pytest.mark.parametrize("update", [0, 7])
def test_parts_and_mirrors_are_drawn_from_seed_and_number(photographs, update):
    generator = torch.Generator().manual_seed((3 + 7919) * 1_000_003 + update)
    draws = torch.rand(20, DRAWS, generator=generator, dtype=torch.float64).tolist()
    batches = batches_of(photographs, batch=20)
    x, _ = batches.at(update)
    mirrored = [drawn[-1] < 0.5 for drawn in draws]
    assert 4 < sum(mirrored) < 16
    places = places_of(batches, update)
    for image, place, drawn, mirror in zip(x, places, draws, mirrored, strict=True):
        part = partial(random_part, draws=drawn)
        expected = read_square(batches.files.file(place), 12, part).float() / 255
        assert torch.equal(image, expected.flip(2) if mirror else expected)


def test_seeds_and_numbers_change_a_batch(photographs):
    batches, others = batches_of(photographs), batches_of(photographs, seed=4)
    assert not torch.equal(batches.at(0)[0], batches.at(5)[0])
    assert not torch.equal(batches.at(0)[0], others.at(0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_failure_the_other_batches_and_the_mended_one_come(tmp_path, workers):
    write_folders(tmp_path, {"a": [flat((9 * n, 0, 0)) for n in range(6)]})
    whole = [batches_of(tmp_path, batch=2).at(update)[0] for update in range(3)]
    batches = batches_of(tmp_path, batch=2, workers=workers)
    broken = batches.files.file(places_of(batches, 1)[1])
    content = broken.read_bytes()
    broken.write_bytes(content[:30])
    for _ in range(2):
        assert torch.equal(batches.at(0)[0], whole[0])
        with pytest.raises(ValueError, match=f"{broken.name} cannot be read as an image"):
            batches.at(1)
        assert torch.equal(batches.at(2)[0], whole[2])
    broken.write_bytes(content)
    assert torch.equal(batches.at(1)[0], whole[1])
    batches.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_in_order_gives_all_images_as_listed(photographs, workers):
    files = FolderImages(photographs)
    expected = torch.stack([read_square(files.file(place), 12, middle) for place in range(23)])
    batches = batches_of(photographs, batch=5, workers=workers, standard=IMAGENET_STANDARD)
    found = list(batches.in_order())
    assert [len(y) for _, y in found] == [5, 5, 5, 5, 3]
    assert torch.equal(torch.cat([x for x, _ in found]), IMAGENET_STANDARD(expected))
    assert torch.equal(torch.cat([y for _, y in found]), files.labels)
    before = {*multiprocessing.active_children()}
    next(batches.in_order())  # left at once: its workers end
    assert {*multiprocessing.active_children()} <= before


def test_impossible_settings_are_refused(photographs):
    with pytest.raises(ValueError, match="a batch of 24 cannot be drawn from 23 images"):
        batches_of(photographs, batch=24)
    for wrong in ({"size": 0}, {"workers": -1}):
        with pytest.raises(ValueError, match="must be at least 1 and workers at least 0"):
            batches_of(photographs, **wrong)


# Parts of images.


@pytest.mark.slow
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


@settings(max_examples=60)
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
