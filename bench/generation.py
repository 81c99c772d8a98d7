"""Tokens per second of a language model and its student, with and without the cache.

    python bench/generation.py [zoo/deq-transformer-wikitext2] [--tokens 100] [--steps 1 2] [--repeats 15] [--json FILE]

A folder is what `cdeq reproduce table1` keeps of a text: a student, its teacher, its words. All methods write after the
same prompt, which fills the memory and is not timed, in one run, taking turns. On a busy machine the ratios of CPU time
say more than those of wall time (with one thread).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from cdeq import generation
from cdeq.evaluation import median_times
from common import Measurement, Options, markdown_table

TARGETS = {"times_teacher": 5.0, "times_cached_teacher": 3.0}
"""A student of one step with the cache, in tokens per second over those of the teacher without and with it."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Options):
    folder: tyro.conf.Positional[Path] = Path("zoo/deq-transformer-wikitext2")
    """A saved student of a language model with its vocabulary.json."""
    tokens: int = 100
    """How many words are written and timed at a time."""
    steps: tuple[int, ...] = (1, 2)
    """Steps of the student."""
    tolerance: float = 1e-3
    """Relative residual to which the teacher is solved."""


def measure(options: GenerationOptions) -> list[dict[str, Any]]:
    """A row for each method, the teacher first, without and with the cache."""
    student, teacher, vocabulary = generation.load_text_student(options.folder)
    readers: dict[tuple[int | None, bool], generation.Reader] = {}
    for cache in (False, True):
        readers[None, cache] = generation.teacher_reader(
            teacher, tol=options.tolerance, cache=cache
        )
        for steps in options.steps:
            readers[steps, cache] = generation.student_reader(student, steps, cache=cache)
    drawn: dict[Any, list[generation.DrawnToken]] = {}
    prompt = torch.arange(teacher.memory + 2) % len(vocabulary)

    def writing(name: Any) -> Callable[[], object]:
        words = generation.generate(
            readers[name],
            teacher,
            prompt,
            tokens=options.tokens + 1,
            excluded=generation.excluded_tokens(vocabulary),
            generator=torch.Generator().manual_seed(0),
        )
        first = next(words)  # with the whole prompt

        def write() -> None:
            drawn[name] = [first, *words]

        return write

    times = median_times({name: lambda n=name: writing(n) for name in readers}, options.repeats)
    texts = {(k, c): generation.GeneratedText.of(k, drawn[k, c]) for k, c in readers}
    rows = []
    for (steps, cache), (wall, cpu) in times.items():
        text = texts[steps, cache]
        plain, cached = times[None, False], times[None, True]
        rows.append(
            {
                "method": generation.method_name(steps),
                "steps": steps,
                "cache": cache,
                "evaluations_per_token": text.evaluations_per_token,
                "tokens_per_second": options.tokens / wall,
                "tokens_per_cpu_second": options.tokens / cpu,
                "times_teacher": plain[0] / wall,
                "times_cached_teacher": cached[0] / wall,
                "times_teacher_cpu": plain[1] / cpu,
                "times_cached_teacher_cpu": cached[1] / cpu,
                "same_words_without_cache": text.same_words(texts[steps, False]),
                "words": len(text.tokens),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], folder: Path) -> str:
    """Speeds, and how they compare with the teacher's; wall time, then CPU time."""
    return markdown_table(
        f"Text from {folder.name}: tokens per second, and over the teacher's without and with the cache (CPU time).",
        [
            *("method", "cache", "evaluations per token", "tokens per second"),
            *("times teacher", "times teacher with cache", "same words as without cache"),
        ],
        [
            [
                row["method"],
                "yes" if row["cache"] else "no",
                f"{row['evaluations_per_token']:.1f}",
                f"{row['tokens_per_second']:.0f} ({row['tokens_per_cpu_second']:.0f})",
                f"{row['times_teacher']:.1f} ({row['times_teacher_cpu']:.1f})",
                f"{row['times_cached_teacher']:.1f} ({row['times_cached_teacher_cpu']:.1f})",
                f"{row['same_words_without_cache']} of {row['words']}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    options = tyro.cli(GenerationOptions, description=__doc__)
    measurement = Measurement(options)
    rows = measure(options)
    shown = table(rows, options.folder)
    print(shown)
    measurement.finish(rows, shown, targets=TARGETS, tokens=options.tokens)


if __name__ == "__main__":
    main()
