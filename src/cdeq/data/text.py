"""Word-level text: a vocabulary, a corpus of three splits, and the parallel streams a language model reads.

Shapes: T tokens in a text, B streams, S tokens of a stream, L tokens of a segment.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdeq.files import atomic_write_text
from cdeq.labels import IGNORED

END = "<eos>"
UNKNOWN = "<unk>"


def words_of(lines: Iterable[str]) -> Iterator[str]:
    """The words of each line (`line.split()`), then `<eos>`: blank lines count, as WikiText and PTB are counted."""
    if isinstance(lines, str):
        raise TypeError("lines must be an iterable of lines, not one string: split it at newlines")
    for line in lines:
        yield from line.split()
        yield END


@dataclass(frozen=True)
class Vocabulary:
    """The words a text is made of; a token is a word's place.

    Ordered by falling frequency, as an adaptive softmax needs it, and then by first appearance, so that the same text
    always gives the same tokens.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        missing = [word for word in (END, UNKNOWN) if word not in self.ids]
        if missing:
            raise ValueError(f"a vocabulary must have {' and '.join(missing)}; use Vocabulary.of")
        if len(self.ids) != len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(f"{twice!r} is in the vocabulary more than once")
        for word in self.words:
            if word.split() != [word]:
                raise ValueError(f"{word!r} is no word: words are not empty and hold no space")

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The token of each word."""
        return {word: i for i, word in enumerate(self.words)}

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the words in their order: two vocabularies with the same one give the same tokens."""
        return hashlib.sha256("\n".join(self.words).encode(errors="surrogatepass")).hexdigest()

    @classmethod
    def of(cls, lines: Iterable[str], minimum: int = 1) -> Vocabulary:
        """The words that appear in the lines `minimum` times or more, with `<eos>` and `<unk>`."""
        return cls.of_words(words_of(lines), minimum)

    @classmethod
    def of_words(cls, words: Iterable[str], minimum: int = 1) -> Vocabulary:
        """`of` for words that `words_of` gave; `<unk>` is as frequent as it will be once the text is encoded."""
        if minimum < 1:
            raise ValueError(f"minimum must be at least 1, not {minimum}")
        counts = Counter(words)
        special = (END, UNKNOWN)
        kept = {w: count for w, count in counts.items() if count >= minimum or w in special}
        kept.setdefault(END, 0)
        kept[UNKNOWN] = kept.get(UNKNOWN, 0) + counts.total() - sum(kept.values())
        # Sorting is stable, and a dict keeps the order of first appearance.
        return cls(tuple(sorted(kept, key=lambda word: -kept[word])))

    def encode(self, lines: Iterable[str]) -> Tensor:
        """Lines to tokens (T,), int64: `<eos>` after every line, `<unk>` for words not in the vocabulary."""
        token, unknown = self.ids.get, self.ids[UNKNOWN]
        # Straight into an array: a list of a hundred million tokens would not fit beside it.
        tokens = np.fromiter((token(word, unknown) for word in words_of(lines)), np.int64)
        return torch.from_numpy(tokens)

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """The words of tokens, with single spaces between them and a line's end for `<eos>`."""
        places = tokens.flatten().tolist() if isinstance(tokens, Tensor) else list(tokens)
        lines: list[list[str]] = [[]]
        for place in places:
            if not 0 <= place < len(self):
                raise ValueError(f"{place} is no token of a vocabulary of {len(self)} words")
            if self.words[place] == END:
                lines.append([])
            else:
                lines[-1].append(self.words[place])
        return "\n".join(" ".join(line) for line in lines)

    def to_json(self, path: str | Path) -> None:
        """Write the words, with their digest, as JSON; the file is whole or not there."""
        content = {"sha256": self.digest, "words": self.words}
        atomic_write_text(path, json.dumps(content, indent=0) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> Vocabulary:
        """What `to_json` wrote; a ValueError that names the file if it is damaged or something else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or not isinstance(content.get("words"), list):
                raise ValueError("there is no list of words in it")
            if not all(isinstance(word, str) for word in content["words"]):
                raise ValueError("not all its words are strings")
            vocabulary = cls(tuple(content["words"]))
            if vocabulary.digest != content.get("sha256"):
                raise ValueError("its words do not match its checksum")
        except ValueError as error:  # that JSON or UTF-8 is broken is one, too
            raise ValueError(f"{path} is no vocabulary, or a damaged one: {error}") from error
        return vocabulary


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three splits of tokens (T,), int64, and their vocabulary."""

    name: str
    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the vocabulary and all splits: the same for the same text alone."""
        whole = hashlib.sha256(self.vocabulary.digest.encode())
        for tokens in (self.train, self.valid, self.test):
            whole.update(len(tokens).to_bytes(8, "little"))
            whole.update(tokens.numpy().tobytes())
        return whole.hexdigest()

    def __post_init__(self) -> None:
        for split in ("train", "valid", "test"):
            tokens = getattr(self, split)
            _check_tokens(tokens, f"the {split} split of {self.name}")
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(
                self.vocabulary
            ):
                raise ValueError(
                    f"the {split} split of {self.name} has tokens outside its vocabulary of "
                    f"{len(self.vocabulary)} words"
                )


class Streams:
    """A text read as B parallel streams of S = ceil((T - 1) / B) tokens, in segments of at most L.

    Stream b goes on in segment i + 1 where it stopped in segment i, so that a model may carry a memory. Every token
    but the first of the text is a target once: the first of a stream is the last target of the stream before. Where
    the text is over, the last streams are filled with tokens 0 and targets `IGNORED`.
    """

    def __init__(self, tokens: Tensor, batch: int, length: int):
        _check_tokens(tokens, "the text")
        if batch < 1 or length < 1:
            raise ValueError(f"batch and length must be at least 1, not {batch} and {length}")
        if len(tokens) < 2:
            raise ValueError(f"a text to predict needs two tokens or more, not {len(tokens)}")
        self.batch, self.length = batch, length
        self.size = -(-(len(tokens) - 1) // batch)
        filled = F.pad(tokens, (0, batch * self.size + 1 - len(tokens)), value=IGNORED)
        # Two views of one memory, which for WikiText-103 is almost a gigabyte.
        self._tokens = filled[:-1].view(batch, self.size)
        self._targets = filled[1:].view(batch, self.size)

    def __len__(self) -> int:
        """The number of segments."""
        return -(-self.size // self.length)

    def segment(self, i: int) -> tuple[Tensor, Tensor]:
        """Tokens (B, L) and the next tokens (B, L) of segment i; the last segment may be shorter."""
        if not 0 <= i < len(self):
            raise IndexError(f"no segment {i}: there are {len(self)}")
        part = slice(i * self.length, (i + 1) * self.length)
        targets = self._targets[:, part].contiguous()
        return self._tokens[:, part].masked_fill(targets == IGNORED, 0), targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.segment(i) for i in range(len(self)))


def _check_tokens(tokens: Tensor, what: str) -> None:
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise ValueError(
            f"{what} must be tokens (T,) of int64, not {tuple(tokens.shape)} of {tokens.dtype}"
        )
