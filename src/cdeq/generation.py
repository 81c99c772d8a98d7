"""Text from a language model with memory, word by word: by solving for its equilibrium, or by its student.

A new word costs evaluations of one token: what it needs of the words before it is the memory of their states.
Because the model is causal, this is the text that reading everything again for each word would give, as long as the
memory holds it. Shapes: T tokens, V words.

    student, _, vocabulary = load_text_student(folder)
    print(generate_text(student, vocabulary, "the old man", tokens=60, steps=2))
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from rich.table import Table
from torch import Tensor

from cdeq.consistency.baking import fold_weights
from cdeq.consistency.student import Student
from cdeq.data.text import END, UNKNOWN, Vocabulary, words_of
from cdeq.equilibrium.contract import Context, EquilibriumModel
from cdeq.equilibrium.memory import Remembering, Segment
from cdeq.equilibrium.states import State
from cdeq.solvers import MAX_STEPS, TOL, Solver, solve_model

VOCABULARY = "vocabulary.json"


class GenerationError(ValueError):
    """A model or a folder that no text can be drawn from; the message says why."""


@runtime_checkable
class LanguageModel(EquilibriumModel, Remembering, Protocol):
    """An equilibrium model of text: it remembers up to `memory` tokens, and `words` scores its readout."""

    memory: int
    words: Any
    """Has `log_probabilities(features)`, (..., V), and `vocabulary`, V."""


class Reading(NamedTuple):
    """A segment that was read: its state and context, the evaluations it took, and whether the solver converged."""

    state: State
    context: Context
    evaluations: int
    converged: bool = True


Reader = Callable[[Segment], Reading]
"""How a method reads a segment."""


class DrawnToken(NamedTuple):
    """A drawn token, its log-probability under the model, and what reading the token before it and drawing took."""

    token: int
    log_probability: float
    evaluations: int
    seconds: float
    converged: bool


# How a segment is read.


def teacher_reader(
    model: LanguageModel,
    *,
    solver: Solver | None = None,
    tol: float = TOL,
    max_steps: int = MAX_STEPS,
) -> Reader:
    """Reading by solving for the equilibrium, to a tolerance."""
    folded = fold_weights(model)

    @torch.no_grad()
    def read(x: Segment) -> Reading:
        context = folded.inject(x)
        found = solve_model(folded, context, solver, tol=tol, max_steps=max_steps)
        return Reading(found.state, context, found.evaluations, bool(found.converged.all()))

    return read


def student_reader(student: Student, steps: int) -> Reader:
    """Reading by `steps` steps of a student, whose weights are made once, not for each token."""
    baked = student.baked(steps)

    def read(x: Segment) -> Reading:
        return Reading(*baked.state(x), steps)

    return read


# Words.


def draw_token(
    log_probabilities: Tensor,
    *,
    temperature: float,
    top: int,
    excluded: Collection[int],
    generator: torch.Generator,
) -> int:
    """A token from log-probabilities (V,): argmax of log p / temperature + Gumbel noise, among the `top` likeliest.

    Every word has noise of its own, so that with the same numbers two models that nearly agree draw the same word.
    """
    scores = log_probabilities.clone()
    scores[list(excluded)] = -math.inf
    best, places = scores.topk(min(top, len(scores)))
    if bool(best[0].isnan()):  # what is not a number is sorted first
        raise GenerationError("the model's probabilities are not numbers: it cannot be drawn from")
    if temperature:
        noise = torch.empty(len(scores)).exponential_(generator=generator).to(best)[places].log()
        # Relative to the likeliest: a tiny temperature then leaves that one, and no infinity.
        best = (best - best[0]) / temperature - noise
    return int(places[best.argmax()])


@torch.no_grad()
def generate(
    reader: Reader,
    model: LanguageModel,
    prompt: Tensor,
    *,
    tokens: int,
    temperature: float = 1.0,
    top: int = 40,
    excluded: Collection[int] = (),
    generator: torch.Generator,
) -> Iterator[DrawnToken]:
    """Draw `tokens` tokens after a prompt (T,), T >= 1, one after another, from the teacher `model`.

    All of the prompt but its last token is read in segments as long as the memory. `temperature` 0 takes the
    likeliest token; only the `top` likeliest are drawn, and never one of those `excluded`.
    """
    check_drawing(tokens=tokens, temperature=temperature, top=top)
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"a prompt must be one token or more, (T,), not {tuple(prompt.shape)}")
    if len(set(excluded)) >= model.words.vocabulary:
        raise ValueError("all words are excluded: there is none to draw")
    memory = model.no_memory(1)
    for segment in prompt[:-1].split(max(model.memory, 1)):
        if len(segment):  # an empty tensor splits into itself
            read = reader(Segment(segment[None], memory))
            memory = model.remember(read.state, read.context)
    token = prompt[-1:]
    for _ in range(tokens):
        began = time.perf_counter()
        read = reader(Segment(token[None], memory))
        features = model.readout(read.state, read.context)[0, -1]
        scores = model.words.log_probabilities(features)
        drawn = draw_token(
            scores, temperature=temperature, top=top, excluded=excluded, generator=generator
        )
        memory = model.remember(read.state, read.context)
        seconds = time.perf_counter() - began
        yield DrawnToken(drawn, float(scores[drawn]), read.evaluations, seconds, read.converged)
        token = prompt.new_tensor([drawn])


def generate_text(
    model: Student | LanguageModel,
    vocabulary: Vocabulary,
    prompt: str = "",
    *,
    tokens: int = 60,
    steps: int = 2,
    temperature: float = 1.0,
    top: int = 40,
    seed: int = 0,
) -> str:
    """`tokens` words after a prompt: by a student with `steps` steps for each, or by a teacher at its equilibrium.

    A word of the prompt that is not in the vocabulary is read as `<unk>`, which itself is never drawn.
    """
    teacher = require_language_model(model.teacher if isinstance(model, Student) else model)
    reader = student_reader(model, steps) if isinstance(model, Student) else teacher_reader(teacher)
    drawn = generate(
        reader,
        teacher,
        prompt_tokens(vocabulary, prompt)[0],
        tokens=tokens,
        temperature=temperature,
        top=top,
        excluded=excluded_tokens(vocabulary),
        generator=torch.Generator().manual_seed(seed),
    )
    return vocabulary.decode([one.token for one in drawn])


def require_language_model(model: Any) -> LanguageModel:
    """The model itself; refuses one that cannot write."""
    if not isinstance(model, LanguageModel) or not hasattr(model.words, "log_probabilities"):
        raise GenerationError(
            f"a {type(model).__name__} cannot write: it has no memory or no words, as a DEQTransformer has"
        )
    return model


def check_drawing(*, tokens: int, temperature: float, top: int) -> None:
    """Refuse what no text can be drawn with."""
    for name, count in (("tokens", tokens), ("top", top)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and not negative, not {temperature}")


def prompt_tokens(vocabulary: Vocabulary, text: str) -> tuple[Tensor, tuple[str, ...]]:
    """The tokens (T,) of a prompt, and its words that are not in the vocabulary; `<eos>` for an empty prompt."""
    lines = text.split("\n")
    unknown = dict.fromkeys(word for word in words_of(lines) if word not in vocabulary.ids)
    tokens = vocabulary.encode(lines)
    # What is generated goes on with the last line, so its end is not part of the prompt.
    return (tokens[:-1] if len(tokens) > 1 else tokens), tuple(unknown)


def excluded_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    """The tokens that no text should show: `<unk>`."""
    return (vocabulary.ids[UNKNOWN],)


def printable(word: str) -> str:
    """A word as a terminal may print it: `<eos>` is a line's end, and what is not printable is spelt out."""
    if word == END:
        return "\n"
    return word if word.isprintable() else word.encode("unicode_escape").decode()


