"""The distillation objective against literal transcriptions, in double precision."""

import math
import weakref

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from cdeq.consistency.losses import log_distance, mean_squared_error
from cdeq.consistency.objective import DistillationObjective
from cdeq.solvers import Anderson
from cdeq.training.task_loss import IGNORED, cross_entropy
from checks import same_tensors, solver_states
from teachers import CLASSES, Pair, Ring, Tanh, inputs, randomized, untrained

K = 8


class Batch:
    """A recorded batch in double precision, held in memory."""

    def __init__(self, teacher, size=6, labels=True, steps=K):
        self.x = inputs(size, dtype=torch.float64)
        self.y = torch.arange(size) % CLASSES if labels else None
        self.steps, self.trajectory = steps, solver_states(teacher, self.x, steps, Anderson())
        self.endpoint = self.trajectory[-1]

    def state(self, k):
        return self.trajectory[k]


def setting(name, kind=Tanh, task=cross_entropy, labels=True, **changes):
    """An objective whose student has moved on since the running average was begun."""
    teacher = kind(norm=0.9).double()
    batch = Batch(teacher, labels=labels)
    student = randomized(untrained(teacher, batch.x, name, **changes), 0.1, seed=1)
    objective = DistillationObjective(student, task, seed=0)
    old = {n: p.detach().clone() for n, p in student.trainable().items()}
    randomized(student, 0.1, seed=2)
    if hasattr(student.history, "ridge"):
        student.history.ridge = 0.0
        if objective._target is not None:
            objective._target.history.ridge = 0.0
    return objective, batch, teacher, old


class Literal:
    """h and g of the paper's Eqs. 7 to 11, from a table of the student's weights."""

    def __init__(self, teacher, weights, x, rho=0.1, gamma=2.0):
        self.t, self.w, self.x = teacher, weights, x
        self.rho, self.gamma = rho, gamma

    def h(self, z, t):
        W = self.t.weight.detach() + self.w["deltas.changes.0.change"]
        U = self.t.injection.detach() + self.w["deltas.changes.1.change"]
        f = torch.tanh(z @ W.T + self.x @ U.T)
        clock = torch.full((len(z), 1), t, dtype=z.dtype)
        V = self.w["time_heads.0.linear.linear.weight"]
        b = self.w["time_heads.0.linear.linear.bias"]
        return torch.cat([f, clock], dim=1) @ V.T + b

    def time(self, k):
        return 1 - math.exp(-self.rho * k)

    def g(self, states, k):
        z, t = states[k], self.time(k)
        P = h1 = self.h(z, t)
        if k > 0:
            h0 = self.h(states[k - 1], self.time(k - 1))
            r1, r0 = (h1 - z).detach(), (h0 - states[k - 1]).detach()
            a = ((r0 * (r0 - r1)).sum(1) / (r1 - r0).square().sum(1))[:, None]
            P = a * h1 + (1 - a) * h0
        return t**self.gamma * z + (1 - t**self.gamma) * P


@pytest.fixture
def draw(monkeypatch):
    """Make the next draws of k give what is asked for, and remember their bounds."""
    bounds = []

    def choose(k):
        def randint(low, high, size, generator):
            bounds.append((low, high))
            return torch.tensor(k)

        monkeypatch.setattr(torch, "randint", randint)
        return bounds

    return choose


def leaves(objective):
    return {
        n: p.detach().clone().requires_grad_() for n, p in objective.student.trainable().items()
    }


def same_gradients(objective, loss, weights, expected, tolerance=1e-8):
    loss.backward()
    expected.backward()
    for name, p in objective.student.trainable().items():
        wanted = weights[name].grad
        got = torch.zeros_like(p) if p.grad is None else p.grad
        wanted = torch.zeros_like(p) if wanted is None else wanted
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# The paper's recipe


@pytest.mark.parametrize("direction", ["later", "earlier"])
@pytest.mark.parametrize("k", range(K + 1))
def test_equations_12_to_14(draw, direction, k):
    changes = {"augment_probability": 0.0, "direction": direction}
    objective, batch, teacher, old = setting("paper", **changes)
    draw(k)
    loss, metrics = objective(batch, 0)

    weights = leaves(objective)
    ours, average = Literal(teacher, weights, batch.x), Literal(teacher, old, batch.x)
    states, star = batch.trajectory, batch.trajectory[K]
    g = ours.g(states, k)
    expected = 0.8 * (g - star).square().mean()
    neighbour = k - 1 if direction == "later" else k + 1
    if direction == "earlier" and neighbour == K:
        expected = expected + 0.2 * (g - star).square().mean()
    elif 0 <= neighbour <= K:
        expected = expected + 0.2 * (g - average.g(states, neighbour).detach()).square().mean()
    if 1 - math.exp(-0.1 * k) <= 0.5:
        logits = g @ teacher.head.T.detach()
        expected = expected + 0.05 * torch_cross_entropy(logits, batch.y)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    shown = ((g - star).norm(dim=1) / star.norm(dim=1)).mean()
    torch.testing.assert_close(metrics["distance"], shown.detach())
    same_gradients(objective, loss, weights, expected)


