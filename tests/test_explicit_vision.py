"""AlexNet, Inception-V2 and HRNet: published sizes, small sizes, exchange, training."""

import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cdeq_experiments.rivals.alexnet import AlexNet
from cdeq_experiments.rivals.hrnet import ExchangeModule, HRNet, Residual, bottleneck
from cdeq_experiments.rivals.image_layers import conv_norms, he_weights, stem_stride
from cdeq_experiments.rivals.inception import InceptionBlock, InceptionV2

SMALL = {
    AlexNet: {"width": 16, "hidden": 64},
    InceptionV2: {"width": 0.125},
    HRNet: {
        "width": 8,
        "stages": 3,
        "modules": (1, 1, 1),
        "blocks": 1,
        "stem": 16,
        "head": 8,
        "features": 128,
    },
}
TINY = {
    AlexNet: {"width": 4, "hidden": 16},
    InceptionV2: {"width": 0.05, "blocks": (1, 2, 1)},
    HRNet: {
        "width": 4,
        "stages": 3,
        "modules": (1, 1, 1),
        "blocks": 1,
        "stem": 4,
        "head": 2,
        "features": 16,
    },
}
CLASSES = pytest.mark.parametrize("cls", list(SMALL), ids=lambda cls: cls.__name__)


def size_of(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def logits_and_cost(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The logits, and the multiply-adds of one image."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits = model.eval()(images)
    return logits, counter.get_total_flops() / 2 / len(images)


@cache
def published(cls: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return cls(classes=1000)


# (weights, multiply-adds for one image) with 1000 classes at 224 pixels
PUBLISHED = [
    (AlexNet, 61_100_840, 714e6),
    (InceptionV2, 11_295_240, 2.03e9),
    pytest.param(HRNet, 21_299_004, 4.3e9, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "weights", "cost"), PUBLISHED)
def test_the_defaults_have_the_published_size(cls, weights, cost):
    model = published(cls)
    logits, measured = logits_and_cost(model, torch.empty(2, 3, 224, 224, device="meta"))
    assert logits.shape == (2, 1000)
    assert size_of(model) == pytest.approx(weights, rel=0.002)
    assert measured == pytest.approx(cost, rel=0.02)


@CLASSES
@pytest.mark.parametrize(("image_size", "classes"), [(32, 10), (64, 40)])
def test_small_classifiers_keep_to_a_small_budget(cls, image_size, classes):
    model = cls(classes=classes, image_size=image_size, **SMALL[cls])
    logits, cost = logits_and_cost(model, torch.randn(2, 3, image_size, image_size))
    assert logits.shape == (2, classes)
    assert logits.isfinite().all()
    assert 150_000 <= size_of(model) <= 300_000
    assert cost <= 15e6


@pytest.mark.slow
@CLASSES
@settings(max_examples=5)
@given(
    image_size=st.integers(8, 130),
    classes=st.integers(1, 12),
    in_channels=st.integers(1, 4),
    batch=st.integers(1, 3),
)
def test_every_image_size_gives_logits(cls, image_size, classes, in_channels, batch):
    with torch.device("meta"):
        model = cls(classes=classes, in_channels=in_channels, image_size=image_size, **TINY[cls])
        images = torch.empty(batch, in_channels, image_size, image_size)
    with torch.no_grad():
        assert model.eval()(images).shape == (batch, classes)


@CLASSES
def test_the_config_rebuilds_the_model_even_from_json(cls):
    model = cls(classes=7, in_channels=1, image_size=32, **TINY[cls])
    rebuilt = cls(**json.loads(json.dumps(model.config)))
    rebuilt.load_state_dict(model.state_dict())
    images = torch.randn(3, 1, 32, 32)
    assert torch.equal(rebuilt.eval()(images), model.eval()(images))
    assert rebuilt.config == model.config
    given = {"classes": 7, "in_channels": 1, "image_size": 32} | TINY[cls]
    assert {name: model.config[name] for name in given} == given


@CLASSES
def test_the_config_holds_every_argument(cls):
    model = cls(classes=7, image_size=32, **TINY[cls])
    assert set(model.config) == set(cls.__init__.__kwdefaults__) | {"classes"}


@CLASSES
@pytest.mark.parametrize("image_size", [32, 96])
def test_gradients_reach_every_parameter(cls, image_size):
    torch.manual_seed(0)
    model = cls(classes=5, image_size=image_size, **TINY[cls])
    F.cross_entropy(model(torch.randn(4, 3, image_size, image_size)), torch.arange(4)).backward()
    untouched = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is None or not weight.grad.abs().sum() > 0
    ]
    assert not untouched


@CLASSES
def test_gradients_are_those_of_finite_differences(cls):
    """In-place ReLUs and sums must not spoil what the backward pass needs."""
    torch.manual_seed(0)
    model = cls(classes=3, image_size=8, **TINY[cls]).double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(images)
    outputs = torch.randn(2, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((model(images) * outputs).sum(), images)
    step = 1e-7
    with torch.no_grad():
        ahead, behind = model(images + step * direction), model(images - step * direction)
    expected = ((ahead - behind) * outputs).sum() / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "arguments", "updates"),
    [
        (AlexNet, {"dropout": 0.0}, 50),
        (AlexNet, {"dropout": 0.0, "batch_norm": True}, 10),
        (InceptionV2, {"blocks": (1, 2, 1)}, 14),
        (HRNet, {"stem": 8}, 14),
    ],
)
def test_a_few_updates_learn_random_images(cls, arguments, updates):
    torch.manual_seed(0)
    model = cls(**{"classes": 4, "image_size": 16} | SMALL[cls] | arguments)
    images, labels = torch.randn(32, 3, 16, 16), torch.arange(32) % 4
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(updates):
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] < 4.0  # ln 4 = 1.39: the first draw is no wild guess
    assert losses[-1] < 0.2 * losses[0]


