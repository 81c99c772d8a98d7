"""Language models that text can be drawn from, saved students of them, and their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from cdeq.consistency.deployment import ready_to_compute
from cdeq.consistency.student import Student
from cdeq.data.text import END, UNKNOWN, Vocabulary, words_of
from cdeq.equilibrium.contract import EquilibriumModel
from cdeq.equilibrium.memory import Remembering

VOCABULARY = "vocabulary.json"


class GenerationError(ValueError):
    """A model or a folder that no text can be drawn from; the message says why."""


@runtime_checkable
class LanguageModel(EquilibriumModel, Remembering, Protocol):
    """An equilibrium model of text: it remembers up to `memory` tokens, and `words` scores its readout."""

    memory: int
    words: Any
    """Has `log_probabilities(features)`, (..., V), `vocabulary`, V, and maybe `scorer()`, the same for (D,) alone."""


def require_language_model(model: Any) -> LanguageModel:
    """The model itself; refuses one that cannot write."""
    if not isinstance(model, LanguageModel) or not hasattr(model.words, "log_probabilities"):
        raise GenerationError(
            f"a {type(model).__name__} cannot write: it has no memory or no words, as a DEQTransformer has"
        )
    return model


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
    """A student of a language model, its teacher, and their words, from the zoo or as `cdeq reproduce` keeps them."""
    folder = Path(folder)
    if not folder.is_dir():
        raise GenerationError(
            f"there is no folder {folder}: the repository has some in zoo/, and `cdeq reproduce zoo` makes them in "
            "runs/models"
        )
    student = ready_to_compute(Student.load(folder))
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
