"""Text from a language model with memory, word by word: by solving for its equilibrium, or by its student.

A new word costs evaluations of one token, a segment of its own: what it needs of the words before it is the memory of
their states, or with a cache their keys and values. Because the model is causal, its equilibrium is that of the whole
text read at once, as long as the memory holds it. Shapes: T tokens, V words.

    student, _, vocabulary = load_text_student(folder)
    print(generate_text(student, vocabulary, "the old man", tokens=60, steps=2))
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cdeq.consistency.student import Student
from cdeq.data.text import Vocabulary
from cdeq.equilibrium.memory import Segment
from cdeq.generation.language import (
    GenerationError,
    LanguageModel,
    excluded_tokens,
    prompt_tokens,
    require_language_model,
)
from cdeq.generation.readers import CachedReader, Reader, Reading, student_reader, teacher_reader

ALL_BITS = 2**64 - 1


class DrawnToken(NamedTuple):
    """A drawn token, its log-probability under the model, and what reading the token before it and drawing took."""

    token: int
    log_probability: float
    evaluations: int
    seconds: float
    converged: bool


def draw_token(
    log_probabilities: Tensor,
    *,
    temperature: float,
    top: int,
    excluded: Collection[int],
    generator: torch.Generator,
) -> int:
    """A token from log-probabilities (V,): argmax of log p / temperature + Gumbel noise, among the `top` likeliest.

    Every word has noise of its own, so that with the same key two models that nearly agree draw the same word.
    """
    likeliest = log_probabilities.topk(min(top + len(excluded), len(log_probabilities)))
    scores, words = (part.tolist() for part in likeliest)
    if math.isnan(scores[0]):  # what is not a number is sorted first
        raise GenerationError("the model's probabilities are not numbers: it cannot be drawn from")
    allowed = [pair for pair in zip(scores, words, strict=True) if pair[1] not in excluded][:top]
    highest, word = allowed[0]
    if not temperature:
        return word
    key = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    # Relative to the likeliest: a tiny temperature then leaves that one, and no infinity.
    noisy = [
        (score - highest) / temperature - math.log(exponential_noise(word, key))
        for score, word in allowed
    ]
    return allowed[noisy.index(max(noisy))][1]


def exponential_noise(word: int, key: int) -> float:
    """An exponential variate for a word, the same for the same word and key whatever the others.

    SplitMix64 (Steele et al. 2014) of the word: noise for a whole vocabulary would take longer than a student's step.
    In plain Python, which for the few likeliest words is sooner done than a dozen calls of a library.
    """
    bits = (word * 0x9E3779B97F4A7C15 + key) & ALL_BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & ALL_BITS
    uniform = (((bits ^ (bits >> 31)) >> 11) + 0.5) * 2.0**-53  # never 0 or 1
    return -math.log(uniform)


@torch.inference_mode()
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
    read: Reading | None = None
    for segment in prompt[:-1].split(max(model.memory, 1)):
        if len(segment):  # an empty tensor splits into itself
            read = read_on(reader, model, segment, read)
    token = prompt[-1:]
    # Made once for a text, not for each word.
    score = getattr(model.words, "scorer", lambda: model.words.log_probabilities)()
    for _ in range(tokens):
        began = time.perf_counter()
        read = read_on(reader, model, token, read)
        scores = score(model.readout(read.state, read.context)[0, -1])
        drawn = draw_token(
            scores, temperature=temperature, top=top, excluded=excluded, generator=generator
        )
        seconds = time.perf_counter() - began
        yield DrawnToken(drawn, float(scores[drawn]), read.evaluations, seconds, read.converged)
        token = prompt.new_tensor([drawn])


def read_on(reader: Reader, model: LanguageModel, tokens: Tensor, last: Reading | None) -> Reading:
    """Read tokens (T,) after those of the last reading, with the cache if the reader has one."""
    if last is None:
        return reader(Segment(tokens[None], model.no_memory(1)))
    x = Segment(tokens[None], model.remember(last.state, last.context))
    return reader.follow(x, last) if isinstance(reader, CachedReader) else reader(x)


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
    cache: bool = True,
) -> str:
    """`tokens` words after a prompt: by a student with `steps` steps for each, or by a teacher at its equilibrium.

    A word of the prompt that is not in the vocabulary is read as `<unk>`, which itself is never drawn. Without `cache`
    keys and values are made anew for each word: the same text, to rounding, and slower.
    """
    teacher = require_language_model(model.teacher if isinstance(model, Student) else model)
    reader = (
        student_reader(model, steps, cache=cache)
        if isinstance(model, Student)
        else teacher_reader(teacher, cache=cache)
    )
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


def check_drawing(*, tokens: int, temperature: float, top: int) -> None:
    """Refuse what no text can be drawn with."""
    for name, count in (("tokens", tokens), ("top", top)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and not negative, not {temperature}")
