"""Recording: what is stored of a solve, inputs of any nesting, and recordings that were cut short."""

import json
from collections import namedtuple
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from builders import Cut, contents, cut_after
from cdeq.solvers import Anderson, Broyden, Picard, solve_model
from cdeq.trajectories import (
    FingerprintMismatch,
    IncompleteStore,
    TrajectoryStore,
    UnsolvedBatch,
    record,
)
from cdeq.trajectories.nesting import flatten, unflatten
from checks import same_tensors, solver_states
from recorded import Affine, D, Pair, batches

both_modes = pytest.mark.parametrize("mode", ["full", "endpoint"])


# Round trips


@pytest.mark.parametrize("solver", [Anderson(window=3), Broyden(), Picard()])
@pytest.mark.parametrize("kind", [Affine, Pair])
@pytest.mark.parametrize("batched", [True, False])
def test_full_states_are_those_of_a_direct_solve(tmp_path, kind, batched, solver):
    model, data = kind(batched), batches()
    store = record(model, data, tmp_path, solver=solver, max_steps=7, batches_per_shard=2)
    assert len(store) == 5
    for batch, (x, y) in zip(store, data, strict=True):
        expected = solver_states(model.eval(), x, 7, solver)
        assert batch.steps == 7
        assert torch.equal(batch.x, x)
        assert torch.equal(batch.y, y)
        assert same_tensors(list(batch.states), expected)
        assert same_tensors([batch.state(k) for k in range(8)], expected)
        assert same_tensors(batch.endpoint, expected[7])
        assert batch.residual.shape == (4 if batched else 1,)
        assert batch.size == batch.residual.numel()


def test_endpoint_is_the_solution_and_its_residual_is_measured(tmp_path):
    model, data = Pair(), batches()
    store = record(model, data, tmp_path, mode="endpoint", max_steps=50)
    for batch, (x, _) in zip(store, data, strict=True):
        found = solve_model(model.eval(), model.inject(x), tol=1e-4, measure="error")
        assert found.converged.all()
        assert same_tensors(batch.endpoint, found.state)
        assert torch.equal(batch.residual, found.residual)
        assert (batch.residual <= 1e-4).all()
        assert batch.states is None
        assert batch.steps == 0
        with pytest.raises(ValueError, match="mode='full'"):
            batch.state(0)


@both_modes
def test_residual_is_that_of_the_stored_endpoint_when_the_budget_runs_out(tmp_path, mode):
    model, data = Affine(scale=1.5), batches(1)
    [batch] = record(model, data, tmp_path, mode=mode, max_steps=3, solver=Picard())
    z = batch.endpoint
    expected = (model.eval().step(z, batch.x) - z).norm(dim=1) / z.norm(dim=1)
    torch.testing.assert_close(batch.residual, expected.detach())


def test_early_convergence_is_padded_with_the_last_state(tmp_path):
    model, data = Affine(), batches(2)
    store = record(model, data, tmp_path, tol=1e-2, max_steps=20)
    for batch in store:
        assert len(batch.states) == 21
        assert same_tensors(batch.state(19), batch.state(20))
        assert not torch.equal(batch.state(0), batch.state(1))
        assert (batch.residual <= 1e-2).all()


@both_modes
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_storage_dtypes(tmp_path, mode, dtype):
    model, data = Pair(), batches(3)
    options = {"mode": mode, "max_steps": 6, "tol": 0.0}
    exact = record(model, data, tmp_path / "exact", **options)
    store = record(model, data, tmp_path / "rounded", dtype=dtype, **options)
    for batch, reference in zip(store, exact, strict=True):
        for a, b in zip(batch.endpoint, reference.endpoint, strict=True):
            assert a.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert torch.equal(a, b.to(dtype).to(a.dtype))
        assert torch.equal(batch.residual, reference.residual)


def test_double_precision_is_kept(tmp_path):
    model = Affine().double()
    data = [(x.double(), y) for x, y in batches(2)]
    store = record(model, data, tmp_path, dtype=torch.float64, max_steps=4)
    expected = solver_states(model.eval(), data[1][0], 4, Anderson())
    assert same_tensors(store[1].state(3), expected[3])


def test_float16_overflow_is_an_error_that_names_bfloat16(tmp_path):
    data = [1e5 * x for x, _ in batches(1)]
    with pytest.raises(OverflowError, match=r"float16.*bfloat16"):
        record(Affine(), data, tmp_path / "a", dtype=torch.float16, max_steps=3)
    record(Affine(), data, tmp_path / "b", dtype=torch.bfloat16, max_steps=3)


@both_modes
@pytest.mark.parametrize("where", ["weights", "input"])
def test_a_teacher_without_finite_numbers_is_refused(tmp_path, mode, where):
    model, data = Affine(), batches(4)
    if where == "weights":
        model.weight.data.fill_(torch.nan)
        message = r"batch 0: .* not finite for 4 of 4 samples, the first of them number 0"
    else:
        data[2][0][1:3] = torch.inf
        message = r"batch 2: .* not finite for 2 of 4 samples, the first of them number 1"
    with pytest.raises(UnsolvedBatch, match=message):
        record(model, data, tmp_path, mode=mode, max_steps=5)
    with pytest.raises(IncompleteStore):
        TrajectoryStore.open(tmp_path)


