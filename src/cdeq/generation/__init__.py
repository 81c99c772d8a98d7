"""Text from a language model with memory, word by word, by the model itself or by its student."""

from cdeq.generation.drawing import (
    DrawnToken,
    check_drawing,
    draw_token,
    generate,
    generate_text,
)
from cdeq.generation.language import (
    VOCABULARY,
    GenerationError,
    LanguageModel,
    excluded_tokens,
    load_text_student,
    printable,
    prompt_tokens,
    require_language_model,
)
from cdeq.generation.readers import CachedReader, Reader, Reading, student_reader, teacher_reader
from cdeq.generation.speed import GeneratedText, method_name, speed_table

__all__ = [
    "VOCABULARY",
    "CachedReader",
    "DrawnToken",
    "GeneratedText",
    "GenerationError",
    "LanguageModel",
    "Reader",
    "Reading",
    "check_drawing",
    "draw_token",
    "excluded_tokens",
    "generate",
    "generate_text",
    "load_text_student",
    "method_name",
    "printable",
    "prompt_tokens",
    "require_language_model",
    "speed_table",
    "student_reader",
    "teacher_reader",
]
