"""The objective of corrected steps and of the start alone, against literal transcriptions in double precision."""

import pytest
import torch
from torch.nn.functional import gelu

from cdeq.consistency.distillation import target_precision
from cdeq.consistency.first_stages import CorrectionObjective, StartObjective
from cdeq.consistency.least_squares import residuals_along
from cdeq.consistency.objective import DEFAULT_FLOOR, DistillationObjective
from checks import same_tensors
from teachers import Pair, Ring, Tanh
from test_objective import leaves, log_loss, same_gradients, setting

PLAIN = {"history": "none", "window": 1, "safeguard": False}
"""Without mixing, a corrected step is z + r + N(r) itself."""


class LiteralCorrected:
    """Corrected steps without mixing, from a table of the student's weights."""

    def __init__(self, teacher, weights, x):
        self.w, self.theta = weights, teacher.weight.detach()
        self.u = (x @ teacher.injection.T).detach()

    def start(self):
        name = "start_network.networks.0"
        seen = torch.cat([self.u, torch.zeros_like(self.u)], dim=1)
        hidden = seen @ self.w[f"{name}.inner.linear.weight"].T
        hidden = gelu(hidden + self.w[f"{name}.inner.linear.bias"])
        return (
            hidden @ self.w[f"{name}.outer.linear.weight"].T + self.w[f"{name}.outer.linear.bias"]
        )

    def rollout(self, depth, truncated=False, given=None):
        """z_0 ... z_depth; each from the one before, or from `given` states."""
        block = {
            k.removeprefix("correction.blocks.0.").removesuffix(".linear.weight"): v
            for k, v in self.w.items()
            if k.startswith("correction")
        }
        states = [self.start() if given is None else given[0]]
        for j in range(depth):
            z = states[-1].detach() if truncated and j else states[-1]
            z = z if given is None else given[j]
            f = torch.tanh(z @ self.theta.T + self.u)
            r = f - z
            if j < 3:
                gate = torch.cat([self.u, f], dim=1) @ block["gates"].T
                gate = torch.relu(gate + block["gates.linear.bias"])
            n = r @ block["linear"].T + (gate * (r @ block["enter"].T)) @ block["leave"].T
            states.append(z + r + self.w["gains"][j].double() * n)
        return states


@pytest.mark.parametrize("backprop", ["full", "checkpointed", "truncated"])
@pytest.mark.parametrize("early", [0.0, 1.0, 2.5])
def test_the_loss_of_corrected_steps(backprop, early):
    changes = {"depth": 4, "early": early, "backprop": backprop, **PLAIN}
    objective, batch, teacher, _ = setting("corrected", **changes)
    loss, _ = objective(batch, 0)
    weights = leaves(objective)
    states = LiteralCorrected(teacher, weights, batch.x).rollout(4, backprop == "truncated")
    sums = sum(j**-early for j in range(1, 5))
    expected = log_loss(states[0], batch.endpoint) / 4
    for j, z in enumerate(states[1:], start=1):
        expected = expected + j**-early / sums * log_loss(z, batch.endpoint)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
    # Gains are of single precision.
    same_gradients(objective, loss, weights, expected, tolerance=1e-5)
    assert all(p.grad is not None for p in objective.student.trainable().values())


def test_the_loss_of_the_correction_alone():
    """Each corrected step of a rollout by itself: nothing before it is differentiated."""
    whole, batch, teacher, _ = setting("corrected", depth=4, **PLAIN)
    alone = CorrectionObjective(whole)
    loss, _ = alone(batch, 0)
    weights = leaves(whole)
    literal = LiteralCorrected(teacher, weights, batch.x)
    states = [z.detach() for z in literal.rollout(4)]
    expected = sum(log_loss(z, batch.endpoint) for z in literal.rollout(4, given=states)[1:]) / 4
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
    trained = {name for name, _ in alone.named_parameters()}
    assert trained == {"gains", *(n for n in trained if n.startswith("network."))}
    loss.backward()
    expected.backward()
    for name, weight in whole.student.named_parameters():
        if name.startswith(("correction.", "gains")):
            torch.testing.assert_close(
                weight.grad.double(), weights[name].grad.double(), rtol=1e-5, atol=1e-9
            )
        else:
            assert weight.grad is None, name


