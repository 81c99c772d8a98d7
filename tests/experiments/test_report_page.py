"""All results on one page: what it holds, and how a browser shows it."""

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_pages import ALL, HOSTILE, table_results

from cdeq.evaluation import ResultsError
from cdeq_experiments.pages import write_pages, write_report

RESULTS = Path(__file__).parents[2] / "results"


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.elements, self.text = [], ""
        self.feed(self.html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def values(self, tag, name):
        return [
            attributes[name] for t, attributes in self.elements if t == tag and name in attributes
        ]


def folder_of(tmp_path, *named):
    for name, found in named:
        write_pages(replace(found, experiment=name), tmp_path)
    return tmp_path


def bound(folder, **options):
    return Page(write_report(folder, folder / "report.html", **options))


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A folder with results of every layout."""
    return folder_of(tmp_path_factory.mktemp("all"), *ALL.items())


@pytest.mark.slow
def test_the_order_given_comes_first_then_names(tmp_path):
    found = table_results()
    folder_of(tmp_path, ("b", found), ("a", found), ("c", found), ("d", found))
    page = bound(tmp_path, order=("d", "missing", "b"))
    assert page.values("section", "id") == ["d", "b", "a", "c"]
    assert page.values("a", "href")[:4] == ["#d", "#b", "#a", "#c"]
    assert "Without results here: missing." in page.text


@pytest.mark.slow
def test_findings_picture_and_tables_come_in_this_order(everything):
    page = bound(everything)
    section = page.html.split('<section id="table">')[1].split("</section>")[0]
    places = [section.index(mark) for mark in ("<li>", "<figure>", "<table>", "<details>")]
    assert places == sorted(places)
    for words in ("A note.", "Made by <code>cdeq reproduce", "cpu a processor"):
        assert words in section


@pytest.mark.slow
def test_it_is_whole_by_itself(everything):
    page = bound(everything)
    sources = page.values("img", "src")
    assert len(sources) == len(ALL)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not {"script", "iframe"} & {tag for tag, _ in page.elements}
    links = page.values("a", "href")
    assert {link for link in links if link.startswith("#")} == set(links)
    assert {link[1:] for link in links} <= {a.get("id") for _, a in page.elements}
    assert all(page.values("img", "alt"))


@pytest.mark.slow
def test_only_results_with_a_page_are_bound(tmp_path):
    folder_of(tmp_path, ("one", table_results()))
    table_results(page={}).to_json(tmp_path / "demo.json")
    assert bound(tmp_path).values("section", "id") == ["one"]


@pytest.mark.slow
def test_without_a_plot_the_rest_is_there(tmp_path):
    folder_of(tmp_path, ("one", table_results()))
    (tmp_path / "one.png").unlink()
    page = bound(tmp_path)
    assert page.values("img", "src") == []
    assert "Accuracy" in page.text


@pytest.mark.slow
def test_hostile_text_stays_text(tmp_path):
    found = table_results(HOSTILE, commit=HOSTILE, command=HOSTILE, hardware=HOSTILE)
    page = {**found.page, "title": HOSTILE, "notes": [HOSTILE]}
    folder_of(tmp_path, ("one", replace(found, page=page)))
    page = bound(tmp_path)
    assert not {"b", "script"} & {tag for tag, _ in page.elements}
    assert not [link for link in page.values("a", "href") if "javascript" in link]
    assert page.text.count("<b>") > 5


@pytest.mark.slow
@pytest.mark.parametrize("content", ["{", "{}", '{"experiment": 1}'])
def test_a_damaged_file_is_named_and_the_old_page_stays(tmp_path, content):
    folder_of(tmp_path, ("one", table_results()))
    before = bound(tmp_path).html
    (tmp_path / "two.json").write_text(content)
    with pytest.raises(ResultsError, match=r"two\.json"):
        bound(tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before


@pytest.mark.parametrize("name", ["", "absent"])
def test_a_folder_without_results_is_named(tmp_path, name):
    with pytest.raises(ResultsError, match="no results here"):
        write_report(tmp_path / name, tmp_path / "report.html")


@pytest.mark.slow
def test_text_can_be_told_from_its_ground(everything):
    """In light, in dark and on paper: a contrast of 4.5 at least, as WCAG asks."""

    def luminance(colour):
        digits = colour if len(colour) == 6 else "".join(2 * c for c in colour)
        channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    schemes = re.findall(r":root \{(.*?)\}", bound(everything).html)
    assert len(schemes) == 3
    for scheme in schemes:
        light = {name: luminance(c) for name, c in re.findall(r"--(\w+): #(\w+)", scheme)}
        for text in ("ink", "soft", "link"):
            for ground in ("page", "tint"):
                pair = sorted((light[text], light[ground]))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (text, ground)


# In a browser.


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of our own results."""
    return write_report(RESULTS / "small", tmp_path_factory.mktemp("small") / "report.html")


def opened(browser, report, **options):
    """The page, what went wrong on it, and what it asked for beside itself."""
    page = browser.new_page(**options)
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url.partition(":")[0]))
    page.goto(report.as_uri())
    return page, errors, requests


@pytest.mark.slow
def test_it_opens_from_disk_without_errors(browser, report):
    page, errors, requests = opened(browser, report)
    assert errors == []
    assert requests.count("file") == 1
    assert set(requests) <= {"file", "data"}
    broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).length"
    assert page.evaluate(broken) == 0
    assert page.locator("section").count() >= 17
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 1200])
def test_it_fits_the_screen(browser, report, width):
    page, _, _ = opened(browser, report, viewport={"width": width, "height": 800})
    for block in page.locator("details").all():
        block.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


@pytest.mark.slow
def test_it_follows_the_colour_scheme_but_not_on_paper(browser, report):
    ground = "getComputedStyle(document.body).backgroundColor"
    page, _, _ = opened(browser, report, color_scheme="light")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == "rgb(20, 23, 28)"
    page.emulate_media(color_scheme="dark", media="print")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.close()
