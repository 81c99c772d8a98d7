"""Memory in recordings and in distillation: what is stored, what a student meets, and runs resumed to the bit."""

from typing import ClassVar

import pytest
import torch

from builders import Cut, contents, cut_at
from cdeq import FitConfig, TrajectoryStore, distill, record
from cdeq.consistency.objective import DistillationObjective
from cdeq.consistency.recipes import Recipe
from cdeq.consistency.student import Student
from cdeq.equilibrium.memory import Remembering, Segment, require_memory
from cdeq.models.text.deq_transformer import DEQTransformer
from cdeq.models.text.transformer import TransformerDEQ
from cdeq.solvers import solve_model
from cdeq.trajectories.manifest import FingerprintMismatch, IncompleteStore
from checks import same_tensors
from teachers import Tanh, batches, randomized, small_transformer

WORDS, WIDTH, BATCH, LENGTH, MEMORY, COUNT = 50, 16, 2, 5, 7, 6
STEPS = 8
FIT = FitConfig(updates=4, checkpoint_every=2, log_every=1, learning_rate=1e-2)


def build(kind=DEQTransformer):
    return small_transformer(kind).eval().requires_grad_(False)


def segments(count=COUNT, seed=0):
    draw = torch.Generator().manual_seed(seed)
    pairs = [torch.randint(WORDS, (2, BATCH, LENGTH), generator=draw) for _ in range(count)]
    return [(tokens, targets) for tokens, targets in pairs]


def recorded(folder, model=None, data=None, **changes):
    options = {"mode": "endpoint", "max_steps": STEPS, "batches_per_shard": 2, "carried": True}
    return record(model or build(), data or segments(), folder, **{**options, **changes})


# Which models remember.


def test_models_with_and_without_memory_are_told_apart():
    model = build()
    assert require_memory(model) is model
    assert isinstance(model, Remembering)
    for other in (Tanh(), TransformerDEQ(vocabulary=WORDS, width=16, heads=2, inner=8)):
        assert not isinstance(other, Remembering)
        with pytest.raises(TypeError, match=f"{type(other).__name__} has no memory: .*no_memory"):
            require_memory(other)


# Recording.


@pytest.mark.parametrize("mode", ["endpoint", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_a_batch_has_the_memory_that_the_one_before_it_leaves(tmp_path, mode, dtype):
    model = build()
    store = recorded(tmp_path, model, mode=mode, dtype=dtype)
    memory = model.no_memory(BATCH)
    for batch, (tokens, targets) in zip(store, segments(), strict=True):
        assert isinstance(batch.x, Segment)
        assert torch.equal(batch.x.tokens, tokens)
        assert torch.equal(batch.y, targets)
        assert same_tensors(batch.x.memory, memory)
        context = model.inject(batch.x)
        if mode == "endpoint":
            z = solve_model(model, context, tol=1e-4, max_steps=STEPS, measure="error").state
            assert torch.equal(batch.endpoint.to(z.dtype), z.to(dtype).to(z.dtype))
        memory = model.remember(batch.endpoint.to(torch.float32), context)
    assert memory[0].shape == (BATCH, MEMORY, WIDTH)
    assert [b.x.memory[0].shape[1] for b in store] == [0, 5, 7, 7, 7, 7]


def test_recorded_memory_changes_the_equilibria(tmp_path):
    carried = recorded(tmp_path / "carried")
    alone = recorded(tmp_path / "alone", carried=False)
    assert isinstance(alone[1].x, torch.Tensor)
    assert torch.equal(carried[0].endpoint, alone[0].endpoint)
    for i in range(1, COUNT):
        assert not torch.isclose(carried[i].endpoint, alone[i].endpoint).all()


def test_a_float64_model_keeps_its_precision(tmp_path):
    model = build().double()
    store = recorded(tmp_path, model, dtype=torch.float64)
    assert {part.dtype for part in store[2].x.memory} == {torch.float64}
    context = model.inject(store[1].x)
    assert same_tensors(store[2].x.memory, model.remember(store[1].endpoint, context))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "dtype", "mode", "stops"),
    [
        (torch.float32, torch.float32, "endpoint", range(1, COUNT + 1)),
        (torch.float32, torch.bfloat16, "endpoint", range(2, COUNT)),
        (torch.float32, torch.float32, "full", (2, 5)),
        (torch.float32, torch.bfloat16, "full", (2, 5)),
        # A store of another precision than the model's, either way.
        (torch.float32, torch.float64, "endpoint", (3,)),
        (torch.float64, torch.float32, "endpoint", (3,)),
        (torch.bfloat16, torch.float32, "endpoint", (3,)),
    ],
)
def test_a_resumed_recording_is_the_same_byte_for_byte(tmp_path, own, dtype, mode, stops):
    options = {"mode": mode, "dtype": dtype}
    recorded(tmp_path / "whole", build().to(own), **options)
    expected = contents(tmp_path / "whole")
    assert len(expected) == 1 + COUNT // 2
    for stop in stops:
        folder = tmp_path / f"cut{stop}"
        with pytest.raises(Cut):
            recorded(folder, build().to(own), progress=cut_at(stop), **options)
        with pytest.raises(IncompleteStore, match=f"{stop // 2} shards"):
            TrajectoryStore.open(folder)
        recorded(folder, build().to(own), **options)
        assert contents(folder) == expected, stop