@CLASSES
def test_evaluation_treats_each_image_alone_and_training_does_not(cls):
    torch.manual_seed(0)
    arguments = {"batch_norm": True, "dropout": 0.0} if cls is AlexNet else {}
    model = cls(classes=3, image_size=16, **TINY[cls], **arguments)
    images = torch.randn(8, 3, 16, 16)
    assert not torch.allclose(model(images)[:4], model(images[:4]), atol=1e-3)
    model.eval()
    torch.testing.assert_close(model(images)[:4], model(images[:4]))


@pytest.mark.parametrize(
    ("image_size", "side"), [(8, 1), (32, 4), (33, 3), (64, 4), (65, 1), (224, 6)]
)
def test_alexnet_ends_at_the_documented_sides(image_size, side):
    with torch.device("meta"):
        model = AlexNet(classes=2, image_size=image_size, width=2, hidden=4)
        images = torch.empty(1, 3, image_size, image_size)
    assert model.convolutions(images).shape == (1, 8, side, side)


def test_alexnet_drops_only_in_training_and_norms_only_on_demand():
    torch.manual_seed(0)
    model = AlexNet(classes=3, image_size=16, **TINY[AlexNet])
    images = torch.randn(4, 3, 16, 16)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    normed = AlexNet(classes=3, image_size=16, **TINY[AlexNet], batch_norm=True)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in normed.modules()) == 5


def test_the_channels_of_inception_blocks_are_the_papers():
    model = published(InceptionV2)
    maps = model.stem(torch.empty(1, 3, 224, 224, device="meta"))
    assert maps.shape == (1, 192, 28, 28)
    shapes = []
    for stage in model.stages:
        for block in stage:
            maps = block(maps)
            assert maps.shape[1] == block.channels
            shapes.append(tuple(maps.shape[1:3]))
    assert [channels for channels, _ in shapes] == [
        *(256, 320, 576),
        *(576, 576, 608, 608, 1056),
        *(1024, 1024),
    ]
    assert [side for _, side in shapes] == [28, 28, 14, 14, 14, 14, 14, 7, 7, 7]


