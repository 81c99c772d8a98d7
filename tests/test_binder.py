"""All results on one page: its Markdown, its contents, and how a real browser shows it."""

import contextlib
import itertools
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import time
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.evaluation import Results, Row, TeacherResult
from cdeq_experiments.binder import write_binder as bind
from cdeq_experiments.markdown import Bullets, Grid, Heading, Paragraph, inline, read_markdown
from cdeq_experiments.paper_table import write_table

ROOT = Path(__file__).parents[1]
HOSTILE = "<script>alert('x')</script> & \"Co\" <img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """What the tests look for: elements with their attributes, and the text of the whole page."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def tags(self):
        return [tag for tag, _ in self.elements]

    def values(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def row(method, steps, metric, seed=0, dataset="Blocks"):
    return Row(
        dataset=dataset,
        seed=seed,
        method=method,
        steps=steps,
        metric=metric,
        distance=0.5 / (steps or 1),
        residual=None,
        seconds=0.01,
        f_equivalents=None if steps is None else steps + 0.3,
        parameters=1200,
    )


def results(name="table3", *, rows=None, datasets=("Blocks",), metric_name="accuracy", **changes):
    teachers = tuple(
        TeacherResult(
            dataset=dataset,
            name="IGNN",
            parameters=1200,
            metric_name=metric_name,
            metric=0.8,
            higher_is_better=True,
            steps=20,
            residual=1e-4,
            train_seconds=3.0,
        )
        for dataset in datasets
    )
    if rows is None:
        rows = [
            row(method, k, 0.5 + 0.05 * k + 0.1 * seed, seed, dataset)
            for dataset in datasets
            for method in ("picard", "anchored")
            for k in (1, 2)
            for seed in (0, 1)
        ]
    about = {
        "experiment": name,
        "scale": "tiny",
        "commit": "abc123",
        "command": f"cdeq reproduce {name}",
        "hardware": {"cpu": "a processor", "memory_gb": 4.0, "load_average": [0.5, 1.0, 2.0]},
    }
    return Results(teachers=teachers, rows=rows, **{**about, **changes})


def png(width=40, height=20):
    """A white picture."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    pixels = zlib.compress((b"\0" + b"\xff" * width) * height)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    )


def markdown(found, title="A title", claims=("- Anchored: wins.",)):
    return f"""# {title}

Made by `{found.command}` at commit {found.commit}; mean ± standard deviation over the seeds.

{chr(10).join(claims)}

## Blocks (2 seeds)

- IGNN, converged: 80.0% accuracy

| model | evaluations | accuracy |
|---|---:|---:|
| GCN | – | 70.0% |
| Picard | 1 | 60.0% |
| Anchored | 1 | **79.0%** |
| Picard | 2 | 65.0% |

## How to read it

- A note, wrapped
  over two lines.

Hardware: cpu a processor.
"""


def leave(folder, name="table3", *, text=None, picture=True, **changes):
    """The three files of an experiment."""
    found = results(name, **changes)
    found.to_json(folder / f"{name}.json")
    (folder / f"{name}.md").write_text(
        markdown(found, f"Title of {name}") if text is None else text
    )
    if picture:
        (folder / f"{name}.png").write_bytes(png())
    return found


def bound(folder, **options):
    return bind(folder, folder / "out" / "report.html", **options).read_text()


# Markdown.


def test_every_form_is_read():
    text = """# Title
A paragraph
on two lines.
- one
- two, wrapped
  over lines
lazily
* three

## Data
| a | b | c |
|---|---:|:---:|
| `x|y` | 1 \\| 2 | **3** |
| | – |  |
after it
"""
    assert read_markdown(text) == [
        Heading(1, "Title"),
        Paragraph("A paragraph on two lines."),
        Bullets(("one", "two, wrapped over lines lazily", "three")),
        Heading(2, "Data"),
        Grid(
            ("a", "b", "c"),
            ("left", "right", "center"),
            (("`x|y`", "1 | 2", "**3**"), ("", "–", "")),
        ),
        Paragraph("after it"),
    ]


def test_what_only_resembles_a_form_is_a_paragraph():
    for text in ("#no space", "| no rule |", "**bold** start", "-5 degrees", "> quoted", "1. one"):
        assert read_markdown(text) == [Paragraph(text)]


@pytest.mark.parametrize("line", ["| 1 |", "| 1 | 2 | 3 |"])
def test_a_ragged_table_is_refused(line):
    with pytest.raises(ValueError, match=r"a table row has \d cells, its head 2: 1"):
        read_markdown(f"| a | b |\n|---|---|\n{line}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b** `c` d", "a <b>b</b> <code>c</code> d"),
        ("**b `c` & d**", "<b>b <code>c</code> &amp; d</b>"),
        ("`**no** <b>`", "<code>**no** &lt;b&gt;</code>"),
        ("``a`b``", "<code>a`b</code>"),
        ("[a & b](https://x.org/?a=1&b=2)", '<a href="https://x.org/?a=1&amp;b=2">a &amp; b</a>'),
        ("[here](#words)", '<a href="#words">here</a>'),
        ("[x](javascript:alert(1))", "[x](javascript:alert(1))"),
        ("[x](data:text/html,hi)", "[x](data:text/html,hi)"),
        ('[x](https://a"onclick="b)', '<a href="https://a&quot;onclick=&quot;b">x</a>'),
        ("2 ** 3 ` 4", "2 ** 3 ` 4"),
        ("<script>", "&lt;script&gt;"),
    ],
)
def test_text_within_a_line(text, expected):
    assert inline(text) == expected


@settings(deadline=None)
@given(st.text(alphabet="ab<>&\"'`*[]()#:/ h|\\", max_size=60) | st.text(max_size=60))
def test_no_text_makes_other_elements_than_ours(text):
    made = Page(inline(text) + "<i>")
    assert set(made.tags()) <= {"code", "b", "a", "i"}
    assert made.tags()[-1] == "i"  # nothing was left open in the midst of a tag
    for tag, attributes in made.elements:
        assert set(attributes) == ({"href"} if tag == "a" else set())
        assert tag != "a" or re.match(r"https?://|#", attributes["href"])


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="`*[")))
def test_text_without_marks_is_kept(text):
    assert unescape(inline(text)) == text
    assert not re.search(r"[<>\"']|&(?!(lt|gt|amp|quot|#x27);)", inline(text))


CELLS = st.text(alphabet="ab|<& -–:.", max_size=8).map(str.strip)


@settings(deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n))))
def test_cells_come_back_as_they_were(rows):
    width = len(rows[0]) if rows else 1
    lines = ["| " + " | ".join(f"h{i}" for i in range(width)) + " |", "|" + "---|" * width]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows
    ]
    (table,) = read_markdown("\n".join(lines))
    assert [list(cells) for cells in table.rows] == rows


# The page.


def test_the_order_given_comes_first_then_names(tmp_path):
    for name in ("window", "table3", "beta", "table1"):
        leave(tmp_path, name)
    page = bound(tmp_path, order=("table1", "table2", "table3", "table1", "cost"))
    sections = re.findall(r'<section id="experiment-([\w-]+)">', page)
    assert sections == ["table1", "table3", "beta", "window"]
    assert "Without results here: table2, cost." in Page(page).text
    contents = page.partition("<nav")[2].partition("</nav>")[0]
    assert re.findall(r"#experiment-([\w-]+)", contents) == sections


def test_what_has_no_markdown_is_left_alone(tmp_path):
    leave(tmp_path)
    (tmp_path / "demo-text.json").write_text("[something else]")
    (tmp_path / "README.md").write_text("# Not an experiment")
    page = bound(tmp_path)
    assert "demo" not in page
    assert "Not an experiment" not in page
    assert "Without results" not in page


def test_findings_come_before_the_sections_and_are_not_repeated(tmp_path):
    found = results()
    leave(
        tmp_path, text=markdown(found, "T", ("- Anchored: wins", "  by far.", "- No colon here."))
    )
    page = bound(tmp_path)
    assert "<li><b>Anchored:</b> wins by far.</li>\n<li>No colon here.</li>" in page
    assert page.count("wins by far") == 1
    assert page.index("wins by far") < page.index('<section id="experiment-table3">')
    assert "No findings in words" not in page


def test_an_experiment_without_claims_says_so(tmp_path):
    leave(tmp_path, text=markdown(results(), "T", ()))
    assert "No findings in words" in bound(tmp_path)


def test_the_page_is_well_ordered(tmp_path):
    leave(tmp_path, "table3")
    leave(tmp_path, "odd name & #", text="# T\n\n#### Deep\n\ntext\n\n# Again\n\n### Third\n")
    page = Page(bound(tmp_path))
    levels = [int(tag[1]) for tag in page.tags() if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.values("href") if link.startswith("#")} <= set(ids)
    assert not [link for link in page.values("href") if not link.startswith(("#", "data:,"))]


def test_tables_have_captions_and_scopes_and_stand_in_blocks(tmp_path):
    leave(tmp_path)
    page = bound(tmp_path)
    assert "<caption><span>Title of table3: Blocks (2 seeds)</span></caption>" in page
    assert page.count('<th scope="col"') == 3
    assert page.count('<th scope="row"') == 4
    assert page.count("<tbody>") == 3  # explicit, one evaluation, two
    assert '<td class="right"><b>79.0%</b></td>' in page


def test_notes_are_folded_and_the_hardware_is_given_once(tmp_path):
    leave(tmp_path)
    page = bound(tmp_path)
    folded = page.partition("<details>")[2].partition("</details>")[0]
    assert "A note, wrapped over two lines." in folded
    assert "Hardware: cpu" not in page
    assert "CPU a processor, memory 4.0 GB, load average 0.5 / 1.0 / 2.0" in page


def test_a_grid_without_notes(tmp_path):
    """Two fields against each other, or variants under an empty head."""
    text = """# Window

- Blocks: best is 2.

## Blocks (1 seed)

accuracy at 2 evaluations:

| gamma \\ rho | 1 | 2 |
|---|---:|---:|
| 0.5 | 70.0% (71) | **80.0%** |

|  | accuracy at 1 |
|---|---:|
| few | 70.0% |

Hardware: cpu a processor.
"""
    leave(tmp_path, text=text)
    page = bound(tmp_path)
    assert '<th scope="col" class="left">gamma \\ rho</th>' in page
    assert '<thead><tr><td></td><th scope="col" class="right">accuracy at 1</th></tr>' in page
    assert "Window: Blocks (1 seed), table 2</span>" in page
    assert "Hardware: cpu" not in page
    assert "<details>" not in page


def test_how_it_was_made_is_read_from_the_json(tmp_path):
    rows = [row("paper", 1, m, seed) for seed, m in enumerate((0.5, 0.6, 0.7))]
    rows += [row("anchored", 2, m, seed) for seed, m in enumerate((0.7, 0.7, 0.73))]
    rows += [row("picard", 1, 0.4), row("gcn", None, 0.4), row("solved", None, 0.4)]
    leave(tmp_path, rows=rows, command="cdeq a --x 'b and c' and cdeq b", commit="abc and def")
    page = bound(tmp_path)
    assert "<dt>Commands</dt><dd><code>cdeq a --x &#x27;b and c&#x27;</code></dd>" in page
    assert "<dd><code>cdeq b</code></dd>" in page
    assert "<dt>Commits</dt><dd><code>abc</code></dd><dd><code>def</code></dd>" in page
    assert "0, 1 and 2. Only 0 for Picard; Anderson, to its tolerance; GCN" in page
    assert (
        "standard deviation of the accuracy over the seeds; widest 10.0 points, Paper at 1<" in page
    )


def test_data_sets_that_differ_have_a_line_each(tmp_path):
    rows = [
        row("picard", 1, 3.0, 0, "A"),
        row("picard", 1, 2.5, 0, "B"),
        row("picard", 1, 3.5, 7, "B"),
    ]
    leave(tmp_path, rows=rows, datasets=("A", "B"), metric_name="perplexity")
    page = bound(tmp_path)
    assert "<dt>Seeds</dt><dd><span>A: 0</span></dd><dd><span>B: 0 and 7</span></dd>" in page
    assert "A: none measured: no method has more than one seed" in page
    assert "widest 0.71, Picard at 1" in page


def test_tables_of_another_run_than_the_json_are_marked(tmp_path):
    leave(tmp_path)
    assert 'class="warning"' not in bound(tmp_path)
    leave(tmp_path, text=markdown(results(commit="other")))
    assert '<p class="warning">' in bound(tmp_path)


def test_hostile_text_stays_text(tmp_path):
    found = results(
        datasets=(HOSTILE,), command=f"cdeq {HOSTILE}", commit=HOSTILE, hardware=HOSTILE
    )
    text = markdown(found, HOSTILE, (f"- {HOSTILE}: `{HOSTILE}`", f"- **{HOSTILE}**"))
    text = text.replace("| GCN |", f"| `a|b` {HOSTILE} |").replace("A note", HOSTILE)
    text = text.replace("## Blocks", f"## {HOSTILE}")
    clean = tmp_path / "clean"
    clean.mkdir()
    leave(clean)
    leave(
        tmp_path,
        text=text,
        datasets=(HOSTILE,),
        command=found.command,
        commit=HOSTILE,
        hardware=HOSTILE,
        scale=HOSTILE,
    )
    page = Page(bound(tmp_path, order=(HOSTILE,)))
    assert "script" not in page.tags()
    assert page.tags().count("img") == 1
    assert not page.values("onerror")
    assert page.text.count(HOSTILE) >= 12
    assert set(page.tags()) <= {*Page(bound(clean)).tags(), "b", "code"}


def test_a_missing_plot_is_named_and_the_rest_is_there(tmp_path):
    leave(tmp_path, picture=False)
    page = bound(tmp_path)
    assert "No plot: table3.png is missing." in page
    assert "<img" not in page
    assert page.count("<table>") == 1


def test_the_plot_has_its_size_and_says_what_it_shows(tmp_path):
    leave(tmp_path)
    (image,) = [a for tag, a in Page(bound(tmp_path)).elements if tag == "img"]
    assert (image["width"], image["height"]) == ("40", "20")
    for part in ("Title of table3", "Blocks", "Picard, Anchored"):
        assert part in image["alt"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("table3.json", b'{"experiment": ', "table3.json: not JSON"),
        ("table3.json", b"{}", "table3.json: top level: missing field"),
        ("table3.json", b"\xff\xfe", "table3.json: not UTF-8"),
        ("table3.md", b"\xff\xfe", "table3.md: .*codec"),
        ("table3.md", b"| a |\n|---|\n| 1 | 2 |", "table3.md: a table row has 2 cells"),
        ("table3.png", png()[:-6], "table3.png: not a whole PNG"),
        ("table3.png", b"", "table3.png: not a whole PNG"),
    ],
    ids=["cut json", "empty json", "binary json", "binary md", "ragged md", "cut png", "empty png"],
)
def test_a_damaged_file_is_named_and_the_old_page_stays(tmp_path, file, content, message):
    leave(tmp_path)
    before = bound(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        bound(tmp_path)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]
    assert (tmp_path / "out" / "report.html").read_text() == before


@pytest.mark.parametrize("name", ["", "absent"])
def test_a_folder_without_results_is_named(tmp_path, name):
    (tmp_path / "demo.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / name))}: no results"):
        bind(tmp_path / name, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_our_own_results_are_bound_whole(tmp_path, scale):
    folder = ROOT / "results" / scale
    pages = [p for p in folder.glob("*.md") if p.with_suffix(".json").exists()]
    if not pages:
        pytest.skip(f"no results in {folder}")
    html = bind(folder, tmp_path / "report.html").read_text()
    page = Page(html)
    lines = [line for p in pages for line in p.read_text().splitlines() if line.startswith("|")]
    rules = sum(line.startswith("|---") for line in lines)
    assert page.tags().count("table") == rules
    assert page.tags().count("tr") == len(lines) - rules
    for path in pages:
        for claim in re.findall(r"^- (.+)", path.read_text(), re.MULTILINE):
            assert re.sub(r"[`*]", "", claim) in page.text
    assert "|--" not in page.text
    assert not re.search(r"\*\*|^#", page.text.partition("Contents")[2], re.MULTILINE)


def luminance(colour):
    if len(colour) == 4:
        colour = "#" + "".join(2 * c for c in colour[1:])
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_can_be_told_from_its_ground_in_light_in_dark_and_on_paper(tmp_path):
    leave(tmp_path)
    roots = re.findall(r":root \{(.*?)\}", bound(tmp_path), re.DOTALL)
    assert len(roots) == 3
    for root in roots:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]+)", root))
        for text in ("ink", "soft", "accent"):
            for ground in ("page", "card", "tint"):
                low, high = sorted(luminance(colours[name]) for name in (text, ground))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


# A real browser.

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded")
LOOK = """(() => {
  const all = selector => [...document.querySelectorAll(selector)];
  const wide = document.documentElement.clientWidth;
  return {
    width: innerWidth,
    scrolls: document.documentElement.scrollWidth,
    images: all("img").map(i => [i.naturalWidth, i.getBoundingClientRect().width]),
    tables: all("table").length,
    boxes: all(".scroll").filter(b => b.scrollWidth > b.clientWidth).length,
    beyond: all("body *").filter(e => !e.closest(".scroll") && e.getBoundingClientRect().right > wide + 0.5)
      .map(e => e.outerHTML.slice(0, 80)),
    folded: all("details").map(d => d.getBoundingClientRect().height - d.firstElementChild.offsetHeight),
    ground: getComputedStyle(document.body).backgroundColor,
  };
})()"""


class Browser:
    """Chromium without a window, spoken to over a pipe in its debugging protocol."""

    def __init__(self, profile):
        read_end, commands = os.pipe()
        self.replies, write_end = os.pipe()
        self.commands, self.number, self.buffer, self.events = commands, 0, b"", []
        # Chromium reads from descriptor 3 and answers on 4.
        pipes = f"3</dev/fd/{read_end} 4>/dev/fd/{write_end}"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            [
                "sh",
                "-c",
                f'exec "$@" {pipes}',
                "sh",
                CHROMIUM,
                *options,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        os.close(write_end)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
            self.process.wait(10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            os.close(self.commands)
            os.close(self.replies)

    def message(self, deadline):
        while b"\0" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.replies], [], [], left)[0]:
                raise TimeoutError("chromium does not answer")
            piece = os.read(self.replies, 1 << 16)
            if not piece:
                raise RuntimeError("chromium has ended")
            self.buffer += piece
        first, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(first)

    def call(self, method, **parameters):
        self.number += 1
        sent = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            sent["sessionId"] = self.session
        os.write(self.commands, json.dumps(sent).encode() + b"\0")
        deadline = time.monotonic() + 60
        while (reply := self.message(deadline)).get("id") != self.number:
            self.events.append(reply)
        assert "error" not in reply, reply
        return reply["result"]

    def open(self, path):
        """Load a file; what was logged and asked for since then is in `errors` and `requests`."""
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message(deadline))

    def look(self, width, *, media="", scheme="light"):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        return self.call("Runtime.evaluate", expression=LOOK, returnByValue=True)["result"]["value"]

    def errors(self):
        return [
            event
            for event in self.events
            if event.get("method") in ERRORS
            or (
                event.get("method") == "Runtime.consoleAPICalled"
                and event["params"]["type"] in ("error", "warning", "assert")
            )
        ]

    def requests(self):
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page of drawn experiments with long words in every place that could push it wide."""
    folder = tmp_path_factory.mktemp("results")
    for name in ("table1", "gamma-rho"):
        found = results(
            name,
            datasets=("Blocks", HOSTILE),
            command=f"cdeq reproduce {name} --out /{'long' * 30}",
            commit="0123456789abcdef" * 3,
        )
        write_table(
            found,
            folder,
            title=f"Experiment {name} {'x' * 60}",
            shown=(1, 2),
            claims=[f"- Anchored: {HOSTILE} {'w' * 90}.", "- Short."],
            notes=[f"Look at `{'code' * 30}`.", HOSTILE],
        )
    leave(folder, "bare", picture=False)
    return bind(folder, folder / "report.html", order=("table1", "table2"))


def test_it_opens_from_disk_without_errors_or_requests(browser, shown):
    browser.open(shown)
    seen = browser.look(1200)
    assert browser.errors() == []
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked == [shown.as_uri()]
    assert len(seen["images"]) == 2
    assert all(natural > 0 and drawn <= 1200 for natural, drawn in seen["images"])
    assert seen["tables"] == 5
    assert seen["scrolls"] <= 1200
    assert seen["folded"]
    assert max(seen["folded"]) <= 1


def test_it_fits_a_phone(browser, shown):
    browser.open(shown)
    seen = browser.look(360)
    assert seen["width"] == 360
    assert seen["scrolls"] <= 360
    assert seen["beyond"] == []
    assert seen["boxes"] >= 4  # the wide tables do scroll, each in its own box
    assert all(200 < drawn <= 360 for _, drawn in seen["images"])


def test_it_follows_the_colour_scheme_except_on_paper_where_notes_unfold(browser, shown):
    browser.open(shown)
    light, dark = browser.look(740), browser.look(740, scheme="dark")
    paper = browser.look(740, media="print", scheme="dark")
    assert light["ground"] == "rgb(251, 250, 248)"
    assert dark["ground"] == "rgb(20, 23, 28)"
    assert paper["ground"] == "rgb(255, 255, 255)"
    assert min(paper["folded"]) > 20


def test_the_browser_sees_what_is_wrong(browser, tmp_path):
    """The checks above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<!doctype html><img src="absent.png"><div style="width: 900px">wide</div>'
        "<script>console.error('no'); nothing();</script>"
    )
    browser.open(bad)
    seen = browser.look(360)
    kinds = {event["method"] for event in browser.errors()}
    assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown"} <= kinds
    assert (tmp_path / "absent.png").as_uri() in browser.requests()
    assert seen["images"][0][0] == 0
    assert seen["scrolls"] > 360
    assert seen["beyond"]