def test_dropout_has_no_part_in_a_resumed_recording(tmp_path):
    def model():
        return small_transformer(dropout=0.5).train()

    recorded(tmp_path / "whole", model())
    with pytest.raises(Cut):
        recorded(tmp_path / "cut", model(), progress=cut_at(3))
    recorded(tmp_path / "cut", model())
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_recording_cut_at_every_shard_is_the_same(tmp_path):
    recorded(tmp_path / "whole")

    for stop in (3, 5, 6):
        with pytest.raises(Cut):
            recorded(tmp_path / "cut", progress=cut_at(stop))
    recorded(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("first", [True, False])
def test_another_setting_of_memory_on_the_same_folder_is_refused(tmp_path, first):
    recorded(tmp_path, carried=first)
    before = contents(tmp_path)
    with pytest.raises(FingerprintMismatch, match="another memory") as refusal:
        recorded(tmp_path, carried=not first)
    assert refusal.value.parts == ("memory",)
    assert contents(tmp_path) == before


def test_check_compares_the_text_without_its_memory(tmp_path):
    model = build()
    store = recorded(tmp_path, model)
    store.check(teacher=model, loader=segments())
    changed = segments()
    changed[3][0][0, 0] = (changed[3][0][0, 0] + 1) % WORDS
    with pytest.raises(FingerprintMismatch, match="shard-00001"):
        store.check(loader=changed)
    with pytest.raises(FingerprintMismatch, match="shard-00002"):
        store.check(loader=segments()[:4])


def test_resuming_with_another_text_is_refused(tmp_path):
    with pytest.raises(Cut):
        recorded(tmp_path, progress=cut_at(3))
    with pytest.raises(FingerprintMismatch, match="shard-00000"):
        recorded(tmp_path, data=segments(seed=1))


def test_models_and_inputs_without_memory_are_refused(tmp_path):
    with pytest.raises(TypeError, match="Tanh has no memory: write remember"):
        record(Tanh(), batches(), tmp_path / "a", carried=True)
    assert not (tmp_path / "a").exists()
    nested = [(Segment(tokens), targets) for tokens, targets in segments()]
    with pytest.raises(ValueError, match=r"batch 0: with carried=True .* not a Segment"):
        recorded(tmp_path / "b", data=nested)
    uneven = segments()
    uneven[2] = tuple(part[:1] for part in uneven[2])
    with pytest.raises(ValueError, match="not of this model and 1 texts"):
        recorded(tmp_path / "c", data=uneven)


def test_parts_and_the_batch_before(tmp_path):
    store = recorded(tmp_path)
    assert store[0].before() is None
    before = store[3].before()
    assert before.index == 2
    assert torch.equal(before.endpoint, store[2].endpoint)
    half = store[3].part(1, 2)
    assert torch.equal(half.x.tokens, store[3].x.tokens[1:])
    assert same_tensors(half.x.memory, tuple(part[1:] for part in store[3].x.memory))
    assert torch.equal(half.before().x.tokens, store[2].x.tokens[1:])
    moved = store[3].to(torch.device("cpu"), torch.float64).before()
    assert moved.endpoint.dtype == torch.float64


# A student's memory.


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    root = tmp_path_factory.mktemp("stores")
    return {mode: recorded(root / mode, mode=mode) for mode in ("endpoint", "full")}


class Inputs(DEQTransformer):
    """A teacher that notes the segments it reads."""

    seen: ClassVar[list] = []  # shared with the copies that students are made of

    def inject(self, x):
        self.seen.append(x)
        return super().inject(x)


def objective_of(store, recipe="anchored", seed=0, teacher=None, **changes):
    recipe = Recipe.from_name(recipe, **changes)
    torch.manual_seed(0)
    teacher = teacher or build()
    student = Student.for_example(teacher, recipe, store[0].x)
    return DistillationObjective(randomized(student, 0.05).train(), teacher.loss, seed)


def drawn_steps(objective, batch, update):
    """After how many steps of the student the memory is what the objective takes; exactly one number."""
    student, before = objective.student, batch.before()
    found = objective._input(batch, update).memory
    prepared = student.prepare(before.x)
    with torch.no_grad():
        left = [
            student.teacher.remember(list(student.rollout(prepared, k))[-1], prepared.base)
            for k in range(objective.recipe.depth + 1)
        ]
    same = [k for k, memory in enumerate(left) if same_tensors(memory, found)]
    assert len(same) == 1
    return same[0]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "mode"), [("anchored", "endpoint"), ("paper", "full")])
