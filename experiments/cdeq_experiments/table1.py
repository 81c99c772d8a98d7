"""Table 1 of the paper: word-level language modelling, implicit and explicit, at 1, 2, 4, 8 and 12 evaluations."""

from __future__ import annotations

from pathlib import Path

from cdeq.evaluation import Results
from cdeq.generation import VOCABULARY
from cdeq_experiments.options import ExperimentError, Options
from cdeq_experiments.pieces import table_of
from cdeq_experiments.subjects import trained_student
from cdeq_experiments.table1_claims import write_table1
from cdeq_experiments.text_cells import TextCell
from cdeq_experiments.text_plans import SCALES


def table1(options: Options) -> Results:
    """Language modelling; table1.json, table1.md and table1.png, and the student as a folder to generate from."""
    plan = SCALES[options.scale]
    if options.only:
        raise ExperimentError("table1 has one text a scale: --only has no meaning")
    plan.require(options.data)
    cell = TextCell(plan=plan, options=options)
    results = table_of([cell], "table1")
    write_table1(results, options.out)
    cell.say(f"the student is in {keep_student(cell)}: see cdeq generate --help")
    return results


def keep_student(cell: TextCell) -> Path:
    """The anchored student of seed 0 with its words, as a folder."""
    folder = cell.options.runs.parent / "models" / cell.plan.name
    teacher, _ = cell.trained_teacher()
    student, _ = trained_student(cell, teacher, cell.students["anchored"], 0)
    student.save(folder)
    cell.corpus.vocabulary.to_json(folder / VOCABULARY)
    return folder