@both_modes
def test_unconverged_samples_are_kept_and_counted(tmp_path, mode):
    data = batches(5)
    data[1][0].mul_(0.01)  # nearly linear there, so slower
    store = record(
        Affine(scale=1.0), data, tmp_path, mode=mode, max_steps=6, tol=0.0, batches_per_shard=2
    )
    residuals = torch.cat([b.residual for b in store]).sort().values
    assert len(residuals) == 20
    for i in (0, 7, 18):
        assert residuals[i] < residuals[i + 1]
        assert store.unconverged(float(residuals[i])) == (19 - i) / 20
    assert store.unconverged(0.0) == 1.0
    assert store.unconverged(float(residuals[-1])) == 0.0


X = torch.arange(4.0 * D).reshape(4, D)
NESTS = {
    "tensor": X,
    "tuple of three": (X, X[0, 0], X[:, :1]),
    "list of three": [X, X[:0], X > 3],
    "dict": {"b.c": X, "b": {"c": X + 1, "%": None}, "a": [X.long(), (X,)]},
    "one in a list": [X],
}


@pytest.mark.parametrize("x", NESTS.values(), ids=NESTS)
@pytest.mark.parametrize("with_target", [True, False])
def test_inputs_come_back_nested_as_they_were(tmp_path, x, with_target):
    y = torch.arange(4)
    [batch] = record(Affine(), [(x, y) if with_target else (x,)], tmp_path, max_steps=2)
    assert same_tensors(batch.x, x)
    assert same_tensors(batch.y, y if with_target else None)