def test_an_inception_block_puts_its_paths_beside_each_other():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 9, 9)
    block = InceptionBlock(6, (3, 2, 4, 2, 5, 1)).eval()
    parts = block(x).split((3, 4, 5, 1), dim=1)
    for part, path in zip(parts, block.paths, strict=True):
        assert torch.equal(part, path(x))
    # The mean of the pool stands before a 1 x 1 convolution, so the two can be checked apart.
    convolution = block.paths[-1][1]
    window = x[:, :, 2:5, 3:6].mean(dim=(2, 3), keepdim=True)
    torch.testing.assert_close(parts[-1][:, :, 3:4, 4:5], convolution(window))


def test_a_strided_inception_block_passes_its_input_through_a_pool():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 9, 9)
    block = InceptionBlock(6, (0, 2, 4, 2, 5, 0)).eval()
    y = block(x)
    assert y.shape == (2, 4 + 5 + 6, 5, 5)
    torch.testing.assert_close(y[:, -6:, 1, 2], x[:, :, 1:4, 3:6].amax(dim=(2, 3)))


@pytest.mark.slow
def test_the_branches_of_hrnet_halve_and_widen():
    with torch.device("meta"):
        large = HRNet(classes=10, modules=(1, 1, 1, 1), blocks=1).branches(
            torch.empty(2, 3, 224, 224)
        )
        small = HRNet(classes=10, image_size=32, **SMALL[HRNet]).branches(torch.empty(2, 3, 32, 32))
    assert [tuple(z.shape) for z in large] == [
        (2, 18, 56, 56),
        (2, 36, 28, 28),
        (2, 72, 14, 14),
        (2, 144, 7, 7),
    ]
    assert [tuple(z.shape) for z in small] == [(2, 8, 16, 16), (2, 16, 8, 8), (2, 32, 4, 4)]


def test_one_pixel_reaches_all_branches_of_hrnet():
    torch.manual_seed(0)
    model = HRNet(classes=3, image_size=32, **TINY[HRNet]).double().eval()
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    changed = images.clone()
    changed[0, 0, 13, 13] += 1.0
    for before, after in zip(model.branches(images), model.branches(changed), strict=True):
        assert (before - after).abs().max() > 1e-6


def test_every_branch_of_an_exchange_module_reaches_every_other():
    torch.manual_seed(0)
    module = ExchangeModule((4, 8, 16), blocks=1).double().eval()
    maps = [
        torch.randn(1, 4 << i, 12 >> i, 12 >> i, dtype=torch.float64, requires_grad=True)
        for i in range(3)
    ]
    for fused, source in zip(module(maps), maps, strict=True):
        assert fused.shape == source.shape
        for gradient in torch.autograd.grad(fused.square().sum(), maps, retain_graph=True):
            assert gradient.abs().max() > 1e-6


def test_the_exchange_is_the_sum_over_all_branches():
    """Against sums written out, with branches of no blocks and an odd side."""
    torch.manual_seed(0)
    module = ExchangeModule((2, 4), blocks=0).double().eval()
    fine = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    coarse = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    fused_fine, fused_coarse = module([fine, coarse])
    shrink = (1 + 1e-5) ** -0.5  # a fresh batch norm divides by sqrt(1 + eps)

    up = (
        torch.einsum("oc,bchw->bohw", module.paths["1 to 0"][0].weight[:, :, 0, 0], coarse) * shrink
    )
    nearest = [0, 0, 1, 1, 2]  # floor(3 i / 5)
    torch.testing.assert_close(fused_fine, F.relu(fine + up[:, :, nearest][..., nearest]))

    kernel = module.paths["0 to 1"][0].weight
    windows = F.pad(fine, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2)
    down = torch.einsum("ocuv,bchwuv->bohw", kernel, windows) * shrink
    torch.testing.assert_close(fused_coarse, F.relu(coarse + down))


