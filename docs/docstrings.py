"""What the API reference makes of our docstrings, which are plain text with `code` in backticks.

A sentence on a line of its own that begins with a name in backticks becomes an item of a list; stars and underscores
outside of backticks stay what they are.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


def as_markdown(text: str) -> str:
    """The text of a docstring as Markdown that shows it as it is written."""
    text = re.sub(r"\. (`\w+`( \([^)]*\))?: )", r".\n\1", text)  # an item in the middle of a line
    lines: list[str] = []
    in_item, ended = False, True
    for line in text.splitlines():
        if line.startswith("`") and ended:
            lines += [f"- {line}"] if in_item else ["", f"- {line}"]
            in_item = True
        elif in_item and line and (line.startswith(" ") or not ended):
            lines.append(f"  {line.strip()}")
        else:
            lines += ["", line] if in_item else [line]
            in_item = False
        ended = not line or line.endswith((".", ":"))
    parts = re.split(r"(`[^`]*`)", "\n".join(lines))
    return "".join(p if p.startswith("`") else re.sub(r"([*_<])", r"\\\1", p) for p in parts)


class Docstrings(Extension):
    """Applied to every docstring that griffe reads."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
