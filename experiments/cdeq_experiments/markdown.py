"""Markdown as our own pages have it: headings, bullets, tables, paragraphs. Everything else is text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Heading:
    """`level` 1 is the title."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Text to the next blank line or block."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A flat list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """A table; `sides` are the columns' alignments: left, right or center."""

    head: tuple[str, ...]
    sides: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = Heading | Paragraph | Bullets | Grid

_HEADING = re.compile(r"(#{1,6})\s+(.*)")
_BULLET = re.compile(r"\s*[-*]\s+(.*)")
_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+\s*")
_CELL_PIECE = re.compile(r"\\\||`+[^`]*`+|[^|`\\]+|.")
_INLINE = re.compile(
    r"(?P<ticks>`+)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|\*\*(?P<bold>.+?)\*\*"
    r"|\[(?P<label>[^\]]+)\]\((?P<url>(?:https?://|#)[^)\s]+)\)"
)


def read_markdown(text: str) -> list[Block]:
    """Headings, bullets, tables and paragraphs, their lines joined; raises ValueError for a ragged table."""
    lines = text.split("\n")
    blocks: list[Block] = []
    at = 0

    def starts(i: int) -> bool:
        """Whether no text runs on into this line."""
        return (
            not lines[i].strip()
            or bool(_HEADING.match(lines[i]) or _BULLET.match(lines[i]))
            or (i + 1 < len(lines) and lines[i][:1] == "|" and bool(_RULE.fullmatch(lines[i + 1])))
        )

    def running(first: str) -> str:
        """`first` and the lines it is wrapped over."""
        nonlocal at
        parts = [first.strip()]
        at += 1
        while at < len(lines) and not starts(at):
            parts.append(lines[at].strip())
            at += 1
        return " ".join(parts)

    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif heading := _HEADING.match(line):
            blocks.append(Heading(len(heading[1]), heading[2].strip()))
            at += 1
        elif _BULLET.match(line):
            items = []
            while at < len(lines) and (bullet := _BULLET.match(lines[at])):
                items.append(running(bullet[1]))
            blocks.append(Bullets(tuple(items)))
        elif starts(at):
            end = at
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            blocks.append(_grid(lines[at:end]))
            at = end
        else:
            blocks.append(Paragraph(running(line)))
    return blocks


def _grid(lines: Sequence[str]) -> Grid:
    head, rules, *rows = map(_cells, lines)
    for cells in (rules, *rows):
        if len(cells) != len(head):
            raise ValueError(
                f"a table row has {len(cells)} cells, its head {len(head)}: {' | '.join(cells)}"
            )
    sides = [
        "left" if not rule.endswith(":") else "center" if rule.startswith(":") else "right"
        for rule in rules
    ]
    return Grid(head, tuple(sides), tuple(rows))


def _cells(line: str) -> tuple[str, ...]:
    """The cells between the pipes; a pipe in `code` or after a backslash is text."""
    cells = [""]
    for piece in _CELL_PIECE.findall(line.strip().removeprefix("|")):
        if piece == "|":
            cells.append("")
        else:
            cells[-1] += piece.replace("\\|", "|")
    if len(cells) > 1 and not cells[-1]:  # what follows the closing pipe
        cells.pop()
    return tuple(cell.strip() for cell in cells)


def inline(text: str) -> str:
    """`code`, **bold** and links to the web or within the page as HTML, all else escaped."""
    done, at = [], 0
    for match in _INLINE.finditer(text):
        done.append(escape(text[at : match.start()]))
        if match["code"] is not None:
            done.append(f"<code>{escape(match['code'])}</code>")
        elif match["bold"] is not None:
            done.append(f"<b>{inline(match['bold'])}</b>")
        else:
            done.append(f'<a href="{escape(match["url"])}">{escape(match["label"])}</a>')
        at = match.end()
    return "".join([*done, escape(text[at:])])