def test_hrnet_has_as_many_modules_as_told():
    with torch.device("meta"):
        model = HRNet(classes=2, stages=3, modules=(2, 1, 3, 9), blocks=2)
    assert [len(stage) for stage in model.stages] == [1, 3]
    assert len(model.first_stage) == 4
    counts = [len(stage[0].branches) for stage in model.stages]
    assert counts == [2, 3]
    assert all(len(branch) == 2 for branch in model.stages[1][2].branches)


def test_a_bottleneck_keeps_a_fitting_input_on_its_shortcut():
    assert isinstance(bottleneck(16, 4).shortcut, nn.Identity)
    assert not isinstance(bottleneck(8, 4).shortcut, nn.Identity)
    x = torch.randn(2, 3, 4, 4)
    block = Residual(3, (3, 3)).eval()
    torch.testing.assert_close(block(x), F.relu(block.body(x) + x))


def test_layers_before_a_relu_keep_the_size_of_their_input():
    torch.manual_seed(0)
    layer = nn.Linear(400, 4000)
    he_weights(layer)
    x = torch.randn(64, 400)
    assert F.relu(layer(x)).square().mean().item() == pytest.approx(1.0, rel=0.05)
    assert not layer.bias.any()


@pytest.mark.parametrize(
    ("image_size", "stride"), [(8, 1), (32, 1), (33, 2), (64, 2), (65, 4), (224, 4)]
)
def test_the_stride_of_the_stem_follows_the_image(image_size, stride):
    assert stem_stride(image_size, published=4) == stride


@pytest.mark.parametrize("relu", [True, False])
def test_a_convolution_is_normed_over_the_batch(relu):
    torch.manual_seed(0)
    layer = conv_norms(3, (5, 3, 2), relu=relu)
    x = torch.randn(4, 3, 7, 7)
    y = F.conv2d(x, layer[0].weight, stride=2, padding=1)
    variance, mean = torch.var_mean(y, dim=(0, 2, 3), correction=0, keepdim=True)
    expected = (y - mean) / (variance + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), expected.relu() if relu else expected)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (AlexNet, {"classes": 0}, "classes must be at least 1"),
        (AlexNet, {"classes": 2, "width": -1}, "width must be at least 1"),
        (AlexNet, {"classes": 2, "dropout": 1.0}, "dropout must be"),
        (AlexNet, {"classes": 2, "image_size": 7}, "image_size must be at least 8"),
        (InceptionV2, {"classes": 2, "in_channels": 0}, "in_channels must be"),
        (InceptionV2, {"classes": 2, "width": 0.0}, "width scales"),
        (InceptionV2, {"classes": 2, "width": float("nan")}, "width scales"),
        (InceptionV2, {"classes": 2, "blocks": (2, 4)}, "blocks must be three"),
        (InceptionV2, {"classes": 2, "blocks": (3, 4, 2)}, "blocks must be three"),
        (InceptionV2, {"classes": 2, "blocks": (0, 4, 2)}, "blocks must be three"),
        (HRNet, {"classes": 2, "stages": 1}, "stages must be from 2"),
        (HRNet, {"classes": 2, "stages": 5}, "stages must be from 2"),
        (HRNet, {"classes": 2, "modules": (1, 1, 0, 3)}, "at least one module"),
        (HRNet, {"classes": 2, "blocks": 0}, "blocks must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


@CLASSES
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 1, 16, 16), (2, 16, 16, 3)])
def test_other_shapes_than_images_are_refused(cls, shape):
    model = cls(classes=3, image_size=16, **TINY[cls])
    with pytest.raises(ValueError, match=r"images must have the shape \(B, 3"):
        model(torch.zeros(shape))


def test_only_alexnet_is_bound_to_its_image_size():
    images = torch.zeros(2, 3, 24, 24)
    with pytest.raises(ValueError, match=r"\(B, 3, 16, 16\), not \(2, 3, 24, 24\)"):
        AlexNet(classes=3, image_size=16, **TINY[AlexNet])(images)
    for cls in (InceptionV2, HRNet):
        assert cls(classes=3, image_size=16, **TINY[cls])(images).shape == (2, 3)
