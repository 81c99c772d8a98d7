"""Training on long texts in segments: memory from update to update, and runs resumed to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Cut, cut_at
from cdeq import FitConfig, TeachConfig, teach
from cdeq.equilibrium.memory import Segment
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.training import fit
from cdeq.training.checkpoint import read_checkpoint
from cdeq.training.draws import numbered_draws
from cdeq.training.segments import CarriedMemory, ExplicitTextObjective, full_memory
from cdeq_experiments.rivals.qrnn import QRNN
from cdeq_experiments.rivals.text_convolutions import TCN
from cdeq_experiments.rivals.transformer_xl import TransformerXL
from checks import same_tensors, tensor_bytes
from teachers import Tanh, small_transformer

WORDS, WIDTH, BATCH, LENGTH, PERIOD = 50, 16, 2, 5, 4
SHARED = {"vocabulary": WORDS, "width": WIDTH, "dropout": 0.2}
EXPLICIT = {
    "qrnn": (QRNN, {"channels": 12, "layers": 2, "weight_dropout": 0.1}),
    "transformer": (TransformerXL, {"heads": 2, "inner": 24, "layers": 2, "memory": 7}),
    "tcn": (TCN, {"channels": 12, "levels": 2, "kernel": 3}),
}
FIT = FitConfig(updates=10, checkpoint_every=3, log_every=1, learning_rate=1e-2)


def batch_at(update):
    """Segments of a text that begins anew every `PERIOD` updates."""
    draw = torch.Generator().manual_seed(update % PERIOD)
    whole = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=draw)
    return whole[:, :-1], whole[:, 1:].contiguous()


def deq(**changes):
    return small_transformer(**{"dropout": 0.2, **changes})


def explicit(name, **changes):
    torch.manual_seed(0)
    kind, sizes = EXPLICIT[name]
    return kind(**{**SHARED, **sizes, **changes})


@torch.no_grad()
def carried_for(model, period=PERIOD):
    def left(memory):
        tokens = batch_at(0)[0]
        if not isinstance(model, DEQTransformer):
            return model(tokens, memory or None)[1]
        context = model.inject(Segment(tokens, memory))
        return model.remember(model.start(context), context)

    return CarriedMemory(full_memory(left), period)


def teaching(**changes):
    known = {
        "fit": FIT,
        "depths": (3, 6),
        "penalty": 0.1,
        "pretrain_updates": 2,
        "pretrain_depth": 2,
    }
    return TeachConfig(**{**known, **changes})


# The memory itself.


def random_memory(lengths, seed=0):
    """Three axes with these numbers of tokens, and a tensor of two, which has none."""
    draw = torch.Generator().manual_seed(seed)
    parts = [torch.randn(BATCH, length, 3, generator=draw) for length in lengths]
    return (*parts, torch.randn(BATCH, 6, generator=draw))


def like(*lengths):
    return tuple(torch.zeros_like(part) for part in random_memory(lengths))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5))
def test_what_was_kept_last_comes_back_whatever_its_length(kept):
    carried = CarriedMemory(like(5, 3), period=1000)
    for seed, lengths in enumerate(kept):
        memory = random_memory(lengths, seed)
        carried.keep(memory)
        found = carried.at(seed + 1)
        assert same_tensors(found, memory)


def test_a_shorter_memory_lies_at_the_end():
    carried = CarriedMemory(like(5), period=3)
    carried.keep(random_memory([5]))
    memory = random_memory([2], seed=1)
    carried.keep(memory)
    assert torch.equal(carried.memory_0[:, 3:], memory[0])
    assert carried.lengths.tolist() == [2, 0]


@pytest.mark.parametrize("period", [1, 3, 4])
def test_each_pass_begins_with_none(period):
    carried = CarriedMemory(like(2), period)
    for update in range(9):
        assert (carried.at(update) == ()) == (update % period == 0)
        carried.keep(random_memory([2], seed=update))


def test_what_is_given_out_is_a_copy():
    carried = CarriedMemory(like(2), 5)
    carried.keep(random_memory([2]))
    given_out = carried.at(1)
    before = tuple(part.clone() for part in given_out)
    carried.keep(random_memory([2], seed=1))
    assert same_tensors(given_out, before)


def test_gradients_end_at_the_memory():
    carried = CarriedMemory(like(2), 5)
    carried.keep(tuple(part.requires_grad_() for part in random_memory([2])))
    assert not any(part.requires_grad for part in (*carried.at(1), *carried.buffers()))


@pytest.mark.parametrize("shorter", [False, True])
def test_the_memory_and_its_lengths_are_in_the_saved_state(shorter):
    carried, other = CarriedMemory(like(4), 5), CarriedMemory(like(4), 5)
    memory = random_memory([3 if shorter else 4])
    carried.keep(memory)
    other.load_state_dict(carried.state_dict())
    assert same_tensors(other.at(1), memory)


def test_a_model_that_remembers_nothing():
    nothing = CarriedMemory((), 2)
    nothing.keep(())
    assert nothing.at(1) == ()
    model = deq(memory=0)
    carried = carried_for(model)
    assert [part.shape for part in carried.buffers()][:2] == [(BATCH, 0, 16), (BATCH, 0, 32)]
    teach(model, batch_at, teaching(), task_loss=model.loss, carried=carried)
    assert [part.shape for part in carried.at(1)] == [(BATCH, 0, 16), (BATCH, 0, 32)]


def test_memories_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="at least 1 segment, not 0"):
        CarriedMemory(like(2), 0)
    carried = CarriedMemory(like(2), 5)
    with pytest.raises(ValueError, match="of 2 tensors was expected, not of 1"):
        carried.keep(random_memory([2])[:1])
    wrong = {
        "longer": random_memory([3]),
        "other texts": tuple(part[:1] for part in random_memory([2])),
        "narrower": tuple(part[..., :2] for part in random_memory([2])),
        "without tokens": (torch.zeros(BATCH, 3), random_memory([2])[1]),
    }
    for memory in wrong.values():
        with pytest.raises(ValueError, match=r"tensor 0 of a memory has shape .* room for \(2, 2,"):
            carried.keep(memory)


@pytest.mark.parametrize(("length", "segments"), [(1, 7), (3, 3), (5, 2), (7, 1), (9, 1)])
def test_full_memory_is_the_first_that_stops_growing(length, segments):
    seen = []

    def following(memory):
        seen.append(memory)
        before = memory[0] if memory else torch.zeros(BATCH, 0, 3)
        return (torch.cat((before, torch.ones(BATCH, length, 3)), 1)[:, -7:],)

    [full] = full_memory(following)
    assert full.shape == (BATCH, 7, 3)
    assert seen[0] == ()
    assert len(seen) == segments + 1


def test_full_memory_of_each_model():
    assert [m.shape for m in carried_for(deq())._parts()] == [(BATCH, 7, 16), (BATCH, 7, 32)]
    xl = carried_for(explicit("transformer"))._parts()
    assert [m.shape for m in xl] == [(BATCH, 7, 16)] * 2
    assert [m.shape for m in carried_for(explicit("qrnn"))._parts()] == [
        *((BATCH, 12), (BATCH, 16)),
        (BATCH, 1, 16),
    ]


# Memory in training.


class Watched(DEQTransformer):
    """Notes what it is given and what it leaves."""

    def __init__(self, **options):
        super().__init__(**options)
        self.given, self.left = [], []

    def inject(self, x):
        self.given.append(tuple(part.clone() for part in x.memory))
        return super().inject(x)

    def remember(self, z, context):
        memory = super().remember(z, context)
        self.left.append(tuple(part.clone() for part in memory))
        return memory


def test_an_update_meets_what_the_one_before_it_left():
    model = small_transformer(Watched, dropout=0.2)
    carried = carried_for(model)
    model.given.clear()
    model.left.clear()
    teach(model, batch_at, teaching(), task_loss=model.loss, carried=carried)
    assert len(model.given) == len(model.left) == 10
    for update, memory in enumerate(model.given):
        if update % PERIOD == 0:
            assert memory == ()
            continue
        assert same_tensors(memory, model.left[update - 1])
        # Five tokens after the first segment of a pass, then the full seven.
        assert memory[0].shape[1] == (5 if update % PERIOD == 1 else 7)


@pytest.mark.parametrize("name", EXPLICIT)
def test_an_explicit_model_meets_what_it_left(name):
    model = explicit(name)
    objective = ExplicitTextObjective(model, carried_for(model), seed=3).train()
    memory = None
    for update in range(2 * PERIOD):
        tokens, targets = batch_at(update)
        targets = targets.clone()
        targets[0, update % LENGTH] = -100
        if update % PERIOD == 0:
            memory = None
        with numbered_draws(3, update):
            features, memory = model(tokens, memory)
        logs = model.words.log_probabilities(features.detach())
        counted = targets >= 0
        expected = -logs.gather(-1, targets.clamp_min(0)[..., None])[..., 0][counted].mean()
        loss, shown = objective((tokens, targets), update)
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
        assert shown["task"] == loss.detach()
        following = objective.carried.at(update + 1)
        if (update + 1) % PERIOD == 0:
            assert following == ()
        else:
            assert same_tensors(tuple(following), tuple(memory))
        loss.backward()


@pytest.mark.slow
def test_memory_makes_a_difference_to_what_is_learned():
    ends = []
    for period in (1, PERIOD):  # a pass of one segment never remembers
        model = deq()
        carried = carried_for(model, period)
        teach(model, batch_at, teaching(), task_loss=model.loss, carried=carried)
        ends.append(model.qkv.weight.detach())
    assert not torch.equal(*ends)


class Forgetful(Tanh):
    """Reads segments, and remembers nothing."""

    def inject(self, x):
        return super().inject(x.tokens)


def test_a_model_without_memory_is_refused():
    data = (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="Forgetful has no memory: write remember"):
        teach(Forgetful(), lambda update: data, teaching(), carried=CarriedMemory((), 4))


# Runs that are cut short.


def teaching_run(folder, progress=None, **changes):
    model = deq()
    teach(
        model,
        batch_at,
        teaching(**changes),
        task_loss=model.loss,
        carried=carried_for(model),
        folder=folder,
        progress=progress,
    )
    return model


def explicit_run(name):
    def run(folder, progress=None):
        model = explicit(name)
        objective = ExplicitTextObjective(model, carried_for(model), seed=0).train()
        fit(objective, batch_at, FIT, folder=folder, progress=progress)
        return model

    return run


RUNS = {"deq": teaching_run, **{name: explicit_run(name) for name in EXPLICIT}}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """Each run, not cut, made when first asked for."""
    done = {}

    def of(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            done[name] = (RUNS[name](folder), folder)
        return done[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stop", [2, 4, 7, 10])
def test_a_run_that_was_cut_ends_in_the_same_bytes(whole_runs, tmp_path, name, stop):
    whole, folder = whole_runs(name)
    with pytest.raises(Cut):
        RUNS[name](tmp_path, cut_at(stop))
    saved = read_checkpoint(tmp_path, {})
    # The progress of an update is told before its checkpoint is written.
    assert (0 if saved is None else saved.update) == (stop - 1) // 3 * 3
    if saved is not None:
        assert any("carried.memory_0" in key for key in saved.tensors)
    resumed = RUNS[name](tmp_path)
    assert tensor_bytes(resumed.state_dict()) == tensor_bytes(whole.state_dict())
    # The optimizer's and the memory, too.
    ours, theirs = (read_checkpoint(place, {}).tensors for place in (tmp_path, folder))
    assert tensor_bytes(ours) == tensor_bytes(theirs)


@pytest.mark.slow
def test_a_run_cut_again_and_again_ends_in_the_same_bytes(whole_runs, tmp_path):
    whole, _ = whole_runs("deq")
    for stop in (4, 5, 8):
        with pytest.raises(Cut):
            teaching_run(tmp_path, cut_at(stop))
    resumed = teaching_run(tmp_path)
    assert tensor_bytes(resumed.state_dict()) == tensor_bytes(whole.state_dict())


@pytest.mark.slow
def test_without_its_memory_a_resumed_run_would_end_elsewhere(whole_runs, tmp_path, monkeypatch):
    """The test above can fail: a run that forgets its memory at the cut has other weights."""
    whole, _ = whole_runs("deq")
    with pytest.raises(Cut):
        teaching_run(tmp_path, cut_at(4))
    load = CarriedMemory.at

    def forgetful(self, update):
        return () if update == 3 else load(self, update)

    monkeypatch.setattr(CarriedMemory, "at", forgetful)
    resumed = teaching_run(tmp_path)
    assert not torch.equal(whole.qkv.weight, resumed.qkv.weight)
