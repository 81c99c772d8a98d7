"""The page to play with: what is bundled, what a drawing becomes, and what a browser shows."""

import base64
import gzip
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from cdeq.data import digits_images

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("web_build", ROOT / "web" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

DRAWN = {
    0: "50,10 30,18 20,40 20,65 32,88 50,95 68,88 80,62 78,35 66,15 50,10",
    1: "38,28 55,10 55,92",
    2: "25,28 35,13 55,10 70,22 68,42 45,68 22,92 78,92",
    3: "25,15 45,8 66,15 68,33 55,46 42,48 60,52 74,68 66,88 45,95 24,86",
    4: "50,8 22,60 78,60; 60,38 60,95",
    5: "72,10 32,10 28,48 50,42 70,52 74,72 60,92 40,95 24,86",
    6: "64,10 42,26 28,55 28,78 44,94 64,90 72,72 60,56 42,58 30,72",
    7: "22,12 76,12 58,48 44,94",
    8: "68,22 50,10 33,22 40,40 60,54 72,74 58,94 38,92 28,74 42,54 64,38 68,22",
    9: "70,30 55,10 34,18 30,38 46,50 64,44 70,30 68,60 58,94",
}
"""Digits as a hand draws them: strokes of points, in percent of the square."""


def strokes_of(text):
    return [
        [[float(v) for v in point.split(",")] for point in stroke.split()]
        for stroke in text.split(";")
    ]


def reduced(strokes, ink):
    """The reduction of web/reduction.js in numpy: 64 counts."""
    points = np.array([point for stroke in strokes for point in stroke])
    low, high = points.min(0), points.max(0)
    width, height = high - low
    down = 28 / max(height, width / 2, 1e-9)
    scale = np.array([min(down, 20 / max(width, 1e-9)), down])
    centres = np.stack(np.meshgrid(np.arange(32) + 0.5, np.arange(32) + 0.5), axis=-1)
    nearest = np.full((32, 32), np.inf)
    for stroke in strokes:
        placed = 16 + (np.array(stroke) - (low + high) / 2) * scale
        for a, b in zip(placed[[0, *range(len(placed) - 1)]], placed, strict=True):
            length = ((b - a) ** 2).sum()
            along = ((centres - a) @ (b - a)) / length if length else np.zeros((32, 32))
            nearby = a + np.clip(along, 0, 1)[..., None] * (b - a)
            nearest = np.minimum(nearest, ((centres - nearby) ** 2).sum(-1))
    inked = nearest <= np.sort(nearest, axis=None)[ink - 1] + 1e-9
    return inked.reshape(8, 4, 8, 4).sum((1, 3)).flatten().tolist()


# What is bundled.


def unpacked(page, name):
    (text,) = re.findall(rf'<script type="text/plain" id="file-{name}">([^<]*)</script>', page)
    return gzip.decompress(base64.b64decode(text))


RUNTIME = {"script": b"var ort = 1;\n//# sourceMappingURL=x", "wasm-module": b"m", "wasm": b"w" * 9}


def test_the_page_holds_all_it_needs():
    models = {"student-1": bytes(range(256)), "teacher-step": b"step"}
    page = build.bundled(models, RUNTIME, {"labels": [1, 2]})
    for name, content in (models | {"wasm": RUNTIME["wasm"], "wasm-module": b"m"}).items():
        assert unpacked(page, name) == content
    assert '<script type="application/json" id="settings">{"labels": [1, 2]}</script>' in page
    assert "<!-- build:" not in page
    assert "sourceMappingURL" not in page
    assert not re.search(r"<link|@import|<[^>]* (src|href)=", page)  # nothing is loaded beside it
    for name in build.SCRIPTS:
        assert (ROOT / "web" / name).read_text() in page
    assert set(build.SCRIPTS) == {path.name for path in (ROOT / "web").glob("*.js")}


def test_what_would_cut_the_page_short_is_refused():
    with pytest.raises(SystemExit, match="</script"):
        build.bundled({}, RUNTIME | {"script": b"'</script>'"}, {})


def test_without_the_package_it_says_what_to_run(tmp_path):
    with pytest.raises(SystemExit, match="npm ci --prefix web"):
        build.runtime_files(tmp_path)


def test_the_package_is_pinned():
    wanted = json.loads((ROOT / "web" / "package.json").read_text())["dependencies"]
    locked = json.loads((ROOT / "web" / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_the_page_knows_the_data():
    from sklearn.datasets import load_digits

    about, splits = build.settings(), digits_images()
    pixels = np.frombuffer(base64.b64decode(about["pixels"]), np.uint8).reshape(-1, 64)
    known = {row.tobytes() for row in load_digits().data.astype(np.uint8)}
    assert all(row.tobytes() in known for row in pixels)
    x = as_input(pixels, about)
    assert torch.allclose(x, splits.test.x, atol=1e-6)
    assert about["labels"] == splits.test.y.tolist()
    assert abs(about["ink"] - load_digits().data.sum(1).mean()) < 3


def as_input(counts, about):
    shares = torch.tensor(np.array(counts), dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return about["paper"] + shares * (about["full"] - about["paper"])


# What a drawing becomes.


def test_a_drawing_fills_the_height_in_the_middle_with_its_share_of_ink():
    for digit, text in DRAWN.items():
        image = np.array(reduced(strokes_of(text), 312)).reshape(8, 8)
        assert abs(image.sum() - 312) <= 32, digit  # pixels equally near become ink together
        assert image.max() <= 16
        assert image[0].any()
        assert image[-1].any()
        assert image[:, [0, 7]].sum() <= 8


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_reduces_a_drawing_as_numpy_does():
    drawings = [strokes_of(text) for text in DRAWN.values()]
    drawings += [[[[7.0, 7.0]]], [[[0.0, 3.0], [90.0, 5.0]]]]  # a dot, a dash
    code = (ROOT / "web" / "reduction.js").read_text()
    code += f"\nconst all = {json.dumps(drawings)}.map((one) => reducedDrawing(one, 312));"
    code += "\nconsole.log(JSON.stringify(all));"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [reduced(strokes, 312) for strokes in drawings]