def load_text_student(folder: str | Path) -> tuple[Student, LanguageModel, Vocabulary]:
    """A student of a language model, its teacher, and their words, as `cdeq reproduce table1` keeps them."""
    folder = Path(folder)
    if not folder.is_dir():
        raise GenerationError(
            f"there is no folder {folder}: `cdeq reproduce table1` makes one, in runs/models"
        )
    student = Student.load(folder)
    try:
        teacher = require_language_model(student.teacher)
    except GenerationError as error:
        raise GenerationError(f"{folder}: {error}") from None
    path = folder / VOCABULARY
    if not path.exists():
        raise GenerationError(
            f"{folder} has no {VOCABULARY}: save the words that the student was trained on there, "
            "with Vocabulary.to_json"
        )
    try:
        vocabulary = Vocabulary.from_json(path)
    except ValueError as error:
        raise GenerationError(str(error)) from error
    if len(vocabulary) != teacher.words.vocabulary:
        raise GenerationError(
            f"{path} has {len(vocabulary)} words, the model {teacher.words.vocabulary}: "
            "it belongs to another model"
        )
    return student, teacher, vocabulary


# What it took.


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """The tokens that a method drew, and what each took; `steps` is None for the teacher."""

    steps: int | None
    tokens: tuple[int, ...]
    seconds_per_token: float
    """The median."""
    evaluations_per_token: float
    unconverged: int
    """Tokens at which the solver ran out of its budget."""

    @classmethod
    def of(cls, steps: int | None, drawn: Sequence[DrawnToken]) -> GeneratedText:
        return cls(
            steps=steps,
            tokens=tuple(one.token for one in drawn),
            seconds_per_token=median(one.seconds for one in drawn),
            evaluations_per_token=fmean(one.evaluations for one in drawn),
            unconverged=sum(not one.converged for one in drawn),
        )

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token

    def same_words(self, other: GeneratedText) -> int:
        """How many words both texts begin with."""
        pairs = list(zip(self.tokens, other.tokens, strict=False))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def row(self, teacher: GeneratedText, vocabulary: Vocabulary) -> dict[str, Any]:
        """The measurements, beside those of the teacher, by name."""
        return {
            "method": "teacher" if self.steps is None else "student",
            "steps": self.steps,
            "evaluations_per_token": self.evaluations_per_token,
            "seconds_per_token": self.seconds_per_token,
            "tokens_per_second": self.tokens_per_second,
            "times_faster": teacher.seconds_per_token / self.seconds_per_token,
            "same_words": self.same_words(teacher),
            "unconverged": self.unconverged,
            "text": vocabulary.decode(self.tokens),
        }


def method_name(steps: int | None) -> str:
    """The teacher, or the student and its steps."""
    return "teacher" if steps is None else f"student, {steps} step{'s' * (steps > 1)}"


def speed_table(texts: Sequence[GeneratedText]) -> Table:
    """How fast each method wrote, the teacher first."""
    table = Table(title="Median over the tokens; evaluations are a mean", title_justify="left")
    table.add_column("method", no_wrap=True)
    for name in (
        "evaluations per token",
        "tokens per second",
        "times faster",
        "same words at first",
    ):
        table.add_column(name, justify="right")
    teacher = texts[0]
    for one in texts:
        table.add_row(
            method_name(one.steps),
            f"{one.evaluations_per_token:.1f}",
            f"{one.tokens_per_second:.0f}",
            "" if one is teacher else f"{teacher.seconds_per_token / one.seconds_per_token:.1f}",
            "" if one is teacher else f"{one.same_words(teacher)} of {len(teacher.tokens)}",
        )
    return table
