"""Images in memory: crops and mirrors, standards, batches by number, the digits, and how answers are scored."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.data import Augmentation, Images, ImageSet, Standard
from cdeq.data.embedded import digits_set
from cdeq.evaluation import accuracy, top_accuracy
from cdeq.labels import IGNORED
from cdeq.training.images import ImageBatches, in_order
from cdeq.training.supervised import SupervisedObjective

PLAIN = Standard(mean=(0.0,), deviation=(1 / 255,))  # the bytes themselves, as floats


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=generator(seed), dtype=torch.uint8)


def numbered(count: int, height: int = 2, width: int = 3) -> Images:
    """Image i is all of byte i and has the label i."""
    places = torch.arange(count)
    pixels = places.to(torch.uint8)[:, None, None, None].expand(count, 1, height, width)
    return Images(pixels=pixels, labels=places)


def standard_of(train: Images, other: Images | None = None) -> Standard:
    """The standard of a set with these training images; the other splits do not count."""
    parts = {"train": train, "valid": other or train, "test": other or train}
    return ImageSet(name="x", classes=("a",), digest="", **parts).standard()


# Images.


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2).long(), "bytes"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2).long(), r"\(N, C, H, W\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3).long(), "as many labels"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, 1).long(), "as many labels"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2).int(), "int64"),
    ],
)
def test_what_are_no_images_is_refused(pixels, labels, message):
    with pytest.raises(ValueError, match=message):
        Images(pixels=pixels, labels=labels)


def test_taking_images_by_places_and_by_booleans():
    images = numbered(6)
    for chosen in (torch.tensor([4, 1]), torch.tensor([0, 1, 0, 0, 1, 0]).bool()):
        taken = images.take(chosen)
        assert len(taken) == 2
        assert set(taken.labels.tolist()) == {1, 4}
        assert torch.equal(taken.pixels[:, 0, 0, 0].long(), taken.labels)


# The standard.


@given(
    count=st.integers(1, 5),
    channels=st.integers(1, 3),
    side=st.integers(1, 5),
    top=st.integers(2, 256),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_the_standard_is_mean_and_deviation_over_all_pixels(count, channels, side, top, seed):
    pixels = torch.randint(top, (count, channels, side, side + 1), generator=generator(seed))
    pixels = pixels.to(torch.uint8)
    other = Images(pixels=255 - pixels, labels=torch.zeros(count).long())
    images = Images(pixels=pixels, labels=torch.zeros(count).long())
    whole = standard_of(images, other)
    exact = pixels.double() / 255
    mean = exact.mean(dim=(0, 2, 3))
    deviation = (exact - mean[:, None, None]).square().mean(dim=(0, 2, 3)).sqrt()
    torch.testing.assert_close(torch.tensor(whole.mean, dtype=torch.float64), mean)
    torch.testing.assert_close(
        torch.tensor(whole.deviation, dtype=torch.float64), deviation.clamp_min(1e-6)
    )


def test_standardised_bytes_have_zero_mean_and_unit_deviation_by_channel():
    pixels = random_bytes(50, 3, 8, 8) // torch.tensor([1, 2, 5], dtype=torch.uint8)[:, None, None]
    images, before = Images(pixels=pixels, labels=torch.zeros(50).long()), pixels.clone()
    standard = standard_of(images)
    found = standard(pixels)
    assert torch.equal(pixels, before)
    assert found.dtype == torch.float32
    assert found.shape == pixels.shape
    torch.testing.assert_close(found.mean(dim=(0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        found.std(dim=(0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-5
    )
    exact = torch.tensor(
        [
            (value / 255 - m) / d
            for value, m, d in zip(
                pixels[7, :, 2, 3].tolist(), standard.mean, standard.deviation, strict=True
            )
        ]
    )
    torch.testing.assert_close(found[7, :, 2, 3], exact, rtol=1e-4, atol=1e-5)


def test_a_channel_without_variation_stays_finite():
    images = Images(
        pixels=torch.full((2, 1, 4, 4), 51, dtype=torch.uint8), labels=torch.zeros(2).long()
    )
    standard = standard_of(images)
    assert standard.mean == (0.2,)
    assert standard.deviation == (1e-6,)
    assert standard(images.pixels).abs().max() < 1


# Crops and mirrors.


def moved_versions(image: Tensor, padding: int) -> list[Tensor]:
    """All that may become of an image (C, H, W), by loops: unmirrored ones first."""
    channels, height, width = image.shape
    found = []
    for mirrored, top, left in product(
        (False, True), range(2 * padding + 1), range(2 * padding + 1)
    ):
        version = torch.zeros_like(image)
        for c, row, column in product(range(channels), range(height), range(width)):
            from_row, from_column = row + top - padding, column + left - padding
            if 0 <= from_row < height and 0 <= from_column < width:
                place = width - 1 - column if mirrored else column
                version[c, row, place] = image[c, from_row, from_column]
        found.append(version)
    return found


def versions_drawn(pixels: Tensor, augmentation: Augmentation, seed: int = 0) -> list[int]:
    """Which of its versions each image of a batch has become; all of them must be of one kind."""
    drawn = []
    for image, result in zip(pixels, augmentation(pixels, generator(seed)), strict=True):
        versions = moved_versions(image, augmentation.padding)
        matches = [i for i, version in enumerate(versions) if torch.equal(version, result)]
        assert len(matches) == 1
        drawn.append(matches[0])
    return drawn


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_every_image_becomes_one_of_its_moved_and_mirrored_versions(padding, flip):
    pixels = 1 + torch.arange(16 * 2 * 4 * 5).reshape(16, 2, 4, 5).remainder(251).to(torch.uint8)
    augmentation = Augmentation(padding=padding, flip=flip)
    result = augmentation(pixels, generator(1))
    assert result.dtype == torch.uint8
    assert result.shape == pixels.shape
    drawn = versions_drawn(pixels, augmentation, 1)
    places = (2 * padding + 1) ** 2
    assert all(0 <= version < (2 * places if flip else places) for version in drawn)
    if flip:
        assert {version // places for version in drawn} == {0, 1}


@pytest.mark.parametrize("flip", [False, True])
def test_all_versions_come_alike_often_and_images_are_moved_independently(flip):
    image = 1 + torch.arange(12, dtype=torch.uint8).reshape(1, 3, 4)
    batch = 2000
    result = Augmentation(padding=1, flip=flip)(image.expand(batch, 1, 3, 4), generator())
    table = torch.stack(moved_versions(image, 1)).reshape(18, -1)
    same = (result.reshape(batch, 1, -1) == table).all(dim=2)
    assert bool((same.sum(dim=1) == 1).all())
    drawn, kinds = same.long().argmax(dim=1), 18 if flip else 9
    counts = drawn.bincount(minlength=18)
    assert not counts[kinds:].any()
    spread = math.sqrt(batch / kinds)
    assert bool(((counts[:kinds] - batch / kinds).abs() < 5 * spread).all())
    # Neighbours in a batch agree by chance alone.
    agreeing = int((drawn[1:] == drawn[:-1]).sum())
    assert abs(agreeing - batch / kinds) < 5 * spread


def test_what_becomes_of_an_image_depends_on_the_generator_and_its_place_alone():
    pixels, augmentation = random_bytes(8, 1, 6, 6), Augmentation(padding=2)
    first = augmentation(pixels, generator(3))
    assert torch.equal(first, augmentation(pixels, generator(3)))
    assert not torch.equal(first, augmentation(pixels, generator(4)))
    other = random_bytes(8, 1, 6, 6, seed=9)
    other[5] = pixels[5]
    assert torch.equal(augmentation(other, generator(3))[5], first[5])
    stream = generator(3)
    augmentation(pixels, stream)
    assert not torch.equal(augmentation(pixels, stream), first)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    augmentation(pixels, generator(3))
    assert torch.equal(torch.get_rng_state(), before)


# Batches.


@pytest.mark.slow
@given(count=st.integers(1, 60), batch=st.integers(1, 20), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_an_epoch_has_every_image_once_as_far_as_batches_are_full(count, batch, seed):
    batch = min(batch, count)
    batches = ImageBatches(
        images=numbered(count), standard=PLAIN, batch=batch, seed=seed, augmentation=None
    )
    assert len(batches) == count // batch
    for epoch in range(2):
        seen: list[int] = []
        for place in range(len(batches)):
            x, y = batches.at(epoch * len(batches) + place)
            assert x.shape == (batch, 1, 2, 3)
            torch.testing.assert_close(x, y.float()[:, None, None, None].expand_as(x))
            seen += y.tolist()
        assert len(set(seen)) == len(seen) == count // batch * batch
        if count % batch == 0:
            assert sorted(seen) == list(range(count))


def real_batches(seed: int = 0, **options) -> ImageBatches:
    images = Images(pixels=random_bytes(24, 1, 6, 6), labels=torch.arange(24))
    return ImageBatches(images=images, standard=PLAIN, batch=6, seed=seed, **options)


@given(updates=st.lists(st.integers(0, 40), min_size=1, max_size=8))
@settings(max_examples=15)
def test_a_batch_depends_on_its_number_alone(updates):
    in_any_order = real_batches()
    for update in updates:
        (x, y), (again, labels) = in_any_order.at(update), real_batches().at(update)
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


def test_epochs_seeds_and_updates_differ():
    batches, n = real_batches(), 4

    def order(source: ImageBatches, epoch: int) -> list[int]:
        return [i for place in range(n) for i in source.at(epoch * n + place)[1].tolist()]

    orders = [
        order(batches, 0),
        order(batches, 1),
        order(batches, 2),
        order(real_batches(seed=1), 0),
    ]
    assert all(sorted(found) == list(range(24)) for found in orders)
    assert len({tuple(found) for found in orders}) == 4


def test_batches_are_augmented_by_their_number_and_the_crops_leave_the_order_alone():
    batches, plain = real_batches(augmentation=Augmentation(padding=1)), real_batches()
    for update in range(8):
        (x, y), (_, labels) = batches.at(update), plain.at(update)
        assert torch.equal(y, labels)
        for image, label in zip(x, y.tolist(), strict=True):
            versions = moved_versions(batches.images.pixels[label], 1)
            assert any(torch.allclose(image, version.float()) for version in versions)
    same = Images(pixels=random_bytes(1, 1, 6, 6).expand(24, 1, 6, 6), labels=torch.arange(24))
    drawn = [replace(batches, images=same, seed=s).at(u)[0] for s in range(2) for u in range(6)]
    assert not any(torch.equal(a, b) for a, b in combinations(drawn, 2))


def test_batches_are_standardised():
    standard = Standard(mean=(0.25,), deviation=(0.5,))
    plain, scaled = (
        replace(real_batches(augmentation=None), standard=chosen).at(3)[0]
        for chosen in (PLAIN, standard)
    )
    torch.testing.assert_close(scaled, (plain / 255 - 0.25) / 0.5)


@pytest.mark.parametrize("batch", [0, -1, 7])
def test_impossible_batches_are_refused(batch):
    with pytest.raises(ValueError, match=f"a batch of {batch} cannot be drawn from 6 images"):
        ImageBatches(images=numbered(6), standard=PLAIN, batch=batch)


def test_in_order_gives_all_images_as_they_are():
    batches = in_order(numbered(7), PLAIN, 3)
    assert [y.tolist() for _, y in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    for x, y in batches:
        torch.testing.assert_close(x, y.float()[:, None, None, None].expand(len(y), 1, 2, 3))


# Training without an equilibrium.


def task(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_a_supervised_loss_draws_dropout_by_seed_and_number():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)).train()
    batch = (torch.randn(6, 8), torch.arange(6) % 3)
    before = torch.get_rng_state()
    losses = [
        SupervisedObjective(model, task, seed)(batch, update)[0].detach()
        for seed, update in ((0, 4), (0, 4), (0, 5), (1, 4))
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(losses[0], losses[1])
    assert len({float(loss) for loss in losses}) == 3


def test_a_supervised_loss_is_the_loss_and_trains_the_model():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    objective = SupervisedObjective(model, task)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    loss, metrics = objective((x, y), 0)
    logits = (x @ model.weight.T + model.bias).detach().double()
    chances = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    exact = -sum(math.log(float(chances[i, label])) for i, label in enumerate(y.tolist())) / 5
    assert float(loss.detach()) == pytest.approx(exact, rel=1e-5)
    assert not metrics["task"].requires_grad
    assert float(metrics["task"]) == float(loss.detach())
    loss.backward()
    assert {id(p) for p in objective.parameters()} == {id(p) for p in model.parameters()}
    errors = (chances - F.one_hot(y, 3)) / 5
    torch.testing.assert_close(model.weight.grad.double(), errors.T @ x.double())


# Scores.


@given(
    samples=st.integers(1, 12),
    classes=st.integers(1, 8),
    count=st.integers(1, 9),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_top_accuracy_counts_labels_among_the_largest(samples, classes, count, seed):
    draws = generator(seed)
    logits = torch.stack([torch.randperm(classes, generator=draws) for _ in range(samples)]).float()
    labels = torch.randint(classes, (samples,), generator=draws)
    right = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        larger = sum(value > row[label] for value in row)
        right += larger < count
    metric = top_accuracy(count)
    assert metric.part(logits, labels) == (right, samples)
    cut = samples // 2
    parts = [metric.part(logits[:cut], labels[:cut]), metric.part(logits[cut:], labels[cut:])]
    assert metric.score(parts) == pytest.approx(right / samples)
    if count == 1:
        assert metric.part(logits, labels) == accuracy().part(logits, labels)


def test_top_accuracy_leaves_out_ignored_labels_and_takes_any_axes():
    logits = torch.tensor([[[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]])
    labels = torch.tensor([[1, 2], [IGNORED, 2]])
    assert top_accuracy(2).part(logits, labels) == (2, 3)
    assert top_accuracy(2).higher_is_better
    assert "2" in top_accuracy(2).name


# The digits.


@pytest.mark.slow
def test_the_digits_are_bytes_in_three_splits_that_share_no_image():
    from sklearn.datasets import load_digits

    digits = digits_set()
    assert digits.classes == tuple("0123456789")
    parts = {"train": digits.train, "valid": digits.valid, "test": digits.test}
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 1197,
        "valid": 200,
        "test": 400,
    }
    for part in parts.values():
        assert part.pixels.shape[1:] == (1, 8, 8)
        assert part.pixels.dtype == torch.uint8
    assert digits.test.labels.bincount().tolist() == [40] * 10
    assert digits.valid.labels.bincount().tolist() == [20] * 10

    data = load_digits()
    source = torch.tensor(data.images).long()  # 0 ... 16
    expected = {
        (tuple((image * 255 / 16).round().flatten().tolist()), int(label))
        for image, label in zip(source, data.target, strict=True)
    }
    assert len(expected) == 1797  # no two digits are alike, so that bytes tell images apart
    found = [
        (tuple(float(v) for v in image.flatten().tolist()), label)
        for part in parts.values()
        for image, label in zip(part.pixels, part.labels.tolist(), strict=True)
    ]
    assert len(found) == len(set(found)) == 1797
    assert set(found) == expected


def test_the_last_digits_of_each_class_are_the_test_split():
    from sklearn.datasets import load_digits

    data, digits = load_digits(), digits_set(test=3)
    labels = data.target.tolist()
    last = sorted(
        place
        for label in range(10)
        for place in [i for i, found in enumerate(labels) if found == label][-3:]
    )
    assert digits.test.labels.tolist() == [labels[i] for i in last]
    wanted = torch.tensor(data.images[last]) * 255 / 16
    torch.testing.assert_close(digits.test.pixels[:, 0].double(), wanted, rtol=0, atol=0.5)
    assert len(digits.train) + len(digits.valid) == 1797 - 30


def test_the_digits_are_always_the_same():
    first, second = digits_set(), digits_set()
    assert first.digest == second.digest
    assert torch.equal(first.valid.pixels, second.valid.pixels)
    assert digits_set(test=39).digest != first.digest
    assert len(first.digest) == len(hashlib.sha256().hexdigest())
