"""Recording, the store on disk, and endpoint augmentation."""

import json
import pickle
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cdeq.equilibrium import from_functions
from cdeq.solvers import Anderson, Broyden, Picard, solve_model
from cdeq.trajectories import (
    DamagedStore,
    FingerprintMismatch,
    IncompleteStore,
    StoreError,
    TrajectoryStore,
    UnsolvedBatch,
    augment_endpoints,
    record,
)
from cdeq.trajectories.nesting import flatten, unflatten

D = 5


class Affine(nn.Module):
    """f(z, x) = tanh(z W) + x, a contraction; dropout shows whether it is in evaluation mode."""

    def __init__(self, batched=True, scale=0.4, seed=0):
        super().__init__()
        self.batched = batched
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(D, D, generator=generator) * scale / D**0.5)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def inject(self, x):
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return x

    def start(self, context):
        return torch.zeros_like(context)

    def step(self, z, context):
        self.calls += 1
        return self.dropout(torch.tanh(z @ self.weight) + context)

    def readout(self, z, context):
        return z


class Pair(Affine):
    """A state of two tensors of different shapes."""

    def start(self, context):
        return torch.zeros_like(context), context.new_zeros(*context.shape[:-1], 2)

    def step(self, z, context):
        a, b = z
        return super().step(a, context) + 0.1 * b.sum(-1, keepdim=True), 0.5 * b + a[..., :2]


def batches(count=5, size=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, D, generator=generator), torch.randint(9, (size,), generator=generator))
        for _ in range(count)
    ]


def direct(model, x, steps, solver=None):
    states = []
    model.eval()
    with torch.no_grad():
        solve_model(
            model,
            model.inject(x),
            solver or Anderson(),
            tol=0.0,
            max_steps=steps,
            callback=lambda k, z: states.append(z),
        )
    return states


def parts(state):
    return (state,) if isinstance(state, torch.Tensor) else state


def same(left, right):
    assert type(left) is type(right)
    assert all(torch.equal(a, b) for a, b in zip(parts(left), parts(right), strict=True))


