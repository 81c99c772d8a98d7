"""The page to play with: what is bundled, what a drawing becomes, and what a browser shows."""

import base64
import gzip
import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from cdeq import Student
from cdeq.data import digits_images
from cdeq.demo.task import StudentConfig
from cdeq.demo.tasks import DEMO_TASKS
from cdeq.equilibrium.states import relative_residual

if importlib.util.find_spec("sklearn") is None:  # whose import takes seconds
    pytest.skip("needs scikit-learn", allow_module_level=True)
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
    assert not re.search(
        r"@import|<[^>]* (src|href)=.(?!data:)", page
    )  # nothing is loaded beside it
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


# What a browser shows.


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    if not build.RUNTIME.exists():
        pytest.skip("onnxruntime-web is not installed: npm ci --prefix web --ignore-scripts")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def built(browser, tmp_path_factory):
    """The page with a student of the images demo that was trained for less long, and that student."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    folder = tmp_path_factory.mktemp("web")
    task = DEMO_TASKS["images"](0)
    teach = replace(task.teach, fit=replace(task.teach.fit, updates=80), pretrain_updates=60)
    config = task.students["corrected"]
    student = StudentConfig(fit=replace(config.fit, updates=20), changes={"correction_updates": 20})
    short = replace(
        task, teach=teach, distilling=task.distilling[:3], students={"corrected": student}
    )
    build.distil(folder / "student-corrected", short)
    models = build.exported(folder / "student-corrected")
    page = build.bundled(models, build.runtime_files(build.RUNTIME), build.settings())
    (folder / "index.html").write_text(page)
    return folder / "index.html", Student.load(folder / "student-corrected")


MEASURED = "!document.querySelector('.measuring') && document.querySelector('#rounds').textContent"
"""True when the answers to the last change are shown with their milliseconds."""


def opened(browser, address, **options):
    """The page when it has answered for its first digit, what went wrong on it, and what it asked for."""
    page = browser.new_page(**options)
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url.partition(":")[0]))
    page.goto(address)
    page.wait_for_function(MEASURED, timeout=120_000)
    return page, errors, requests


def draw(page, digit):
    """With the mouse, in a part of the square."""
    page.locator("#clear").click()
    page.wait_for_function("document.querySelector('#rounds').textContent === ''")
    box = page.locator("#drawing").bounding_box()
    for stroke in strokes_of(DRAWN[digit]):
        places = [
            (
                box["x"] + box["width"] * (0.2 + 0.006 * x),
                box["y"] + box["height"] * 0.006 * (y + 30),
            )
            for x, y in stroke
        ]
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place)
        page.mouse.up()
    page.wait_for_function(MEASURED, timeout=120_000)


def shown(page, who):
    """Each step of the table: digit, probabilities, residual and milliseconds as they are written."""
    found = {}
    for cell in page.locator(f"td.{who}").all():
        found[int(cell.get_attribute("data-step"))] = (
            int(cell.locator(".digit").text_content()),
            json.loads(cell.get_attribute("data-probabilities")),
            float(cell.locator(".residual").text_content().split()[-1]),
            float(cell.locator(".ms").text_content().split()[0]),
        )
    return found


def residual_at(teacher, z, context):
    return relative_residual(z.flatten(1), teacher.step(z, context).flatten(1)).item()


@torch.no_grad()
def expected(student, x):
    """What torch says of each step of teacher and student: probabilities and residual."""
    teacher = student.teacher
    context = teacher.inject(x)
    ours = {}
    for steps in build.STEPS:
        z = student.trajectory(x, steps)[-1]
        output = student(x, steps=steps)
        ours[steps] = output.softmax(1)[0], residual_at(teacher, z, context)
    theirs, z = {}, teacher.start(context)
    for steps in range(1, build.LIMIT + 1):
        z = teacher.step(z, context)
        residual = residual_at(teacher, z, context)
        theirs[steps] = teacher.readout(z, context).softmax(1)[0], residual
        if residual <= build.TOLERANCE:
            break
    return {"teacher": theirs, "student": ours}


def first_right(rows, digit):
    """The milliseconds at which a runner answers the digit and stays with it; infinity if it does not."""
    later = [step for step, row in rows.items() if row[0] != digit]
    return min(
        (row[3] for step, row in rows.items() if step > max(later, default=0)), default=np.inf
    )


@pytest.mark.release
def test_a_drawn_digit_is_answered_as_torch_answers_it(browser, built):
    path, student = built
    page, errors, requests = opened(browser, path.as_uri())
    about, right = build.settings(), 0
    for digit in DRAWN:
        draw(page, digit)
        page.locator(f"#labels input[value='{digit}']").click()
        strokes, counts = page.evaluate("[strokes, counts]")
        assert counts == reduced(strokes, about["ink"])
        runners = {who: shown(page, who) for who in ("teacher", "student")}
        for who, rows in expected(student, as_input([counts], about)).items():
            assert set(runners[who]) == set(rows)
            for step, (probabilities, residual) in rows.items():
                best, bars, written, ms = runners[who][step]
                assert np.allclose(bars, probabilities, atol=1e-4)
                assert best == probabilities.argmax()
                assert written == pytest.approx(residual, rel=0.06, abs=6e-4)
                assert ms > 0
        when = {who: first_right(rows, digit) for who, rows in runners.items()}
        first = min(when, key=when.get)
        said = page.locator("#verdict strong").text_content()
        if np.isfinite(when[first]):
            assert said in {
                f"The {who} is right first: “{digit}”." for who in when if when[who] <= when[first]
            }
            right += 1
        else:
            assert said == f"Neither answers “{digit}”."
    assert right >= 7
    assert errors == []
    assert set(requests) <= {"file", "blob", "data"}
    assert requests.count("file") == 1
    page.close()


@pytest.mark.release
def test_a_finger_draws_on_a_phone_and_the_page_stays(browser, built):
    path, _ = built
    options = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    page, errors, _ = opened(browser, path.as_uri(), **options)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator("#clear").tap()
    page.wait_for_function("document.querySelector('#rounds').textContent === ''")
    assert page.locator("#verdict strong").text_content() == "Draw a digit."
    finger = page.context.new_cdp_session(page)
    box = page.locator("#drawing").bounding_box()

    def touch(kind, points):
        places = [
            {"x": box["x"] + box["width"] * x / 100, "y": box["y"] + box["height"] * y / 100}
            for x, y in points
        ]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    (stroke,) = strokes_of(DRAWN[1])
    touch("touchStart", stroke[:1])
    for point in stroke[1:]:
        touch("touchMove", [point])
    touch("touchEnd", [])
    page.wait_for_function(MEASURED, timeout=120_000)
    assert page.evaluate("scrollY") == 0
    assert page.locator("td.student .digit").count() == len(build.STEPS)
    counts = np.array(page.evaluate("counts")).reshape(8, 8)
    assert counts.sum(0).argmax() in (3, 4, 5)  # upright
    button = page.locator("#toggle")
    button.tap()
    assert page.locator("#more tr").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert errors == []
    page.close()


@pytest.mark.release
def test_all_test_digits_from_a_static_host(browser, built):
    path, student = built
    handler = partial(QuietHandler, directory=path.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page, errors, _ = opened(browser, f"http://127.0.0.1:{server.server_port}/index.html")
        page.locator("#all").click()
        page.wait_for_selector("#table table", timeout=300_000)
        server.shutdown()
    x, y = digits_images().test
    for steps in build.STEPS:
        cells = page.locator(f"#table tr[data-step='{steps}'] td").all_text_contents()
        with torch.no_grad():
            right = (student(x, steps=steps).argmax(1) == y).double().mean().item()
        assert float(cells[2].removesuffix("%")) / 100 == pytest.approx(right, abs=0.003)
    last = page.locator("#table tr").last.locator("td").all_text_contents()
    assert float(last[1]) <= build.TOLERANCE
    assert last[2:] == ["", ""]
    assert errors == []
    page.close()


class QuietHandler(SimpleHTTPRequestHandler):
    """Any static host."""

    def log_message(self, *words):
        pass
