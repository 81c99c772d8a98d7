"""MDEQ's learned start, and students of MDEQ, trained and saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdeq import FitConfig, Recipe, Student, distill
from cdeq.models.vision.mdeq import MDEQ
from cdeq.models.vision.pyramid_start import PyramidStart
from checks import equilibrium, numbers, picard_states, same_tensors
from mdeqs import CLASSES, WIDTHS, contracted, states
from teachers import randomized

# The learned start.


def start_network(branches: int = 3) -> PyramidStart:
    torch.manual_seed(0)
    return PyramidStart(channels=WIDTHS[:branches]).double()


def test_the_start_is_zero_and_trains_all_its_weights():
    network, u = start_network(), numbers(2, WIDTHS[0], 8, 8)
    targets, before = states(3), [p.detach().clone() for p in network.parameters()]
    z = network((u,))
    assert [part.shape for part in z] == [part.shape for part in targets]
    assert not any(part.any() for part in z)

    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum((a - b).square().mean() for a, b in zip(network((u,)), targets, strict=True))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[1] < losses[0]
    for (name, p), old in zip(network.named_parameters(), before, strict=True):
        assert p.grad is not None, name
        assert p.grad.any(), name
        assert not torch.equal(p, old), name


def test_the_start_is_the_equation():
    network = randomized(start_network(), 0.3)
    u = numbers(2, WIDTHS[0], 8, 8)
    found = network((u, torch.ones(2, 8, 1, 1)))  # a mask beside the injection is no concern of it
    h, levels = u, []
    for i, (wide, mix) in enumerate(zip(network.depthwise, network.mix, strict=True)):
        h = F.conv2d(h, wide.weight, wide.bias, 2 if i else 1, 2, groups=h.shape[1])
        h = torch.einsum("oi,bihw->bohw", mix.weight[:, :, 0, 0], h) + mix.bias[:, None, None]
        h = 0.5 * h * (1 + torch.erf(h / 2**0.5))
        levels.append(h)
    for i, part in enumerate(found):
        wanted = network.out[i][0].bias[:, None, None]
        for j in range(i, 3):
            term = torch.einsum(
                "oi,bihw->bohw", network.out[i][j - i].weight[:, :, 0, 0], levels[j]
            )
            times = 2 ** (j - i)
            wanted = wanted + term.repeat_interleave(times, 2).repeat_interleave(times, 3)
        torch.testing.assert_close(part, wanted)


def seen_from_the_middle(network: PyramidStart, branch: int, side: int) -> list[int]:
    """The rows of u on which the middle of z_i depends."""
    u = numbers(1, WIDTHS[0], side, side).requires_grad_()
    part = network((u,))[branch]
    middle = part.shape[-1] // 2
    (gradient,) = torch.autograd.grad(part[0, :, middle, middle].sum(), u)
    rows, columns = gradient.abs().sum(dim=(0, 1, 3)), gradient.abs().sum(dim=(0, 1, 2))
    assert torch.equal(rows.nonzero(), columns.nonzero())
    return rows.nonzero().flatten().tolist()


@pytest.mark.parametrize(("branches", "side"), [(2, 8), (3, 16)])
def test_every_branch_of_the_start_sees_the_image_through_the_coarsest_level(branches, side):
    network = randomized(start_network(branches), 0.3)
    for branch in range(branches):
        assert seen_from_the_middle(network, branch, side) == list(range(side))
    with torch.no_grad():
        for i in range(branches):
            for layer in list(network.out[i])[1:]:
                layer.weight.zero_()
    middle = side // 2
    assert seen_from_the_middle(network, 0, side) == list(range(middle - 2, middle + 3))


# A student.


def images(count: int = 2, batch: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [
        (numbers(batch, 3, 8, 8, seed=10 + i, dtype=torch.float32), torch.arange(batch) % CLASSES)
        for i in range(count)
    ]


def distilled(updates: int, branches: int = 2, recipe: str = "anchored", **changes: Any) -> Student:
    return distill(
        contracted(branches),
        images(),
        recipe=Recipe.from_name(recipe, **changes),
        fit=FitConfig(updates=updates),
        max_steps=15,
        seed=4,
    )


@pytest.mark.slow
def test_the_three_ways_back_through_a_rollout(no_plan):
    full, checkpointed, truncated = (
        distilled(3, backprop=way, depth=3).own_parts().state_dict()
        for way in ("full", "checkpointed", "truncated")
    )
    assert same_tensors(full, checkpointed)
    assert full.keys() == truncated.keys()
    assert all(weight.isfinite().all() for weight in full.values())
    assert any((full[name] - truncated[name]).abs().max() > 1e-4 for name in full)
    assert any(name.startswith("start_network.") and weight.any() for name, weight in full.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branches", "recipe", "updates", "share"),
    [
        (1, "anchored", 25, 0.4),
        (2, "anchored", 25, 0.4),
        (3, "anchored", 25, 0.4),
        (2, "paper", 120, 0.9),
    ],
)
def test_a_first_step_comes_nearer_than_the_teachers(branches, recipe, updates, share, no_plan):
    student, x = distilled(updates, branches, recipe), images()[0][0]
    star = equilibrium(student.teacher, x, tol=1e-5)
    ours, theirs = student.trajectory(x, 1)[1], picard_states(student.teacher, x, 1)[1]
    for a, b, exact in zip(ours, theirs, star, strict=True):  # in each branch
        assert (a - exact).norm() < share * (b - exact).norm()


@pytest.mark.slow
def test_a_student_is_the_same_from_its_folder(tmp_path):
    student, x = distilled(2, depth=3), images()[0][0]
    student.save(tmp_path / "student")
    again = Student.load(tmp_path / "student")
    assert isinstance(again.teacher, MDEQ)
    for steps in range(4):
        assert torch.equal(student(x, steps=steps), again(x, steps=steps))
