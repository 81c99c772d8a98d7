"""The store on disk: reading, parts of batches, fingerprints, and damage."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import contents
from cdeq.equilibrium import from_functions
from cdeq.equilibrium.states import tensors_of
from cdeq.solvers import Anderson, Picard
from cdeq.trajectories import (
    DamagedStore,
    FingerprintMismatch,
    StoreError,
    TrajectoryStore,
    record,
)
from checks import same_tensors
from recorded import Affine, Pair, batches


@pytest.fixture
def folder(tmp_path):
    record(Affine(), batches(5), tmp_path, max_steps=3, batches_per_shard=2)
    return tmp_path


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
    assert store.precision().shape == (20,)
    (folder / "shard-00001.safetensors").unlink()
    with pytest.raises(DamagedStore, match="shard-00001"):
        store.sizes()


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


@pytest.mark.slow
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
            rows = zip(*(tensors_of(p.state(k)) for p in pieces), strict=True)
            joined = [torch.cat(r) for r in rows]
            assert same_tensors(joined, list(tensors_of(whole.state(k))))
        inner = whole.part(1, 2).part(2, 3)
        assert torch.equal(inner.x["x"], whole.x["x"][5:6])


def test_parts_of_endpoints(tmp_path):
    store = record(Pair(), batches(1), tmp_path, mode="endpoint")
    second = store[0].part(1, 2)
    assert same_tensors(second.endpoint, tuple(part[2:] for part in store[0].endpoint))


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


# Damage


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


@settings(max_examples=30)
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
    ["", "{", "[]", "3", "{}", '{"format": 3}', '{"format": 3, "shards": 3}', b"\xff\xfe", "null"],
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
