"""What is said of results: who wins, who loses and where, and nothing that one seed cannot show."""

import re

import pytest

from builders import results, row, teacher_result
from cdeq_experiments.pages.frame import with_published
from cdeq_experiments.pages.sentences import counted, findings, plain

PERPLEXITY = {"metric_name": "perplexity", "metric": 210.0, "higher_is_better": False}


def table(*rows, counts=(1, 2), **page):
    """The findings of a table on one data set."""
    page = {"layout": "table", "title": "T", "counts": {"Blocks": list(counts)}, **page}
    return findings(results(*rows, page=page))


def said(lines, start):
    """The line that begins so, behind the name of the data set."""
    [line] = [line for line in lines if line.startswith(f"**Blocks.** {start}")]
    return line


def curve(method, *scores, distances=(), counts=(1, 2), **fields):
    distances = distances or [None] * len(scores)
    triples = zip(counts, scores, distances, strict=True)
    return [row(method, k, score, distance=far, **fields) for k, score, far in triples]


SOLVER = curve("picard", 0.5, 0.6, distances=(0.9, 0.8))


def test_a_student_that_wins_everywhere():
    lines = table(*SOLVER, *curve("anchored", 0.77, 0.83, distances=(0.2, 0.1)))
    line = said(lines, "Anchored: closes")
    assert "closes 90% and 110% of the gap at 1 and 2 evaluations" in line
    assert "No rival is more accurate" in line
    assert "No rival is nearer to the equilibrium" in line


def test_who_is_lost_to_is_named_with_all_counts():
    rows = [*SOLVER, *curve("anchored", 0.77, 0.83, distances=(0.2, 0.6))]
    rows += curve("anderson", 0.5, 0.7, distances=(0.9, 0.5))
    rows += curve("eignn", 0.78, 0.84) + curve("few_step", 0.79, 0.9)
    line = said(table(*rows), "Anchored: ")
    assert "More accurate than it: EIGNN and Few-step at every count." in line
    assert "Nearer to the equilibrium than it: Anderson at 2." in line


def test_as_good_as_written_is_not_better():
    rows = [*SOLVER, *curve("anchored", 0.5, 0.6), *curve("paper", 0.7001, 0.7)]
    assert "No rival is more accurate" in said(table(*rows), "Paper: ")
    assert "More accurate than it: Paper at every count" in said(table(*rows), "Anchored: ")


def test_a_student_that_diverged_loses_to_all_that_did_not():
    rows = [*SOLVER, *curve("paper", None, None)]
    line = said(table(*rows), "Paper: ")
    assert "More accurate than it: Picard at every count" in line
    assert "closes" not in line


def test_everything_diverged():
    rows = [*curve("picard", None, None), *curve("paper", None, None)]
    assert table(*rows) == ("**Blocks.** Paper: nothing to compare with.",)


def test_explicit_models_and_other_students_of_ours_are_no_rivals():
    rows = [*SOLVER, *curve("anchored", 0.7, 0.7), row("gat", None, 0.99)]
    rows += curve("anchored_parts", 0.9, 0.9)
    line = said(table(*rows), "Anchored: ")
    assert "No rival is more accurate" in line


def test_no_student_no_sentence():
    assert table(*SOLVER) == ()


def test_distances_to_another_equilibrium_are_not_compared():
    rows = [*SOLVER, *curve("anchored", 0.7, 0.7, distances=(0.2, 0.2))]
    rows += curve("eignn", 0.1, 0.1, distances=(0.1, 0.1))
    alike = ["picard", "anchored"]
    assert "No rival is nearer" in said(table(*rows, same_equilibrium=alike), "Anchored: ")
    assert "EIGNN at every count" in said(table(*rows), "Anchored: ")


# Wall-clock to within 1% of the converged 80%.


def speed(*rows):
    return said(table(*rows), "Anchored is within")


def test_the_student_is_compared_with_the_quickest_solver_and_with_the_tolerance():
    rows = [
        row("picard", 1, 0.5, seconds=0.01),
        row("picard", 8, 0.8, seconds=0.08),
        row("anderson", 6, 0.795, seconds=0.06),
        row("anchored", 1, 0.7, seconds=0.02),
        row("anchored", 2, 0.793, seconds=0.03),
        row("anchored", 4, 0.8, seconds=0.05),
        row("solved", None, 0.8, seconds=0.12),
    ]
    line = speed(*rows)
    assert "within 1% of the converged accuracy (80.0%) after 30 ms and 2 evaluations" in line
    assert "2.0 times faster than the quickest solver, Anderson with 6" in line
    assert line.endswith("and 4.0 times faster than Anderson run to its tolerance.")