def test_own_memory_is_what_the_student_leaves_of_the_segment_before(stores, recipe, mode):
    store = stores[mode]
    objective = objective_of(store, recipe, memory="own", depth=4)
    batch = store[3]
    x = objective._input(batch, 0)
    assert isinstance(x, Segment)
    assert torch.equal(x.tokens, batch.x.tokens)
    assert not same_tensors(x.memory, batch.x.memory)
    assert not any(part.requires_grad for part in x.memory)
    assert [part.shape for part in x.memory] == [part.shape for part in batch.x.memory]
    # Of the two tokens that the segment before remembered itself, the teacher's states remain.
    assert torch.equal(x.memory[0][:, :2], batch.x.memory[0][:, :2])
    assert not torch.isclose(x.memory[0][:, 2:], batch.x.memory[0][:, 2:]).all(-1).any()
    drawn = {drawn_steps(objective, batch, update) for update in range(16)}
    assert drawn == {1, 2, 3, 4}


@pytest.mark.slow
def test_the_draws_depend_on_seed_and_update_alone(stores):
    store = stores["endpoint"]
    objective = objective_of(store, memory="own", depth=4)
    numbers = [drawn_steps(objective, store[1], update) for update in range(8)]
    torch.manual_seed(99)
    again = objective_of(store, memory="own", depth=4)
    backwards = [drawn_steps(again, store[4], update) for update in reversed(range(8))]
    assert backwards[::-1] == numbers
    other = objective_of(store, memory="own", depth=4, seed=1)
    assert [drawn_steps(other, store[1], update) for update in range(8)] != numbers


def test_the_first_batch_keeps_its_own_memory(stores):
    store = stores["endpoint"]
    objective = objective_of(store, memory="own")
    x = objective._input(store[0], 5)
    assert same_tensors(x, store[0].x)


def test_the_teachers_memory_is_the_recorded_one(stores):
    store = stores["endpoint"]
    objective = objective_of(store)
    for batch in store:
        assert objective._input(batch, 0) is batch.x


@pytest.mark.parametrize(("recipe", "mode"), [("anchored", "endpoint"), ("paper", "full")])
@pytest.mark.parametrize("memory", ["own", "teacher"])
def test_the_loss_is_taken_with_that_memory(stores, recipe, mode, memory):
    """The student is given the segment with the memory of the recipe, and no other."""
    store = stores[mode]
    changes = {"memory": memory} if memory == "own" else {}
    objective = objective_of(store, recipe, teacher=build(Inputs), **changes)
    batch = store[2]
    expected = objective._input(batch, 3)
    Inputs.seen.clear()
    loss, _ = objective(batch, 3)
    read = [x for x in Inputs.seen if torch.equal(x.tokens, batch.x.tokens)]
    assert read
    assert all(same_tensors(x.memory, expected.memory) for x in read)
    others = [x for x in Inputs.seen if not torch.equal(x.tokens, batch.x.tokens)]
    assert bool(others) == (memory == "own")
    assert all(torch.equal(x.tokens, store[1].x.tokens) for x in others)
    loss.backward()
    assert any(bool(p.grad.any()) for p in objective.student.deltas.parameters())


