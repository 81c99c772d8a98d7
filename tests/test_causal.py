"""Causal mixing: in a causal model no position of any state learns of a later token, in solvers and in students."""

from types import SimpleNamespace

import pytest
import torch

from cdeq.consistency.history import AndersonHistory, RunningAnderson
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.safeguard import GuardedAnderson
from cdeq.consistency.student import Student
from cdeq.equilibrium.contract import causal_positions
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.solvers import Anderson
from cdeq.solvers.anderson import anderson_weights, plain_sum, running_sums
from checks import as_it_is, numbers, solver_states
from teachers import randomized, small_transformer

WORDS, LENGTH, CHANGED = 11, 9, 6
"""Tokens from CHANGED on are others in the second of two texts."""
SAME = {"rtol": 0.0, "atol": 1e-11}


def transformer():
    torch.manual_seed(0)
    return TransformerDEQ(vocabulary=WORDS, width=16, heads=2, inner=16, length=LENGTH)


MODELS = {"TransformerDEQ": transformer, "DEQTransformer": small_transformer}
both_models = pytest.mark.parametrize("name", MODELS)


def model_named(name):
    return MODELS[name]().double().eval().requires_grad_(False)


def two_texts():
    """Tokens (2, L), and the same with others from CHANGED on."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (2, LENGTH), generator=g)
    other = tokens.clone()
    other[:, CHANGED:] = (other[:, CHANGED:] + 1 + 4 * torch.arange(2)[:, None]) % WORDS
    return tokens, other


def leak(states, others):
    """The largest difference before CHANGED, of all states; there is one from there on."""
    found = [(a - b).abs() for a, b in zip(states, others, strict=True)]
    assert all(d[:, CHANGED:].max() > 1e-3 for d in found[1:])
    return max(float(d[:, :CHANGED].max()) for d in found)


# The weights


@pytest.mark.parametrize("fading", [1.0, 0.5])
def test_the_weights_of_a_position_are_those_of_the_text_up_to_it_the_nearest_counting_most(fading):
    residuals = numbers(3, 4, 5, 6)  # (B, n, L, D)
    history = AndersonHistory(3, 1.0, batched=True, causal=True, fading=fading)
    alpha = history._weights(residuals.flatten(2), 5)
    assert alpha.shape == (3, 5, 4)
    for last in range(5):
        counted = fading ** (0.5 * (last - torch.arange(last + 1.0)))
        seen = (residuals[:, :, : last + 1] * counted[:, None]).flatten(2)
        expected = anderson_weights(seen @ seen.mT, history.ridge)
        torch.testing.assert_close(alpha[:, last], expected)
    flat = residuals.flatten(2)  # (B, n, L D), as in the ring buffers
    rows = Anderson(positions=5, fading=fading).products(flat[:, 0], flat)
    own = (residuals[:, :1] * residuals).sum(3)  # (B, n, L)
    torch.testing.assert_close(rows[:, 0], own[..., 0])
    near, far = fading * own[..., 1], fading**2 * own[..., 0]
    torch.testing.assert_close(rows[:, 2], own[..., 2] + near + far)


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("fading", [1.0, 0.5, 0.0])
def test_running_sums_hold_the_plain_sum(length, fading):
    products = numbers(3, length, 4)
    sums = running_sums(products, fading)
    torch.testing.assert_close(plain_sum(sums, fading), products.sum(dim=1))
    if fading == 1:
        torch.testing.assert_close(sums, products.cumsum(dim=1))


def test_a_model_says_how_its_positions_fade():
    model, z = SimpleNamespace(causal=True), torch.zeros(2, 5, 3)
    assert Anderson().for_input(model, None, z).fading == 1
    model.fading = 0.5
    assert Anderson().for_input(model, None, z) == Anderson(positions=5, fading=0.5)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        Anderson(fading=2.0)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("mixing", [1.0, 0.6])
@pytest.mark.parametrize("causal", [True, False])
def test_ring_buffers_give_what_the_differentiable_history_gives(window, mixing, causal):
    history = AndersonHistory(window, mixing, batched=True, causal=causal)
    z, kept, ring = numbers(2, 7, 4, seed=0), None, None
    running = RunningAnderson(history, window, z)
    assert running.solver.positions == (7 if causal else None)
    guard = GuardedAnderson(history, window, z)
    guarded = None
    for seed in range(1, 9):
        h = z + 0.7**seed * numbers(2, 7, 4, seed=seed)  # no residual grows
        mixed, kept = history(z, h, kept)
        other, ring = running(z, h, ring)
        watched, guarded = guard.guarded(z, h, as_it_is, guarded)
        torch.testing.assert_close(other, mixed, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(watched, other)
        z = mixed
    assert guarded[1].trusted.all()


def test_causal_weights_are_for_sequences_of_causal_models_alone():
    history = AndersonHistory(2, 1.0, batched=True, causal=True)
    assert history.positions(torch.zeros(2, 5, 3)) == 5
    assert history.positions(torch.zeros(2, 5)) is None
    assert history.positions((torch.zeros(2, 5, 3),)) is None
    model = model_named("TransformerDEQ")
    assert causal_positions(model, torch.zeros(2, 5, 3)) == 5
    assert causal_positions(model, (torch.zeros(2, 5, 3),)) is None
    model.causal = False
    assert causal_positions(model, torch.zeros(2, 5, 3)) is None
    with pytest.raises(ValueError, match="positions must be at least 1, not 0"):
        Anderson(positions=0)


# Solvers


@both_models
@pytest.mark.parametrize("window", [1, 5])
def test_no_state_of_a_solve_learns_of_later_tokens(name, window):
    model, (tokens, other) = model_named(name), two_texts()
    solver = Anderson(window=window)
    ours, theirs = (solver_states(model, x, 8, solver) for x in (tokens, other))
    assert leak(ours, theirs) < SAME["atol"]
    # The beginning alone is read as in the whole text.
    alone = solver_states(model, tokens[:, :CHANGED], 8, solver)
    for z, whole in zip(alone, ours, strict=True):
        torch.testing.assert_close(z, whole[:, :CHANGED], rtol=0, atol=1e-9)
    model.causal = False
    mixed, others = (solver_states(model, x, 8, solver) for x in (tokens, other))
    assert leak(mixed, others) > 1e-4  # the weights of a whole sample tell of all its tokens


# Students


def student_of(name, recipe="corrected", noise=0.05, **changes):
    torch.manual_seed(0)
    recipe = Recipe.from_name(recipe, **changes)
    student = Student.for_example(model_named(name), recipe, two_texts()[0])
    return randomized(student, noise).eval().requires_grad_(False)


@both_models
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("corrected", {}),
        ("corrected", {"leap": 1}),
        ("corrected", {"safeguard": False}),
        ("warm_start", {}),
        ("anchored", {"history": "anderson", "window": 3}),
        ("paper", {}),
    ],
)
def test_no_state_of_a_student_learns_of_later_tokens(name, recipe, changes):
    student = student_of(name, recipe, **changes)
    ours, theirs = (student.trajectory(x, 4) for x in two_texts())
    assert leak(ours, theirs) < SAME["atol"]
    tracked = student.requires_grad_(True).trajectory(two_texts()[0], 4)
    if not student.recipe.safeguard:
        assert tracked[-1].requires_grad
        torch.testing.assert_close(tracked[-1].detach(), ours[-1], rtol=1e-6, atol=1e-7)


@both_models
@pytest.mark.parametrize("size", [30.0, 300.0])
def test_the_safeguard_takes_a_position_back_for_what_is_before_it_alone(name, size, monkeypatch):
    """A correction so harmful that samples are taken back: which ones must not depend on later tokens."""
    student = student_of(name, noise=0.0)
    block = student.correction.blocks[0]
    block.set_linear(-size * torch.eye(16, dtype=torch.float64))
    trusted = []
    usual = GuardedAnderson.guarded

    def noted(self, *arguments):
        state, memory = usual(self, *arguments)
        trusted.append(memory[1].trusted)
        return state, memory

    monkeypatch.setattr(GuardedAnderson, "guarded", noted)
    ours, theirs = (student.trajectory(x, 6) for x in two_texts())
    assert leak(ours, theirs) < SAME["atol"]
    first, second = trusted[:6], trusted[6:]
    assert any(not t.all() for t in first)
    for a, b in zip(first, second, strict=True):
        assert a.shape == (2, LENGTH)
        assert torch.equal(a[:, :CHANGED], b[:, :CHANGED])


@pytest.mark.parametrize("mixing", [1.0, 0.6])
@pytest.mark.parametrize("ruined", [0, 4])
def test_growth_takes_back_the_positions_after_it_alone(ruined, mixing):
    """Two rollouts of 5 positions that differ from `ruined` on, where the second one's residual grows."""
    history = AndersonHistory(2, mixing, batched=True, causal=True)
    guard = GuardedAnderson(history, 2, torch.zeros(1, 5, 3))

    def rollout(growth):
        z, memory, states, images = torch.zeros(1, 5, 3, dtype=torch.float64), None, [], []
        for seed in range(6):
            r = 0.5**seed * numbers(1, 5, 3, seed=seed)
            r[:, ruined:] *= growth if seed == 3 else 1.0
            images.append((z + r, r))
            z, memory = guard.guarded(z, z + r, as_it_is, memory)
            states.append(z)
        return states, memory, images

    (ours, calm, _), (theirs, taken, images) = rollout(1.0), rollout(1e4)
    assert calm[1].trusted.all()
    assert taken[1].trusted.tolist() == [[i < ruined for i in range(5)]]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a[:, :ruined], b[:, :ruined])
    # Taken back: all that is remembered is the best state, so that mixing gives its damped step.
    image, r = images[2]
    torch.testing.assert_close(
        theirs[3][:, ruined:], (image - (1 - mixing) * r)[:, ruined:], rtol=1e-5, atol=1e-6
    )


def test_a_text_of_another_length_than_the_example_is_read():
    student = student_of("DEQTransformer")
    tokens = two_texts()[0]
    whole = student.trajectory(tokens, 4)
    for length in (1, 4):
        alone = student.trajectory(tokens[:, :length], 4)
        torch.testing.assert_close(alone[-1], whole[-1][:, :length], rtol=0, atol=1e-9)