def contents(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


# Round trips


@pytest.mark.parametrize("solver", [Anderson(window=3), Broyden(), Picard()])
@pytest.mark.parametrize("kind", [Affine, Pair])
@pytest.mark.parametrize("batched", [True, False])
def test_full_states_are_those_of_a_direct_solve(tmp_path, kind, batched, solver):
    model, data = kind(batched), batches()
    store = record(model, data, tmp_path, solver=solver, max_steps=7, batches_per_shard=2)
    assert len(store) == 5
    for batch, (x, y) in zip(store, data, strict=True):
        expected = direct(model, x, 7, solver)
        assert batch.steps == 7
        assert torch.equal(batch.x, x)
        assert torch.equal(batch.y, y)
        for k, state in enumerate(batch.states):
            same(state, expected[k])
            same(batch.state(k), expected[k])
        same(batch.endpoint, expected[7])
        assert batch.residual.shape == (4 if batched else 1,)
        assert batch.size == batch.residual.numel()


def test_endpoint_is_the_solution_and_its_residual_is_measured(tmp_path):
    model, data = Pair(), batches()
    store = record(model, data, tmp_path, mode="endpoint", max_steps=50)
    for batch, (x, _) in zip(store, data, strict=True):
        solution = solve_model(model.eval(), x, Anderson(), tol=1e-4, max_steps=50)
        same(batch.endpoint, tuple(t.detach() for t in solution.state))
        assert (batch.residual <= 1e-4).all()
        assert batch.states is None
        assert batch.steps == 0
        with pytest.raises(ValueError, match="mode='full'"):
            batch.state(0)


@pytest.mark.parametrize("mode", ["full", "endpoint"])
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
        same(batch.state(19), batch.state(20))
        assert not torch.equal(batch.state(0), batch.state(1))
        assert (batch.residual <= 1e-2).all()


@pytest.mark.parametrize("mode", ["full", "endpoint"])
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
    same(store[1].state(3), direct(model, data[1][0], 4)[3])


def test_float16_overflow_is_an_error_that_names_bfloat16(tmp_path):
    data = [1e5 * x for x, _ in batches(1)]
    with pytest.raises(OverflowError, match=r"float16.*bfloat16"):
        record(Affine(), data, tmp_path / "a", dtype=torch.float16, max_steps=3)
    record(Affine(), data, tmp_path / "b", dtype=torch.bfloat16, max_steps=3)


@pytest.mark.parametrize("mode", ["full", "endpoint"])
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


@pytest.mark.parametrize("mode", ["full", "endpoint"])
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


def test_sizes_of_batches(tmp_path):
    data = [x for size in (4, 3, 4, 1, 2) for x, _ in batches(1, size=size)]
    store = record(Affine(), data, tmp_path / "a", max_steps=2, batches_per_shard=2)
    assert store.sizes() == [4, 3, 4, 1, 2] == [b.size for b in store]
    whole = record(Affine(batched=False), data, tmp_path / "b", max_steps=2)
    assert whole.sizes() == [1] * 5


def test_sizes_and_residuals_are_read_without_the_rest(folder, monkeypatch):
    def never(path):
        raise AssertionError("read a whole shard")

    monkeypatch.setattr("cdeq.trajectories.store.sha256_of_file", never)
    store = TrajectoryStore.open(folder)
    assert store.sizes() == [4] * 5
    assert 0 <= store.unconverged(1e-3) <= 1
    (folder / "shard-00001.safetensors").unlink()
    with pytest.raises(DamagedStore, match="shard-00001"):
        store.sizes()


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
    assert nest_equal(batch.x, x)
    assert nest_equal(batch.y, y if with_target else None)


def nest_equal(a, b):
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, dict):
        return list(a) == list(b) and all(nest_equal(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        pairs = zip(a, b, strict=True)
        return type(a) is type(b) and all(nest_equal(*pair) for pair in pairs)
    return a is b


nests = st.recursive(
    st.none() | st.integers(0, 9).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(".%ab0", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(nests)
def test_flatten_has_an_inverse_and_unique_names(nest):
    structure, table = flatten(nest, "x")
    structure = json.loads(json.dumps(structure))
    used = []
    assert nest_equal(unflatten(structure, "x", lambda n: (used.append(n), table[n])[1]), nest)
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
    same(batch.state(2), direct(Affine(), batches(1)[0][0], 3)[2])
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
    assert seen == [(1, None), (2, None), (3, None)]
    seen.clear()
    record(Affine(), batches(2), tmp_path / "b", max_steps=2, progress=lambda *a: seen.append(a))
    assert seen == [(1, 2), (2, 2)]


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


# Reading


def test_sequence_protocol_and_pickling(tmp_path):
    store = record(Affine(), batches(5), tmp_path, max_steps=2, batches_per_shard=2)
    assert [b.index for b in store] == [0, 1, 2, 3, 4]
    assert store[-1].index == 4
    for index in (5, -6):
        with pytest.raises(IndexError, match="store of 5"):
            store[index]
    for k in (-1, 3):
        with pytest.raises(IndexError, match=r"z_0 ... z_2"):
            store[0].state(k)
    copy = pickle.loads(pickle.dumps(store))
    assert torch.equal(copy[3].x, store[3].x)


def test_what_was_read_is_kept_and_belongs_to_the_reader(tmp_path):
    store = record(Affine(), batches(1), tmp_path, max_steps=2)
    batch = store[0]
    assert batch.x is batch.x
    assert batch.state(1) is batch.state(1)
    before = batch.state(1).clone()
    batch.state(1).add_(1)
    batch.x.zero_()
    assert torch.equal(store[0].state(1), before)
    assert torch.equal(store[0].x, batches(1)[0][0])


def test_only_the_state_asked_for_is_read(tmp_path):
    """Of the mapped shard, 32 states of 1 MB, only the pages around one state become resident."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc/self/smaps")
    model = from_functions(lambda z, c: 0.5 * z + c)
    record(model, [torch.ones(256, 1024)], tmp_path, max_steps=31, solver=Picard())
    shard = tmp_path / "shard-00000.safetensors"
    batch = TrajectoryStore.open(tmp_path, verify=False)[0]
    assert resident(shard) is None
    batch.state(15)
    # The system maps pages in runs of up to a few MB.
    assert 1024 <= resident(shard) <= 12 * 1024
    assert len(batch.states) == 32
    assert resident(shard) >= 32 * 1024


def resident(path):
    """Kilobytes of a mapped file that this process holds in memory; None if it is not mapped."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    sizes = []
    for line in lines:
        if line.endswith(str(path)):
            sizes.append(int(next(row for row in lines if row.startswith("Rss:")).split()[1]))
    return sum(sizes) if sizes else None


def test_parts_of_a_batch(tmp_path):
    shared = torch.arange(3)
    data = [({"x": x, "shared": shared, "scalar": x[0, 0]}, y) for x, y in batches(2, size=6)]
    for kind in (Affine, Pair):
        store = record(kind(), data, tmp_path / kind.__name__, max_steps=3)
        whole = store[1]
        pieces = [store[1].part(rank, 3) for rank in range(3)]
        assert [p.size for p in pieces] == [2, 2, 2]
        assert torch.equal(torch.cat([p.x["x"] for p in pieces]), whole.x["x"])
        assert torch.equal(torch.cat([p.y for p in pieces]), whole.y)
        assert torch.equal(torch.cat([p.residual for p in pieces]), whole.residual)
        assert torch.equal(pieces[1].x["shared"], shared)
        assert torch.equal(pieces[1].x["scalar"], whole.x["scalar"])
        for k in range(4):
            rows = zip(*(parts(p.state(k)) for p in pieces), strict=True)
            joined = [torch.cat(r) for r in rows]
            assert all(map(torch.equal, joined, parts(whole.state(k))))
        inner = whole.part(1, 2).part(2, 3)
        assert torch.equal(inner.x["x"], whole.x["x"][5:6])


def test_parts_of_endpoints(tmp_path):
    store = record(Pair(), batches(1), tmp_path, mode="endpoint")
    second = store[0].part(1, 2)
    assert all(
        torch.equal(a, b[2:]) for a, b in zip(second.endpoint, store[0].endpoint, strict=True)
    )


def test_parts_that_cannot_be_are_refused_by_name(tmp_path):
    store = record(Affine(), batches(1), tmp_path / "a", max_steps=2)
    with pytest.raises(ValueError, match=r"batch 0 of .*a has 4 samples, which 3 processes"):
        store[0].part(0, 3)
    with pytest.raises(ValueError, match="rank must be from 0 to 1"):
        store[0].part(2, 2)
    store = record(Affine(batched=False), batches(1), tmp_path / "b", max_steps=2)
    with pytest.raises(ValueError, match="no batch axis"):
        store[0].part(0, 2)


# Fingerprints


def test_another_recording_in_the_folder_is_refused_part_by_part(tmp_path):
    base = {"solver": Anderson(), "max_steps": 4, "batches_per_shard": 2}
    record(Affine(), batches(), tmp_path, **base)
    before = contents(tmp_path)
    for model, options, part, values in [
        (Affine(seed=9), {}, "teacher", "sha256"),
        (Pair(), {}, "teacher", "recorded 'Affine', given 'Pair'"),
        (Affine().double(), {}, "teacher", "sha256"),
        (Affine(), {"solver": Anderson(window=2)}, "solver", "window: recorded 5, given 2"),
        (Affine(), {"solver": Picard()}, "solver", "recorded 'Anderson', given 'Picard'"),
        (Affine(), {"max_steps": 5}, "solver", "max_steps: recorded 4, given 5"),
        (Affine(), {"tol": 0.5}, "solver", "tol: recorded 0.0, given 0.5"),
        (Affine(), {"dtype": torch.float16}, "dtype", "recorded 'float32', given 'float16'"),
        (Affine(), {"mode": "endpoint", "tol": 0.0}, "mode", "recorded 'full', given 'endpoint'"),
        (Affine(False), {}, "batched", "recorded True, given False"),
        (Affine(), {"batches_per_shard": 3}, "batches_per_shard", "recorded 2, given 3"),
        (Affine(), {"max_batches": 3}, "max_batches", "recorded None, given 3"),
    ]:
        with pytest.raises(FingerprintMismatch, match=f"another {part}") as caught:
            record(model, batches(), tmp_path, **(base | options))
        assert caught.value.parts == (part,)
        assert values in str(caught.value)
        assert "manifest.json" in str(caught.value)
        assert contents(tmp_path) == before


def test_check_compares_teacher_and_data(tmp_path):
    store = record(Affine(), batches(), tmp_path, max_steps=2, batches_per_shard=2)
    store.check()
    store.check(teacher=Affine(), loader=batches())
    with pytest.raises(FingerprintMismatch, match="another teacher"):
        store.check(teacher=Affine(seed=1))
    changed = batches()
    changed[3][1][0] += 1
    for loader, shard in [(changed, 1), (batches(4), 2), (batches(7), 2), (batches(8)[::-1], 0)]:
        with pytest.raises(FingerprintMismatch, match=f"shard-0000{shard}") as caught:
            store.check(loader=loader)
        assert caught.value.parts == ("data",)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
def test_teacher_fingerprint_sees_sparse_buffers(tmp_path):
    for layout in (
        *(torch.sparse_coo, torch.sparse_csr, torch.sparse_csc),
        *(torch.sparse_bsr, torch.sparse_bsc),
    ):
        blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}

        def graph(value, layout=layout, blocks=blocks):
            model = Affine()
            matrix = (torch.eye(4) * value).to_sparse(layout=layout, **blocks)
            model.register_buffer("adjacency", matrix)
            return model

        store = record(graph(1.0), batches(1), tmp_path / str(layout), max_steps=2)
        store.check(teacher=graph(1.0))
        with pytest.raises(FingerprintMismatch, match="teacher"):
            store.check(teacher=graph(2.0))


# Resuming


class Cut(Exception):
    pass


def cut_after(data, count):
    for i, batch in enumerate(data):
        if i == count:
            raise Cut
        yield batch


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


# Damage


@pytest.fixture
def folder(tmp_path):
    record(Affine(), batches(5), tmp_path, max_steps=3, batches_per_shard=2)
    return tmp_path


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_missing_or_truncated_shard_is_named(folder, damage, verify):
    shard = folder / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    if damage != "missing":
        shard.write_bytes(content[:-1] if damage == "truncated" else b"")
    with pytest.raises(DamagedStore, match=r"shard-00001.safetensors .*record it again"):
        TrajectoryStore.open(folder, verify=verify)
    with pytest.raises(DamagedStore, match=r"shard-00001.safetensors"):
        record(Affine(), batches(5), folder, max_steps=3, batches_per_shard=2)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_a_shard_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "flipped"
    record(Affine(), batches(2, size=2), folder, max_steps=2, batches_per_shard=1)
    shard = folder / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    original = shard.read_bytes()
    try:
        shard.write_bytes(content)
        store = TrajectoryStore.open(folder)
        assert store[0].size == 2
        with pytest.raises(
            DamagedStore, match=r"shard-00001.safetensors is not as it was recorded"
        ):
            store[1].state(0)
    finally:
        shard.write_bytes(original)


def test_a_broken_header_is_named_without_verification_too(folder):
    shard = folder / "shard-00000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(b"\xff" * 100 + content[100:])
    with pytest.raises(DamagedStore, match=r"shard-00000.safetensors"):
        TrajectoryStore.open(folder, verify=False)[0].state(0)


def test_a_shard_deleted_after_opening_is_named(folder):
    store = TrajectoryStore.open(folder)
    (folder / "shard-00000.safetensors").unlink()
    with pytest.raises(DamagedStore, match=r"shard-00000.safetensors"):
        store[0].x.sum()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"format": 2}', '{"format": 2, "shards": 3}', b"\xff\xfe", "null"],
)
def test_a_broken_manifest_is_named(folder, text):
    (folder / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for call in (
        lambda: TrajectoryStore.open(folder),
        lambda: record(Affine(), batches(5), folder, max_steps=3, batches_per_shard=2),
    ):
        with pytest.raises(DamagedStore, match=r"manifest.json cannot be read.*record it again"):
            call()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 99}, "format 99"),
        ({"surprise": 1}, "surprise"),
        ({"shards": []}, "shards"),
        ({"shards": [{"file": "../x", "bytes": 1, "sha256": "", "batches": 1}] * 3}, "outside"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(folder, change, error):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=rf"manifest.json .*{error}"):
        TrajectoryStore.open(folder)


