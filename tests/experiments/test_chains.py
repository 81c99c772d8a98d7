"""Chains as a user makes them: all models and students have their rows; a start that sees far is built and counted."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from cdeq.evaluation import Results
from cdeq.models import IGNN
from cdeq.models.graph.start import FarStart
from cdeq_experiments import chains
from cdeq_experiments.configs.base import CORRECTED
from cdeq_experiments.configs.graphs import GraphBudget
from cdeq_experiments.pages import plots
from cdeq_experiments.pages.frame import frame

FAR = [f"{name}_far" for name in CORRECTED]


def test_only_the_longest_chains_have_students_and_only_some_of_them_see_far():
    *short, longest = chains.chain_configs("small")
    assert [config.name for config in short] == [f"chains-{n}" for n in (10, 20, 40, 70)]
    assert not any(config.students for config in short)
    assert list(longest.students) == [*CORRECTED, *FAR]
    teacher = IGNN(features=2, **longest.teacher.arguments)
    for name in CORRECTED:
        usual, far = longest.students[name], longest.students[f"{name}_far"]
        assert usual.start_network(teacher) is None
        network = far.start_network(teacher)
        assert isinstance(network, FarStart)
        assert (network.hops, network.reach) == (150, 0.999)
        # In all else they are the same student.
        assert {**vars(usual), "hops": 150} == vars(far)


@pytest.mark.slow
def test_chains_have_their_rows_and_their_plot(reproduced, monkeypatch):
    few = GraphBudget(teacher_updates=4, student_updates=3, explicit_updates=3)
    monkeypatch.setattr(chains, "TINY", few)
    monkeypatch.setattr(chains, "FEW", (1, 2, 5))
    place = reproduced("chains", "--seeds", "1")
    found = Results.from_json(place / "results" / "tiny" / "chains.json")
    names = ["IGNN", "IGNN, kappa 0.9", "EIGNN", "EIGNN, gamma 0.8"]
    assert [(t.dataset, t.name) for t in found.teachers] == [
        (f"Chains of {length}", name) for length in (5, 10) for name in names
    ]
    assert all(teacher.converged == 1 for teacher in found.teachers)
    at = {(row.dataset, row.method, row.steps): row for row in found.rows}
    for length in (5, 10):
        lone = ("solved", "eignn_closed", "gcn", "gat")
        assert all(at[f"Chains of {length}", name, None].metric is not None for name in lone)
    students = {row.method for row in found.rows} & {*CORRECTED, *FAR}
    assert students == {*CORRECTED, *FAR}
    assert {row.dataset for row in found.rows if row.method in students} == {"Chains of 10"}
    # The hops of a far start are part of its cost.
    for name in CORRECTED:
        usual, far = (at["Chains of 10", f"{name}{end}", 1] for end in ("", "_far"))
        assert far.f_equivalents > 1
        assert usual.f_equivalents > 1
    drawn = plots.LAYOUTS["chains"](found, frame(found))
    assert isinstance(drawn, Figure)
    by_length, by_count, _ = drawn.axes
    lines = {line.get_label(): line for line in by_length.get_lines()}
    assert set(lines) == {*names, "GCN", "GAT"}
    assert list(lines["IGNN"].get_xdata()) == [5, 10]
    converged = [100 * found.teacher(f"Chains of {n}", "EIGNN").metric for n in (5, 10)]
    assert list(lines["EIGNN"].get_ydata()) == pytest.approx(converged)
    assert "Corrected, far" in {line.get_label() for line in by_count.get_lines()}
    # A run of one length alone has its plot too.
    assert plots.LAYOUTS["chains"](*_of_one_length(found)).axes
    assert (place / "results" / "tiny" / "chains.png").stat().st_size > 5000


def _of_one_length(found):
    own = [row for row in found.rows if row.dataset == "Chains of 5"]
    teachers = [one for one in found.teachers if one.dataset == "Chains of 5"]
    part = replace(found, rows=tuple(own), teachers=tuple(teachers))
    return part, frame(part)
