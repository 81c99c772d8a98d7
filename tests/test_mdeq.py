"""MDEQ: the map written out again, gradients, dropout, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.equilibrium import check_contract, is_batched
from cdeq.models.vision.mdeq import MDEQ
from cdeq.solvers import Anderson, solve_model
from checks import answer_after, numbers, require_copies, require_implicit_gradients, same_tensors
from mdeqs import CLASSES, WIDTHS, contracted, make, scrambled, states

DOUBLE = torch.float64


# The contract.


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (2, 2)])
def test_contract_and_shapes(branches, strides):
    model = make(branches, strides=strides)
    check_contract(model)
    assert is_batched(model)
    shrunk = strides[0] * strides[1]
    x = numbers(2, 3, 4 * shrunk, 8 * shrunk, dtype=torch.float32)
    context = model.inject(x)
    assert [u.shape for u in context] == [(2, WIDTHS[0], 4, 8)]
    expected = [(2, width, 4 >> i, 8 >> i) for i, width in enumerate(WIDTHS[:branches])]
    z = model.start(context)
    assert isinstance(z, tuple)
    assert [part.shape for part in z] == expected
    assert not any(part.any() for part in z)
    after = model.step(z, context)
    assert isinstance(after, tuple)
    assert [part.shape for part in after] == expected
    assert model.readout(after, context).shape == (2, CLASSES)
    start = model.start_network()(context)
    assert [part.shape for part in start] == expected


# One step, written out.


def kernel_of(layer: nn.Module) -> Tensor:
    """g v / |v|, the norm over all but the output channels."""
    g, v = (getattr(layer.parametrizations.weight, name) for name in ("original0", "original1"))
    return g * v / v.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()


def convolved(x: Tensor, layer: nn.Module, stride: int = 1) -> Tensor:
    kernel = kernel_of(layer)
    return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)


def normed(x: Tensor, layer: nn.GroupNorm, groups: int = 2) -> Tensor:
    batch, width, height, breadth = x.shape
    grouped = x.reshape(batch, groups, -1)
    centred = grouped - grouped.mean(dim=2, keepdim=True)
    unit = centred / (centred.square().mean(dim=2, keepdim=True) + 1e-5).sqrt()
    unit = unit.reshape(batch, width, height, breadth)
    return unit * layer.weight[:, None, None] + layer.bias[:, None, None]


def block_by_hand(
    block: Any, z: Tensor, u: Tensor | float, keep: float, mask: Tensor | float = 1.0
) -> Tensor:
    inner = normed(convolved(z, block.expand), block.norm_inner).clamp_min(0) * mask
    change = normed(convolved(inner, block.contract) + u, block.norm_sum)
    return normed((keep * z + change).clamp_min(0), block.norm_out)


def heard_by_hand(layers: Any, y: Tensor, source: int, target: int) -> Tensor:
    """F_ji(y_j)."""
    if source == target:
        return y
    if source > target:
        small = normed(convolved(y, layers[0]), layers[1])
        times = 2 ** (source - target)
        return small.repeat_interleave(times, 2).repeat_interleave(times, 3)
    for level in range(target - source):
        conv, norm = (layer for layer in list(layers)[3 * level : 3 * level + 2])
        y = normed(convolved(y, conv, stride=2), norm)
        if level < target - source - 1:
            y = y.clamp_min(0)
    return y


def step_by_hand(
    model: Any, z: tuple[Tensor, ...], u: Tensor, masks: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    y = [
        block_by_hand(block, z[i], u if i == 0 else 0.0, model.keep, masks[i] if masks else 1.0)
        for i, block in enumerate(model.blocks)
    ]
    out = []
    for i, post in enumerate(model.posts):
        total = sum(heard_by_hand(model.fusions[i][j], y[j], j, i) for j in range(len(y)))
        out.append(normed(convolved(total.clamp_min(0), post[1]), post[2]))
    return tuple(out)


@pytest.mark.parametrize(("branches", "keep"), [(1, 1.0), (2, 0.7), (3, 1.0)])
def test_a_step_is_the_equation(branches, keep):
    model, z = scrambled(branches, keep=keep), states(branches)
    u = numbers(2, WIDTHS[0], 8, 8, seed=9)
    found, wanted = model.step(z, (u,)), step_by_hand(model, z, u)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strides", [(1, 1), (1, 2), (2, 2)])
def test_the_stem_is_its_three_convolutions(strides):
    model, x = scrambled(strides=strides), numbers(2, 3, 16, 16)
    stem, u = list(model.stem), x
    for at, stride, padding in ((0, strides[0], 1), (3, strides[1], 1), (6, 1, 0)):
        u = F.conv2d(u, stem[at].weight, stride=stride, padding=padding)
        norm = stem[at + 1]  # at rest: mean 0 and variance 1
        u = u / 1.00001**0.5 * norm.weight[:, None, None] + norm.bias[:, None, None]
        u = u.clamp_min(0)
    torch.testing.assert_close(model.inject(x)[0], u)


def test_every_branch_hears_every_other_in_one_step():
    model, z = scrambled(3), states(3)
    u = numbers(2, WIDTHS[0], 8, 8, seed=9)
    before = model.step(z, (u,))
    for changed in range(3):
        other = tuple(part + (i == changed) * torch.randn_like(part) for i, part in enumerate(z))
        for a, b in zip(before, model.step(other, (u,)), strict=True):
            assert (a - b).abs().max() > 1e-2


def test_only_the_finest_block_sees_the_injection():
    model, z = scrambled(3), states(3)
    u, other = numbers(2, 2, WIDTHS[0], 8, 8, seed=9)
    for a, b in zip(model.step(z, (u,)), model.step(z, (other,)), strict=True):
        assert (a - b).abs().max() > 1e-2
    with torch.no_grad():  # nothing is fused: each branch hears itself alone
        for target, row in enumerate(model.fusions):
            for source, layers in enumerate(row):
                if source != target:
                    norms = [m for m in layers if isinstance(m, nn.GroupNorm)]
                    norms[-1].weight.zero_()
                    norms[-1].bias.zero_()
    first, second = model.step(z, (u,)), model.step(z, (other,))
    assert (first[0] - second[0]).abs().max() > 1e-2
    assert same_tensors(first[1:], second[1:])


def test_keep_is_the_share_of_the_state_in_the_residual_sum():
    # With a silent change, and no norm behind it to undo a scale, the residual sum is all there is.
    z, u = states(1)[0], torch.zeros(2, WIDTHS[0], 8, 8, dtype=DOUBLE)
    sums = []
    for keep in (1.0, 0.5, 0.0):
        block = scrambled(1, keep=keep).blocks[0]
        nn.init.zeros_(block.norm_sum.weight)
        nn.init.zeros_(block.norm_sum.bias)
        block.norm_out = nn.Identity()
        sums.append(block(z, u, None))
    torch.testing.assert_close(sums[0], z.clamp_min(0))
    torch.testing.assert_close(sums[1], 0.5 * z.clamp_min(0))
    assert not sums[2].any()


def test_the_readout_uses_every_branch():
    model, z = scrambled(3), states(3)
    logits = model.readout(z, ())
    for changed in range(3):
        other = tuple(part + (i == changed) * torch.randn_like(part) for i, part in enumerate(z))
        assert (model.readout(other, ()) - logits).abs().max() > 1e-3


def test_the_readout_is_its_convolutions():
    model, z = scrambled(3), states(3)
    head = model.head
    with torch.no_grad():
        for i, norm in enumerate(m for m in head.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.copy_(0.1 * numbers(norm.num_features, seed=20 + i))
            norm.running_var.copy_(numbers(norm.num_features, seed=60 + i).abs() + 0.5)

    def conv_norm(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d, stride: int = 1) -> Tensor:
        padding = conv.weight.shape[-1] // 2
        x = F.conv2d(x, conv.weight, conv.bias, stride=stride, padding=padding)
        mean, scale = norm.running_mean, norm.weight / (norm.running_var + 1e-5).sqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]

    def widened(x: Tensor, bottleneck: Any) -> Tensor:
        a, b, _, c, d, _, e, f = bottleneck.body
        inner = conv_norm(conv_norm(x, a, b).clamp_min(0), c, d).clamp_min(0)
        return (conv_norm(x, *bottleneck.short) + conv_norm(inner, e, f)).clamp_min(0)

    total = widened(z[0], head.widen[0])
    for i in (1, 2):
        strided = conv_norm(total, *head.down[i - 1][:2], stride=2).clamp_min(0)
        total = widened(z[i], head.widen[i]) + strided
    pooled = conv_norm(total, *head.final[:2]).clamp_min(0).mean(dim=(2, 3))
    wanted = pooled @ head.classify.weight.T + head.classify.bias
    torch.testing.assert_close(model.readout(z, ()), wanted)


# Gradients.


@pytest.mark.slow
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_implicit_gradients_are_those_of_the_unrolled_iteration(branches):
    labels = torch.tensor([0, 2])
    require_implicit_gradients(
        contracted(branches).double(),
        numbers(2, 3, 8, 8),
        lambda output: F.cross_entropy(output, labels),
        unrolled=60,
        tolerance=1e-6,
        least=1e-8,
    )


# Dropout.


def test_dropout_is_drawn_once_for_each_input_and_in_training_only():
    model, plain, x = scrambled(2, dropout=0.4), scrambled(2), numbers(5, 3, 8, 8)
    assert len(model.inject(x)) == 1
    assert torch.equal(model.inject(x)[0], plain.inject(x)[0])
    assert len(plain.train().inject(x)) == 1

    model.train()
    torch.manual_seed(3)
    context = model.inject(x)
    masks, z = context[1:], states(2, batch=5)
    assert [mask.shape for mask in masks] == [(5, 2 * width, 1, 1) for width in WIDTHS[:2]]
    for mask in masks:
        assert mask.dtype == DOUBLE
        torch.testing.assert_close(mask[mask != 0], torch.full_like(mask[mask != 0], 1 / 0.6))
        assert 0.2 < float((mask == 0).double().mean()) < 0.6
        assert not torch.equal(mask[0], mask[1])  # images have masks of their own
    again = model.inject(x)
    assert torch.equal(again[0], context[0])
    assert not torch.equal(again[1], context[1])

    once = model.step(z, context)
    assert same_tensors(once, model.step(z, context))
    wanted = step_by_hand(model, z, context[0], masks)
    torch.testing.assert_close(once, wanted, rtol=1e-9, atol=1e-9)


def test_a_solve_with_dropout_converges_because_the_masks_stay():
    model = contracted(2, dropout=0.4).double().train()
    with torch.no_grad():
        context = model.inject(numbers(4, 3, 8, 8))
        solution = solve_model(model, context, Anderson(), tol=1e-8, max_steps=60)
        assert bool(solution.converged.all())
        redrawn = model.step(solution.state, model.inject(numbers(4, 3, 8, 8)))
    assert (redrawn[0] - solution.state[0]).abs().max() > 1e-3


# Samples and copies.


def test_samples_are_independent_in_evaluation_though_not_in_training():
    model, x = make(2), numbers(4, 3, 8, 8, dtype=torch.float32)
    other = torch.cat([x[:1], 3 * numbers(3, 3, 8, 8, seed=2, dtype=torch.float32)])

    def first_logits(images: Tensor) -> Tensor:
        return answer_after(model, images, 2)[:1]

    torch.testing.assert_close(first_logits(x), first_logits(other))
    torch.testing.assert_close(first_logits(x), first_logits(x[:1]))
    copied = copy.deepcopy(model.state_dict())
    model.train()
    assert not torch.allclose(first_logits(x), first_logits(other))
    assert not torch.equal(model.state_dict()["stem.1.running_mean"], copied["stem.1.running_mean"])


def test_deep_copies_state_dicts_and_configs_give_the_same_model():
    model = scrambled(3, keep=0.5, dropout=0.1, strides=(2, 1))
    require_copies(model, numbers(2, 3, 16, 16))


def test_the_defaults_are_the_published_small_model():
    with torch.device("meta"):
        model = MDEQ(classes=1000)
    weights = sum(p.numel() for p in model.parameters())
    assert 16e6 < weights < 19e6
    assert model.shrinks == 32
    with torch.device("meta"):
        context = model.inject(torch.empty(2, 3, 224, 224))
        z = model.step(model.start(context), context)
    assert [tuple(part.shape[1:]) for part in z] == [
        (32, 56, 56),
        (64, 28, 28),
        (128, 14, 14),
        (256, 7, 7),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": (), "head": ()}, "every branch"),
        ({"channels": (4, 8), "head": (2,)}, "differ in number"),
        ({"strides": (2,)}, "two strides"),
        ({"strides": (2, 3)}, "two strides"),
        ({"expand": 0}, "expand"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"fuse_groups": -2}, "fuse_groups must be at least 1"),
        ({"final": 0}, "final must be at least 1"),
        ({"channels": (0, 4)}, "channels must be at least 1"),
        ({"head": (0, 4)}, "head must be at least 1"),
        ({"keep": float("nan")}, "keep must be a finite number"),
        ({"channels": (4, 9)}, "divide every branch"),
        ({"groups": 3}, "groups 3"),
        ({"fuse_groups": 3}, "fuse_groups 3"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
    ],
)
def test_impossible_models_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    "shape", [(3, 8, 8), (2, 1, 8, 8), (2, 3, 6, 8), (2, 3, 8, 6), (2, 3, 8, 8, 1)]
)
def test_images_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"images \(B, 3, .* that 4 divides"):
        make(3).inject(torch.zeros(shape))