nests = st.recursive(
    st.none() | st.integers(0, 9).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(".%ab0", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(nests)
def test_flatten_has_an_inverse_and_unique_names(nest):
    structure, table = flatten(nest, "x")
    structure = json.loads(json.dumps(structure))
    used = []
    assert same_tensors(unflatten(structure, "x", lambda n: (used.append(n), table[n])[1]), nest)
    assert sorted(used) == sorted(table)


class Graph(NamedTuple):
    features: torch.Tensor
    adjacency: torch.Tensor


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_graph_comes_back_as_its_own_class_with_its_sparse_matrix(tmp_path):
    graph = Graph(X, torch.eye(4).to_sparse_csr())
    [batch] = record(Affine(batched=False), [graph], tmp_path / "a", max_steps=2)
    assert type(batch.x) is Graph
    assert batch.y is None
    assert torch.equal(batch.x.features, X)
    assert batch.x.adjacency.layout == torch.sparse_csr
    assert torch.equal(batch.x.adjacency.to_dense(), torch.eye(4))
    local = namedtuple("Local", "features")(X)
    [batch] = record(Affine(), [(local, None)], tmp_path / "b", max_steps=2)
    assert type(batch.x).__name__ == "Local"
    assert torch.equal(batch.x.features, X)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_graphs_of_different_sizes_share_a_store(tmp_path):
    graphs = [Graph(torch.randn(n, D), torch.eye(n).to_sparse_csr()) for n in (3, 5)]
    store = record(Affine(batched=False), graphs, tmp_path, max_steps=2)
    for batch, graph in zip(store, graphs, strict=True):
        assert batch.x.adjacency.shape == graph.adjacency.shape
        assert batch.endpoint.shape == graph.features.shape


def test_batches_of_a_dataloader(tmp_path):
    x, y = torch.randn(8, D), torch.arange(8)
    [first, second] = record(
        Affine(), DataLoader(TensorDataset(x, y), batch_size=4), tmp_path / "xy", max_steps=2
    )
    assert torch.equal(torch.cat([first.x, second.x]), x)
    assert torch.equal(torch.cat([first.y, second.y]), y)
    [only] = record(
        Affine(), DataLoader(TensorDataset(x), batch_size=8), tmp_path / "x", max_steps=2
    )
    assert torch.equal(only.x, x)
    assert only.y is None


def test_views_of_one_tensor_and_reused_memory(tmp_path):
    text, memory = torch.randn(1, D + 1), torch.empty(4, D)

    def reusing():
        for i in range(3):
            yield memory.fill_(i)

    [batch] = record(Affine(), [(text[:, :-1], text[:, 1:])], tmp_path / "a", max_steps=2)
    assert torch.equal(batch.y, text[:, 1:])
    store = record(Affine(), reusing(), tmp_path / "b", max_steps=2)
    assert [float(b.x[0, 0]) for b in store] == [0, 1, 2]


def test_an_input_that_cannot_be_stored_is_named(tmp_path):
    for x, message in [
        ({"a": {1: X}}, r"x\.a is a dict"),
        ({"a": "text"}, r"x\.a is of type str"),
        ({"a": X.to_sparse()}, r"x\.a is a torch.sparse_coo tensor"),
    ]:
        with pytest.raises(TypeError, match=message):
            record(Affine(), [x], tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="batch 1 is nested"):
        record(Affine(), [(X, X), X], tmp_path / "b", max_steps=2)


# The call itself


def test_teacher_is_in_evaluation_mode_and_its_modes_are_restored(tmp_path):
    model = Affine().train()
    model.dropout.eval()
    record(model, batches(1), tmp_path / "a", max_steps=3)
    assert model.training
    assert not model.dropout.training
    model.dropout.train()
    [batch] = record(model, batches(1), tmp_path / "b", max_steps=3)
    assert model.dropout.training
    expected = solver_states(Affine().eval(), batches(1)[0][0], 3, Anderson())
    assert same_tensors(batch.state(2), expected[2])
    assert not batch.endpoint.requires_grad
    with pytest.raises(RuntimeError):
        record(model, [torch.randn(3, D + 1)], tmp_path / "c", max_steps=3)
    assert model.training


def test_progress_and_max_batches(tmp_path):
    seen = []
    taken = iter(batches(9))
    store = record(
        Affine(),
        taken,
        tmp_path / "a",
        max_steps=2,
        max_batches=3,
        progress=lambda *a: seen.append(a),
    )
    assert len(store) == 3
    assert len(list(taken)) == 6
    assert seen == [(1, None, {}), (2, None, {}), (3, None, {})]
    seen.clear()
    record(Affine(), batches(2), tmp_path / "b", max_steps=2, progress=lambda *a: seen.append(a))
    assert seen == [(1, 2, {}), (2, 2, {})]


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path):
    folder = tmp_path / "new"
    for options, name in [
        ({"mode": "half"}, "mode"),
        ({"dtype": torch.int8}, "dtype"),
        ({"max_steps": 0}, "max_steps"),
        ({"batches_per_shard": 0}, "batches_per_shard"),
        ({"max_batches": 0}, "max_batches"),
    ]:
        with pytest.raises(ValueError, match=name):
            record(Affine(), batches(1), folder, **options)
    with pytest.raises(TypeError, match="no inject"):
        record(nn.Linear(2, 2), batches(1), folder)
    with pytest.raises(TypeError, match="not a dataclass"):
        record(Affine(), batches(1), folder, solver=object())
    assert not folder.exists()
    with pytest.raises(ValueError, match="no batches"):
        record(Affine(), [], folder)


# Resuming


@pytest.mark.slow
def test_a_resumed_recording_is_the_same_byte_for_byte(tmp_path):
    data = [({"x": x, "more": [x, (y,)]}, y) for x, y in batches(7)]
    options = {"max_steps": 5, "batches_per_shard": 2}
    record(Pair(), data, tmp_path / "whole", **options)
    expected = contents(tmp_path / "whole")
    assert sorted(expected) == ["manifest.json", *(f"shard-0000{i}.safetensors" for i in range(4))]
    for count in range(7):
        folder = tmp_path / f"cut{count}"
        with pytest.raises(Cut):
            record(Pair(), cut_after(data, count), folder, **options)
        with pytest.raises(IncompleteStore, match=f"{count // 2} shards.*call record again"):
            TrajectoryStore.open(folder)
        for name in ("shard-00003.safetensors", "manifest.json"):
            (folder / f"{name}.89abcdef.tmp").touch()
        model = Pair()
        record(model, data, folder, **options)
        assert contents(folder) == expected
        # Five steps and one to measure the endpoint, for each batch that was not finished.
        assert model.calls == 6 * (7 - count // 2 * 2)


def test_a_complete_folder_is_returned_at_once(tmp_path):
    record(Affine(), batches(), tmp_path, max_steps=2)
    before = contents(tmp_path)
    store = record(Affine(), cut_after(batches(), 0), tmp_path, max_steps=2)
    assert len(store) == 5
    assert contents(tmp_path) == before


def test_resuming_with_other_data_names_the_first_other_shard(tmp_path):
    options = {"max_steps": 2, "batches_per_shard": 2}
    with pytest.raises(Cut):
        record(Affine(), cut_after(batches(9), 7), tmp_path, **options)
    before = contents(tmp_path)
    changed = batches(9)
    changed[2], changed[3] = changed[3], changed[2]
    for loader, shard in [(changed, 1), (batches(4), 2), (batches(5), 2), (batches(9, seed=2), 0)]:
        with pytest.raises(FingerprintMismatch, match=f"shard-0000{shard}.*same order"):
            record(Affine(), loader, tmp_path, **options)
        assert contents(tmp_path) == before
    assert len(record(Affine(), batches(9), tmp_path, **options)) == 9


def test_a_single_batch_is_not_a_loader(tmp_path):
    with pytest.raises(TypeError, match=r"is one batch: give a loader, or a list of batches"):
        record(Affine(), torch.ones(3, 2), tmp_path)
