"""Other settings of a graph's teacher: one changed field each, the teacher of Table 3 shared, a page of them all."""

import dataclasses

import pytest

from cdeq import cli
from cdeq.evaluation import Results
from cdeq_experiments import graph_cells, graph_tasks
from cdeq_experiments.graph_cells import GraphCell
from cdeq_experiments.graph_teachers import USUAL, VALIDATION, setting_of, settings
from cdeq_experiments.options import Options
from test_grids import GRAPH, small


def test_a_setting_is_one_changed_field():
    for plan in graph_tasks.SCALES["small"]:
        for name, changed in settings(plan).items():
            fields = [
                f.name
                for f in dataclasses.fields(plan)
                if getattr(plan, f.name) != getattr(changed, f.name)
            ]
            assert len(fields) == (0 if name == USUAL else 1)
            assert setting_of(changed, "small") == name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("teachers")
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        patch.setitem(graph_cells.SCALES, "tiny", (GRAPH,))
        patch.chdir(place)
        assert cli.main(["reproduce", "teachers", "--scale", "tiny", "--seeds", "2"]) == 0
    return place


def test_every_setting_has_its_rows_and_its_teacher(run):
    found = Results.from_json(run / "results" / "tiny" / "teachers.json")
    names = set(settings(GRAPH))
    assert {row.method for row in found.rows} == names == {t.name for t in found.teachers}
    assert len(found.rows) == 2 * 4 * len(names)
    assert all(0 <= row.figures[VALIDATION] <= 1 for row in found.rows)
    [wide] = {row.parameters for row in found.rows if row.method == "width 16"}
    assert wide > next(row.parameters for row in found.rows if row.method == USUAL)
    page = (run / "results" / "tiny" / "teachers.md").read_text()
    assert all(f"| {name} |" in page for name in names)
    assert "best on validation nodes is" in page
    assert (run / "results" / "tiny" / "teachers.png").stat().st_size > 5000


def test_the_usual_one_is_the_teacher_of_table_3(run, tmp_path):
    options = Options(scale="tiny", data=None, runs=run / "runs" / "cells", out=tmp_path, seeds=1)
    cell = GraphCell(plan=GRAPH, seed=0, options=options)
    before = len(list((run / "runs" / "cells").iterdir()))
    assert any(cell.place("ignn").iterdir())
    assert len(list((run / "runs" / "cells").iterdir())) == before