def test_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(StoreError, match=r"manifest.json is missing"):
        TrajectoryStore.open(tmp_path)


# Endpoint augmentation


def algorithm(steps, probability, first, last, generator):
    """Algorithm 4, lines 7 to 12, by the letter."""
    mask = [False] * (steps + 1)
    for k in range(first, steps - last + 1):
        u = torch.rand(1, generator=generator, dtype=torch.float64)
        if u < probability:
            mask[k] = True
    return mask


SIZES = st.integers(0, 40)


@given(SIZES, st.floats(0, 1), st.integers(0, 8), st.integers(0, 8), st.integers(0, 2**31))
def test_augmentation_follows_the_algorithm(steps, probability, first, last, seed):
    mask = augment_endpoints(steps, probability, first, last, torch.Generator().manual_seed(seed))
    assert mask.dtype == torch.bool
    assert mask.tolist() == algorithm(
        steps, probability, first, last, torch.Generator().manual_seed(seed)
    )


@given(SIZES, st.integers(0, 8), st.integers(0, 8))
def test_augmentation_at_probability_zero_and_one(steps, first, last):
    assert not augment_endpoints(steps, 0.0, first, last).any()
    replaced = augment_endpoints(steps, 1.0, first, last).nonzero().flatten().tolist()
    assert replaced == list(range(first, steps - last + 1))


def test_augmentation_defaults_are_the_papers():
    generator = torch.Generator().manual_seed(0)
    masks = torch.stack([augment_endpoints(20, generator=generator) for _ in range(3000)]).double()
    assert not masks[:, :3].any()
    assert not masks[:, 19:].any()
    assert (masks[:, 3:19].mean(0) - 0.1).abs().max() < 0.03


@pytest.mark.parametrize("bad", [(-1,), (5, 1.5), (5, -0.1), (5, float("nan")), (5, 0.1, -1)])
def test_augmentation_refuses_bad_arguments(bad):
    with pytest.raises(ValueError, match="must"):
        augment_endpoints(*bad)