@pytest.mark.parametrize("leap", [0, 1])
def test_the_residuals_of_a_rollout_are_those_of_its_own_evaluations(leap):
    """Only a leap, which is another map's, has its state evaluated once more."""
    whole, batch, teacher, _ = setting("corrected", depth=4, leap=leap, **PLAIN)
    student, calls = whole.student, []
    prepared = student.prepare(batch.x)

    def call(c, z, context):
        calls.append(c)
        return prepared.call(c, z, context)

    found = residuals_along(student, prepared._replace(call=call), 4)
    assert len(calls) == 4 + leap
    for (z, r), state in zip(found, student.rollout(prepared, 4), strict=False):
        assert same_tensors(z, state)
        assert same_tensors(r, teacher.step(z, prepared.base) - z)


def test_early_weighs_the_steps_and_keeps_their_sum():
    counts = {early: setting("corrected", early=early, depth=3)[0].weights for early in (0, 1, 2.0)}
    assert counts[0] == [1.0, 1.0, 1.0]
    assert counts[1] == pytest.approx([18 / 11, 9 / 11, 6 / 11])
    assert counts[2.0] == pytest.approx([36 / 49 * 3, 9 / 49 * 3, 4 / 49 * 3])
    assert all(sum(weights) == pytest.approx(3) for weights in counts.values())


@pytest.mark.parametrize("kind", [Tanh, Pair, Ring])
@pytest.mark.parametrize("leap", [0, 1])
def test_checkpointing_changes_no_bit_of_the_gradient(kind, leap):
    found = {}
    for backprop in ("full", "checkpointed"):
        objective, batch, _, _ = setting("corrected", kind, backprop=backprop, leap=leap)
        loss, _ = objective(batch, 0)
        loss.backward()
        grads = {n: p.grad for n, p in objective.student.trainable().items()}
        found[backprop] = {"loss": loss.detach(), **grads}
    assert same_tensors(found["full"], found["checkpointed"])
    assert all(g is not None and g.any() for g in grads.values())
    assert any(name.startswith("deltas") for name in grads) == (leap > 0)


def test_a_leap_is_a_step_with_changed_weights_and_no_history():
    objective, batch, teacher, _ = setting("corrected", leap=1, depth=3)
    student = objective.student.eval().requires_grad_(False)
    weights = {n: p.detach() for n, p in student.state_dict().items()}
    changed = teacher.weight + weights["deltas.changes.0.change"]
    literal = LiteralCorrected(teacher, weights, batch.x)
    literal.theta = changed.detach()
    states = student.trajectory(batch.x, 2)
    torch.testing.assert_close(states[1], literal.rollout(1)[1], rtol=1e-6, atol=1e-7)
    # The step after it is the teacher's own; it is the first that mixing knows of.
    f = torch.tanh(states[1] @ teacher.weight.T + literal.u)
    gates = student.correction.gate(literal.u, f)
    n = student.gains[1] * student.correction(f - states[1], gates)
    torch.testing.assert_close(states[2], f + n, rtol=1e-6, atol=1e-7)


# The start alone


def test_the_start_alone_is_trained_without_an_evaluation():
    objective, batch, teacher, _ = setting("corrected")
    alone = StartObjective(objective)
    assert {n for n, _ in alone.named_parameters()} == {
        f"network.{n}" for n, _ in objective.student.start_network.named_parameters()
    }
    student = objective.student
    student.teacher.calls = 0
    loss, metrics = alone(batch, 0)
    loss.backward()
    assert student.teacher.calls == 0
    z = LiteralCorrected(teacher, leaves(objective), batch.x).start()
    torch.testing.assert_close(loss, log_loss(z, batch.endpoint), rtol=1e-10, atol=1e-12)
    shown = ((z - batch.endpoint).norm(dim=1) / batch.endpoint.norm(dim=1)).mean()
    torch.testing.assert_close(metrics["distance"], shown.detach())
    assert {n for n, p in student.trainable().items() if p.grad is not None} == {
        n for n in student.trainable() if n.startswith("start_network")
    }


# The floor of the log loss


class Precise:
    def __init__(self, *errors):
        self.errors = torch.tensor(errors)

    def precision(self):
        return self.errors


def test_the_floor_follows_the_precision_of_the_targets_unless_the_recipe_says():
    assert target_precision(Precise(1e-4, 2e-4, 1.0)) == pytest.approx(4e-4)
    assert target_precision(Precise(1e-9)) == 1e-5
    assert target_precision(Precise(torch.inf)) == 3e-2

    def floor(name, known, **changes):
        student = setting(name, **changes)[0].student
        return DistillationObjective(student, None, 0, known).distance.keywords["floor"]

    assert floor("corrected", 1e-7) == 1e-7
    assert floor("corrected", None) == DEFAULT_FLOOR
    assert floor("corrected", 1e-7, log_floor=1e-2) == 1e-2
    assert floor("anchored", 1e-7) == 1e-3