@pytest.mark.parametrize(("lambda_1", "lambda_2"), [(1.0, 0.0), (0.0, 0.0), (0.3, 2.0)])
def test_the_weights_of_the_terms(draw, lambda_1, lambda_2):
    changes = {"lambda_1": lambda_1, "lambda_2": lambda_2, "augment_probability": 0.0}
    objective, batch, teacher, old = setting("paper", **changes)
    draw(2)
    loss, _ = objective(batch, 0)
    weights = leaves(objective)
    g = Literal(teacher, weights, batch.x).g(batch.trajectory, 2)
    target = Literal(teacher, old, batch.x).g(batch.trajectory, 1)
    expected = lambda_1 * (g - batch.endpoint).square().mean()
    expected = expected + (1 - lambda_1) * (g - target).square().mean()
    expected = expected + lambda_2 * torch_cross_entropy(g @ teacher.head.T.detach(), batch.y)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    assert (objective._target is None) == (lambda_1 == 1.0)


def test_augmented_states_are_the_endpoint(draw):
    objective, batch, teacher, _ = setting("paper", augment_probability=1.0, lambda_1=1.0)
    exempt = {0, 1, 2, K - 1, K}
    states = [z if i in exempt else batch.endpoint for i, z in enumerate(batch.trajectory)]
    ours = Literal(teacher, leaves(objective), batch.x)
    for k in range(K + 1):
        draw(k)
        expected = (ours.g(states, k) - batch.endpoint).square().mean()
        if ours.time(k) <= 0.5:
            logits = ours.g(states, k) @ teacher.head.T
            expected = expected + 0.05 * torch_cross_entropy(logits, batch.y)
        torch.testing.assert_close(objective(batch, 0)[0], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_k_is_drawn_over_the_whole_trajectory(monkeypatch, first):
    objective, batch, _, _ = setting("paper", first_index=first)
    drawn, randint = [], torch.randint

    def remember(*arguments, **options):
        drawn.append(int(randint(*arguments, **options)))
        return torch.tensor(drawn[-1])

    monkeypatch.setattr(torch, "randint", remember)
    for update in range(60):
        objective(batch, update)
    assert set(drawn) == set(range(first, K + 1))
    again = list(drawn)
    drawn.clear()
    for update in range(60):
        objective(batch, update)
    assert drawn == again


def test_draws_depend_on_the_seed_and_the_update_alone():
    objective, batch, _, _ = setting("paper")
    losses = [objective(batch, update)[0].item() for update in range(20)]
    torch.manual_seed(123)
    assert [objective(batch, update)[0].item() for update in range(20)] == losses
    other = DistillationObjective(objective.student, cross_entropy, seed=1)
    assert [other(batch, update)[0].item() for update in range(20)] != losses


@pytest.mark.parametrize("time_map", ["exponential", "linear", "cosine"])
def test_the_time_map_sets_the_time_point(draw, time_map):
    fractions = {
        "exponential": lambda k: 1 - math.exp(-0.3 * k),
        "linear": lambda k: k / K,
        "cosine": lambda k: 1 - math.cos(math.pi * k / (2 * K)),
    }
    changes = {"lambda_1": 1.0, "lambda_2": 0.0, "gamma": 3.0, "time_map": time_map}
    if time_map == "exponential":
        changes["rho"] = 0.3
    objective, batch, teacher, _ = setting("paper", augment_probability=0.0, **changes)
    ours = Literal(teacher, leaves(objective), batch.x, gamma=3.0)
    ours.time = fractions[time_map]
    for k in range(K + 1):
        draw(k)
        expected = (ours.g(batch.trajectory, k) - batch.endpoint).square().mean()
        torch.testing.assert_close(objective(batch, 0)[0], expected, rtol=1e-6, atol=1e-9)


# The running average


def test_the_running_average_is_its_equation():
    objective, batch, _, old = setting("paper", ema=0.9)
    names = list(objective.student.trainable())
    buffers = dict(objective.named_buffers())
    for i, name in enumerate(names):
        assert torch.equal(buffers[f"average_{i}"], old[name])
    before = objective(batch, 3)[0].item()
    objective.update_average()
    for i, name in enumerate(names):
        new = objective.student.trainable()[name]
        expected = 0.9 * old[name] + 0.1 * new.detach()
        torch.testing.assert_close(buffers[f"average_{i}"], expected)
    assert objective(batch, 3)[0].item() != before  # the buffers are what the target is made of
    assert not any(b.requires_grad for b in buffers.values())
    assert not any("_target" in name for name, _ in objective.named_parameters())


def test_the_average_has_no_gradient_and_shares_the_teacher():
    objective, _, _, _ = setting("paper")
    assert objective._target.methods is objective.student.methods
    assert not any(p.requires_grad for p in objective._target.parameters())
    assert all(p.requires_grad for p in objective.student.trainable().values())


# Own rollouts


def literal_rollout(objective, teacher, batch, weights, detach=False):
    """z_0 ... z_depth of an anchored student with a learned start."""
    network = "start_network.networks.0"
    linears = {k.removeprefix(network): v for k, v in weights.items() if k.startswith(network)}
    base = (batch.x @ teacher.injection.T).detach()
    seen = torch.cat([base, torch.zeros_like(base)], dim=1)  # the context and the teacher's start
    hidden = seen @ linears[".inner.linear.weight"].T + linears[".inner.linear.bias"]
    hidden = torch.nn.functional.gelu(hidden)
    z = hidden @ linears[".outer.linear.weight"].T + linears[".outer.linear.bias"]
    states = [z]
    for j in range(objective.recipe.depth):
        states.append(literal_step(teacher, batch, weights, states[-1], j, detach and j > 0))
    return states


def literal_step(teacher, batch, weights, z, j, detach=False):
    c = 0.65**j
    z = z.detach() if detach else z
    W = teacher.weight.detach() + c * weights["deltas.changes.0.change"]
    U = teacher.injection.detach() + c * weights["deltas.changes.1.change"]
    return torch.tanh(z @ W.T + batch.x @ U.T)


def log_loss(z, star):
    ratio = (z - star).square().sum(1) / star.square().sum(1)
    return torch.log(ratio + 1e-3).mean()


@pytest.mark.parametrize("backprop", ["full", "checkpointed", "truncated"])
def test_own_rollout_with_log_loss(backprop):
    objective, batch, teacher, _ = setting(
        "anchored", backprop=backprop, depth=5, decay=0.65, injection="student"
    )
    loss, metrics = objective(batch, 0)
    weights = leaves(objective)
    states = literal_rollout(objective, teacher, batch, weights, backprop == "truncated")
    expected = sum(log_loss(z, batch.endpoint) for z in states) / 5
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    for name, z in (("distance_1", states[1]), ("distance", states[-1])):
        shown = ((z - batch.endpoint).norm(dim=1) / batch.endpoint.norm(dim=1)).mean()
        torch.testing.assert_close(metrics[name], shown.detach())
    same_gradients(objective, loss, weights, expected)


@pytest.mark.parametrize("backprop", ["full", "checkpointed", "truncated"])
def test_the_start_network_runs_once_in_each_update(backprop):
    objective, batch, _, _ = setting("anchored", backprop=backprop)
    calls = []
    objective.student.start_network.register_forward_hook(lambda *_: calls.append(None))
    objective(batch, 0)[0].backward()
    assert len(calls) == 1


def held_for_backward(backprop, depth):
    """The most tensors that autograd held at one moment of an update."""
    changes = {"depth": depth} | ({} if backprop == "full" else {"backprop": backprop})
    objective, batch, *_ = setting("anchored", **changes)
    held = weakref.WeakSet()
    most = 0

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # with its history it would hold itself

    def pack(tensor):
        nonlocal most
        kept = Kept(tensor)
        held.add(kept)
        most = max(most, len(held))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        objective(batch, 0)[0].backward()
    return most


def test_a_truncated_rollout_holds_one_step_however_long_it_is():
    assert held_for_backward("full", 12) > 3 * held_for_backward("full", 3)
    assert held_for_backward("truncated", 12) <= held_for_backward("truncated", 3) + 2
    assert held_for_backward("truncated", 12) < 0.5 * held_for_backward("full", 12)


def test_truncated_gradients_are_others():
    gradients = {}
    for backprop in ("full", "truncated"):
        objective, batch, _, _ = setting("anchored", backprop=backprop)
        objective(batch, 0)[0].backward()
        gradients[backprop] = objective.student.deltas.changes[0].change.grad
    assert not torch.allclose(gradients["full"], gradients["truncated"], rtol=1e-2)


@pytest.mark.parametrize("kind", [Tanh, Pair, Ring])
@pytest.mark.parametrize("history", ["none", "anderson", "gru"])
@pytest.mark.parametrize("schedule", ["fixed", "learned"])
def test_checkpointing_changes_no_bit_of_the_gradient(kind, history, schedule):
    found = {}
    for backprop in ("full", "checkpointed"):
        objective, batch, _, _ = setting(
            "anchored", kind, backprop=backprop, history=history, schedule=schedule
        )
        loss, _ = objective(batch, 0)
        loss.backward()
        grads = {n: p.grad for n, p in objective.student.trainable().items()}
        found[backprop] = {"loss": loss.detach(), **grads}
    assert same_tensors(found["full"], found["checkpointed"])
    assert any(g is not None and g.any() for g in grads.values())


@pytest.mark.parametrize("direction", ["later", "earlier"])
def test_own_rollout_with_local_and_task_terms(direction):
    changes = {"lambda_1": 0.7, "lambda_2": 0.4, "task_until": 0.5, "depth": 4, "loss": "mse"}
    changes |= {"decay": 0.65, "injection": "student"}
    objective, batch, teacher, old = setting("anchored", direction=direction, **changes)
    loss, _ = objective(batch, 0)
    weights = leaves(objective)
    z, star = literal_rollout(objective, teacher, batch, weights), batch.endpoint
    expected = (z[0] - star).square().mean()
    for j in range(4):
        out, neighbour = z[j + 1], j - 1 if direction == "later" else j + 1
        expected = expected + 0.7 * (out - star).square().mean()
        if 0 <= neighbour < 4:
            target = literal_step(teacher, batch, old, z[neighbour], neighbour).detach()
            expected = expected + 0.3 * (out - target).square().mean()
        if 1 - 0.65**j <= 0.5:
            logits = out @ teacher.head.T.detach()
            expected = expected + 0.4 * torch_cross_entropy(logits, batch.y)
    expected = expected / 4
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    same_gradients(objective, loss, weights, expected)


# The distances


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_single(dtype):
    g = torch.Generator().manual_seed(0)
    star = torch.randn(4, 300, generator=g).to(dtype)
    z = (star + 0.02 * torch.randn(4, 300, generator=g)).to(dtype).requires_grad_()
    exact = (z.double() - star.double()).square()
    mse = mean_squared_error(z, star, batched=True)
    log = log_distance(z, star, batched=True, floor=1e-9)
    assert mse.dtype == log.dtype == torch.float32
    torch.testing.assert_close(mse.double(), exact.mean(), rtol=1e-5, atol=0)
    ratio = exact.sum(1) / star.double().square().sum(1)
    expected = torch.log(ratio + 1e-9).mean()
    torch.testing.assert_close(log.double(), expected, rtol=1e-6, atol=0)
    (mse + log).backward()
    assert z.grad.dtype == dtype


# Labels, and states of other shapes


@pytest.mark.parametrize("name", ["paper", "anchored"])
def test_without_labels_there_is_no_task_term(name):
    plain, batch, _, _ = setting(name, labels=False, lambda_2=0.5)
    without, _, _, _ = setting(name, task=None, lambda_2=0.5)
    labelled, with_y, _, _ = setting(name, lambda_2=0.5)
    early = next(u for u in range(50) if labelled(with_y, u)[0] != without(with_y, u)[0])
    assert torch.equal(plain(batch, early)[0], without(with_y, early)[0])


@pytest.mark.parametrize("name", ["paper", "anchored"])
@pytest.mark.parametrize("kind", [Pair, Ring])
@pytest.mark.parametrize("loss", ["mse", "log"])
def test_tuple_and_unbatched_states(name, kind, loss):
    objective, batch, _, _ = setting(name, kind, loss=loss, lambda_1=0.5)
    for update in range(5):
        objective.zero_grad()
        value, _ = objective(batch, update)
        value.backward()
        assert torch.isfinite(value)
        assert all(delta.grad.any() for delta in objective.student.deltas.parameters())
        objective.update_average()


def test_ignored_labels_do_not_count():
    output = torch.randn(4, 5, 3)
    labels = torch.randint(3, (4, 5))
    labels[:, 2:] = IGNORED
    expected = torch_cross_entropy(output[:, :2].reshape(-1, 3), labels[:, :2].reshape(-1))
    torch.testing.assert_close(cross_entropy(output, labels), expected)


def test_agreement_is_the_divergence_from_the_teachers_answer_at_each_step():
    kept = {"depth": 3, "decay": 0.65, "injection": "student"}
    plain, batch, teacher, _ = setting("anchored", **kept)
    agreeing, *_ = setting("anchored", agreement=0.7, **kept)
    states = literal_rollout(plain, teacher, batch, leaves(plain))[1:]
    answer = teacher.readout(batch.endpoint, None).log_softmax(-1)

    def divergence(z):
        own = teacher.readout(z, None).log_softmax(-1)
        return (answer.exp() * (answer - own)).sum(-1).mean()

    expected = plain(batch, 0)[0] + 0.7 * sum(divergence(z) for z in states) / 3
    torch.testing.assert_close(agreeing(batch, 0)[0], expected, rtol=1e-5, atol=1e-7)
    assert float(sum(divergence(z) for z in states).detach()) > 1e-3
