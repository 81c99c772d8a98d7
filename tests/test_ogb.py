"""Graphs in the files of the Open Graph Benchmark."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.data import normalised_adjacency, read_ogb
from cdeq.data import ogb as ogb_module
from graph_files import write_gz, write_ogb


@pytest.mark.parametrize("form", ["{:.6f}", "{}", "{:.3e}", "{:.17g}"])
@pytest.mark.parametrize("block", [1 << 24, 64, 7])
def test_ogb(tmp_path, monkeypatch, form, block):
    monkeypatch.setattr(ogb_module, "BLOCK", block)
    features, edges, labels, order = write_ogb(tmp_path, form=form)
    task = read_ogb(tmp_path, "ogbn-arxiv")
    exact = np.array([[float(form.format(v)) for v in row] for row in features.tolist()])
    np.testing.assert_allclose(task.graph.features.numpy(), exact.astype("f4"), rtol=1.2e-7)
    assert task.graph.features.dtype == torch.float32
    assert task.labels.tolist() == labels.tolist()
    expected = normalised_adjacency(torch.from_numpy(edges.T), 40)
    assert torch.equal(task.graph.adjacency.to_dense(), expected.to_dense())
    found = [mask.nonzero().flatten().tolist() for mask in task[2:]]
    assert found == [sorted(part) for part in np.split(order, [20, 30])]


decimals = st.decimals(-(10**6), 10**6, places=None, allow_nan=False).map(lambda d: f"{d:f}"[:25])
plain = st.integers(-(10**6), 10**6).map(str)
exponents = st.floats(-1e30, 1e30).map(repr)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(decimals | plain, min_size=1, max_size=30)
    | st.lists(decimals | plain | exponents, min_size=1, max_size=30)
)
def test_decimals_are_read_as_python_reads_them(texts):
    """To the last bit, on the fast path and on numpy's."""
    found = ogb_module.parse_numbers((",".join(texts) + "\n").encode(), np.float64)
    assert found.tolist() == [float(text) for text in texts]


@pytest.mark.parametrize(
    "text", ["1.2.3", "1,,2", "1,x", "1.-2", ".", "-", "--1", "1 2", "-.", "1,.,2", "1-"]
)
def test_no_numbers_are_no_numbers(tmp_path, text):
    path = tmp_path / "table.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("1.0,2.0\n" * text.count(",") + text + "\n")
    with pytest.raises(ValueError, match=r"table\.csv\.gz"):
        ogb_module.read_numbers(path, np.float32)


def test_ogb_files_that_do_not_fit(tmp_path):
    write_ogb(tmp_path)
    raw = tmp_path / "ogbn_arxiv/raw"
    whole = (raw / "node-feat.csv.gz").read_bytes()
    (raw / "node-feat.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="node-feat"):
        read_ogb(tmp_path, "ogbn-arxiv")
    (raw / "node-feat.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="node-feat"):
        read_ogb(tmp_path, "ogbn-arxiv")
    for rows in (39, 41):
        write_gz(raw / "node-feat.csv.gz", np.ones((rows, 5)))
        with pytest.raises(ValueError, match=r"node-feat.*40"):
            read_ogb(tmp_path, "ogbn-arxiv")
    write_ogb(tmp_path)
    write_gz(raw / "edge.csv.gz", [[0, 40]] * 90)
    with pytest.raises(ValueError, match="there are 40"):
        read_ogb(tmp_path, "ogbn-arxiv")
    write_gz(raw / "num-node-list.csv.gz", [[20], [20]])
    with pytest.raises(ValueError, match="single graph"):
        read_ogb(tmp_path, "ogbn-arxiv")
    with pytest.raises(ValueError, match="ogbn-products"):
        read_ogb(tmp_path, "ogbn-mag")


def test_the_ogb_cache_serves_until_a_source_changes(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    write_ogb(tmp_path)
    first = read_ogb(tmp_path, "ogbn-arxiv", cache=cache)
    parses, parsed = [], ogb_module._parsed
    monkeypatch.setattr(ogb_module, "_parsed", lambda paths: parses.append(1) or parsed(paths))
    second = read_ogb(tmp_path, "ogbn-arxiv", cache=cache)
    assert not parses
    assert torch.equal(first.graph.features, second.graph.features)
    assert torch.equal(first.graph.adjacency.to_dense(), second.graph.adjacency.to_dense())
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))

    labels = tmp_path / "ogbn_arxiv/raw/node-label.csv.gz"
    write_gz(labels, (first.labels[:, None] + 1).numpy())
    os.utime(labels, ns=(1, 1))
    third = read_ogb(tmp_path, "ogbn-arxiv", cache=cache)
    assert torch.equal(third.labels, first.labels + 1)
    assert len(parses) == 1
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert torch.equal(read_ogb(tmp_path, "ogbn-arxiv", cache=cache).labels, third.labels)
    assert len(parses) == 2
    assert torch.equal(read_ogb(tmp_path, "ogbn-arxiv", cache=cache).labels, third.labels)
    assert len(parses) == 2
