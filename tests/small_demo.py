"""`cdeq demo --task graph` with a part of its updates: this file is started in place of the program."""

from __future__ import annotations

import sys
from dataclasses import replace

from brief import brief_recipes
from cdeq import cli
from cdeq.consistency.recipes import RECIPES
from cdeq.demo import tasks
from cdeq.demo.task import Task

TEACHER, STUDENTS, STAGES = 60, 60, 40
"""Updates of the teacher, of each student, and of each first stage."""


def graph(seed: int = 0) -> Task:
    task = tasks.graph(seed)
    students = {
        name: replace(config, fit=replace(config.fit, updates=STUDENTS))
        for name, config in task.students.items()
    }
    teach = replace(task.teach, fit=replace(task.teach.fit, updates=TEACHER))
    return replace(task, teach=teach, students=students)


CHANGES = [
    *((RECIPES, name, make) for name, make in brief_recipes(STAGES).items()),
    (tasks.DEMO_TASKS, "graph", graph),
]
"""Tables of the library, what is changed in them, and to what."""

if __name__ == "__main__":
    for table, name, value in CHANGES:
        table[name] = value
    sys.argv[0] = "cdeq"
    sys.exit(cli.main())