def test_slower_than_the_solver_is_said():
    line = speed(row("picard", 1, 0.8, seconds=0.01), row("anchored", 1, 0.8, seconds=0.03))
    assert "3.0 times slower than the quickest solver, Picard with 1." in line


def test_a_solver_that_never_arrives():
    line = speed(row("picard", 1, 0.1, seconds=0.01), row("anchored", 1, 0.8, seconds=0.03))
    assert line.endswith("no solver at any count that was timed.")


def test_a_student_that_never_arrives():
    lines = table(*SOLVER, *curve("anchored", 0.5, 0.5))
    assert said(lines, "Anchored does not come within 1% of the converged accuracy (80.0%)")


# Ablations.


def ablation(scores, *, experiment="window", default="m = 1", counts=(8,), reported=8, seeds=1):
    """Findings of an ablation on WikiText-2 with these scores by variant."""
    rows = [
        row(name, k, score + 0.5 * seed, dataset="WikiText-2", distance=0.1, seed=seed)
        for name, score in scores.items()
        for k in counts
        for seed in range(seeds)
    ]
    page = {
        "layout": "ablation",
        "title": "T",
        "default": default,
        "counts": {"WikiText-2": list(counts)},
        "reported": {"WikiText-2": reported},
    }
    teacher = teacher_result("WikiText-2", **PERPLEXITY)
    made = results(*rows, teachers=[teacher], experiment=experiment, page=page)
    return findings(with_published(made))


def test_the_best_choice_and_the_default():
    [line] = ablation({"m = 1": 230.0, "m = 3": 220.0, "m = 7": 210.0})
    assert "With 8 evaluations *m = 7* is best (210.0)" in line
    assert "*m = 1*, the default, has 230.0; in the paper *m = 7* is best." in line


def test_the_default_is_best():
    [line] = ablation({"m = 1": 200.0, "m = 7": 210.0})
    assert "*m = 1*, the default, is best (200.0); in the paper *m = 7* is best." in line


def test_one_seed_cannot_tell_close_choices_apart():
    [line] = ablation({"m = 1": 212.9, "m = 3": 213.2})
    assert "one seed cannot tell the choices apart (212.9 to 213.2)" in line
    [line] = ablation({"m = 1": 212.9, "m = 3": 212.5, "m = 7": 250.0})
    assert "*m = 1*, the default, has 212.9, which one seed cannot tell from it" in line


def test_several_seeds_have_a_spread_to_compare_with():
    [line] = ablation({"m = 1": 212.9, "m = 3": 213.2}, seeds=2)
    assert "the seeds cannot tell the choices apart" in line
    [line] = ablation({"m = 1": 212.9, "m = 3": 213.6}, seeds=2)
    assert "*m = 1*, the default, is best" in line


def test_of_what_the_paper_does_not_have_the_first_count_is_told_too():
    lines = ablation(
        {"paper": 220.0, "anchored": 210.0},
        experiment="recipe",
        default="anchored",
        counts=(1, 2, 8),
    )
    assert [re.search(r"With (\d)", line)[1] for line in lines] == ["1", "8"]
    assert all("is nearest to the equilibrium (0.100)" in line for line in lines)


# The others.


def test_residuals_say_who_is_smallest_where():
    rows = [row("anderson", k, None, residual=0.5**k) for k in range(1, 6)]
    rows += [row("anchored", k, None, residual=0.1) for k in range(1, 6)]
    [line] = findings(results(*rows, page={"layout": "residuals"}))
    assert "Smallest residual: Anchored at 1, 2 and 3; Anderson at 4 and 5." in line


def test_certified_solving_is_a_ratio_of_times():
    rows = [
        row("solver to 0.01", None, None, seconds=0.2, f_equivalents=8.0),
        row("certified to 0.01", None, None, seconds=0.1, f_equivalents=5.0),
    ]
    [line] = findings(results(*rows, page={"layout": "certified"}))
    assert "takes 0.50 of Anderson's time (5.0 evaluations instead of 8.0)" in line


@pytest.mark.parametrize("layout", ["residuals", "cost", "certified", "table"])
def test_nothing_measured_nothing_said(layout):
    empty = results(row("gcn", None, None), page={"layout": layout, "counts": {"Blocks": [1]}})
    assert findings(empty) == ()


def test_names_are_shown_as_they_are():
    assert plain("a*b|c`<d>[e]\\") == r"a\*b\|c\`\<d\>\[e\]" + "\\\\"
    assert plain("lambda_1 = 0.8, + own rollouts") == "lambda_1 = 0.8, + own rollouts"


def test_counts_in_words():
    assert counted([1]) == "1 evaluation"
    assert counted([1.0, 2.0, 8.0]) == "1, 2 and 8 evaluations"