def test_no_gradient_passes_through_own_memory(stores):
    """The memory is data: its loss has the gradient of the same memory written down."""
    store = stores["endpoint"]
    grads = []
    for written in (False, True):
        objective = objective_of(store, memory="own")
        batch = store[2]
        if written:
            x = objective._input(batch, 1)
            objective._input = lambda batch, update, x=x: x
        objective(batch, 1)[0].backward()
        grads.append([p.grad for p in objective.student.deltas.parameters()])
    assert same_tensors(*grads)


def test_own_memory_of_a_model_without_memory_is_refused(tmp_path):
    recipe = Recipe.from_name("anchored", memory="own")
    assert recipe.memory == "own"
    # Also where a store has one batch only, before which there is none.
    for count in (1, 3):
        with pytest.raises(TypeError, match="Tanh has no memory: write remember"):
            distill(Tanh(), batches(count), recipe=recipe, fit=FitConfig(updates=2))


def test_own_memory_of_inputs_without_memory_is_refused(tmp_path, stores):
    store = recorded(tmp_path, carried=False)
    with pytest.raises(ValueError, match=r"memory='own' needs .* record them with carried=True"):
        distill(
            build(),
            store,
            recipe=Recipe.from_name("anchored", memory="own"),
            fit=FitConfig(updates=2),
        )


@pytest.mark.parametrize("count", [-1, 0, 1])
def test_depth_has_a_meaning_with_own_memory(count):
    if count < 1:
        with pytest.raises(ValueError, match="depth must be at least 1"):
            Recipe.from_name("paper", memory="own", depth=count)
    else:
        assert Recipe.from_name("paper", memory="own", depth=count).depth == 1
    with pytest.raises(ValueError, match="depth makes no difference"):
        Recipe.from_name("paper", depth=3)
    with pytest.raises(ValueError, match="memory='other' is not one of"):
        Recipe.from_name("paper", memory="other")


# Distilling.


def distilled(store, recipe, folder=None, config=FIT, seed=0):
    teacher = build()
    return distill(
        teacher,
        store,
        recipe=recipe,
        fit=config,
        folder=folder,
        task_loss=teacher.loss,
        seed=seed,
    )


RECIPES = {
    "anchored, teacher": ("endpoint", Recipe.from_name("anchored", depth=3)),
    "anchored, own": ("endpoint", Recipe.from_name("anchored", memory="own", depth=3)),
    "paper, teacher": ("full", Recipe.from_name("paper")),
    "paper, own": ("full", Recipe.from_name("paper", memory="own", depth=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_distilling_resumes_to_the_same_weights(stores, no_plan, monkeypatch, tmp_path, name):
    mode, recipe = RECIPES[name]
    whole = distilled(stores[mode], recipe)
    assert any(bool(delta.any()) for delta in whole.deltas())
    forward = DistillationObjective.forward

    for stop in (1, 3):

        def fatal(self, batch, update, stop=stop):
            if update == stop:
                raise Cut
            return forward(self, batch, update)

        folder = tmp_path / str(stop)
        with monkeypatch.context() as patch:
            patch.setattr(DistillationObjective, "forward", fatal)
            with pytest.raises(Cut):
                distilled(stores[mode], recipe, folder)
        again = distilled(stores[mode], recipe, folder)
        assert same_tensors(again.state_dict(), whole.state_dict())


def test_the_memory_makes_a_difference(stores, no_plan):
    ends = [distilled(stores["endpoint"], RECIPES[f"anchored, {m}"][1]) for m in ("teacher", "own")]
    assert not same_tensors(*(student.state_dict() for student in ends))


def test_students_read_a_text_with_their_own_memory(stores):
    """Segment after segment; its training ends with the plan for certified solving, on segments with memory."""
    student = distilled(stores["endpoint"], RECIPES["anchored, own"][1])
    assert student.plan
    memory = ()
    for tokens, _ in segments():
        x = Segment(tokens, memory)
        with torch.no_grad():
            prepared = student.prepare(x)
            *_, z = student.rollout(prepared, 2)
        memory = student.teacher.remember(z, prepared.base)
        assert bool(z.isfinite().all())
    assert memory[0].shape == (BATCH, MEMORY, WIDTH)


def test_a_saved_student_of_a_model_with_memory_comes_back(stores, no_plan, tmp_path):
    student = distilled(stores["endpoint"], RECIPES["anchored, own"][1])
    student.save(tmp_path)
    loaded = Student.load(tmp_path)
    assert loaded.recipe.memory == "own"
    x = stores["endpoint"][2].x
    assert torch.equal(loaded(x, steps=2), student(x, steps=2))
