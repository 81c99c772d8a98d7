"""Data sets with nothing to download: scikit-learn's digits, and the prose of Python's manual.

Shapes: N examples, L tokens in a window.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from cdeq.data.graphs import Graph, NodeTask, nearest_neighbours, normalised_adjacency
from cdeq.data.images import Images, ImageSet, split_images
from cdeq.data.text import Corpus, Vocabulary


class Examples(NamedTuple):
    """Inputs and targets, first axis N."""

    x: Tensor
    y: Tensor


class Splits(NamedTuple):
    """Examples for training, for choosing, and for reporting."""

    train: Examples
    valid: Examples
    test: Examples


class Text(NamedTuple):
    """Three texts as tokens (long): i < len(alphabet) is a character, len(alphabet) any other."""

    train: Tensor
    valid: Tensor
    test: Tensor
    alphabet: str

    @property
    def vocabulary(self) -> int:
        return len(self.alphabet) + 1

    def decode(self, tokens: Tensor) -> str:
        """The characters of tokens; unknown ones as U+FFFD."""
        characters = self.alphabet + "\N{REPLACEMENT CHARACTER}"
        return "".join(characters[i] for i in tokens.tolist())


def digits_images(seed: int = 0, *, valid: int = 200, test: int = 400) -> Splits:
    """The 1797 handwritten digits: x (N, 1, 8, 8) standardised by the training split, y (N,)."""
    pixels, labels = _digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order.split([len(labels) - valid - test, valid, test])
    mean, std = pixels[parts[0]].mean(), pixels[parts[0]].std()
    images = ((pixels - mean) / std).reshape(-1, 1, 8, 8)
    return Splits(*(Examples(images[part], labels[part]) for part in parts))


def digits_set(*, test: int = 40) -> ImageSet:
    """The same digits as bytes (N, 1, 8, 8), `test` of each class to report on, the last ones."""
    pixels, labels = _digits()
    images = Images(
        pixels=(pixels * 255).round().to(torch.uint8).reshape(-1, 1, 8, 8), labels=labels
    )
    last = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        last[(labels == label).nonzero().flatten()[-test:]] = True
    names = tuple(map(str, range(10)))
    return split_images("digits", images.take(~last), images.take(last), classes=names, valid=20)


def digits_graph(
    seed: int = 0, *, neighbours: int = 6, per_class: int = 20, valid: int = 300
) -> NodeTask:
    """The digits as a k-nearest-neighbour graph, with `per_class` training labels in each class.

    Features (N, 64) are standardised over all nodes: the task is transductive. Nodes neither in the
    training nor in the validation split are the test split.
    """
    pixels, labels = _digits()
    features = (pixels - pixels.mean()) / pixels.std()
    adjacency = normalised_adjacency(nearest_neighbours(features, neighbours), len(labels))

    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        train[order[labels[order] == label][:per_class]] = True
    rest = order[~train[order]]
    validation, testing = torch.zeros_like(train), torch.zeros_like(train)
    validation[rest[:valid]] = True
    testing[rest[valid:]] = True
    return NodeTask(Graph(adjacency, features), labels, train, validation, testing)


def pydoc_text(characters: int = 100) -> Text:
    """Python's own language manual, character by character.

    The alphabet is the `characters` commonest of the training text.
    """
    train, valid, test = _manual()
    # Ties are broken by code point, so that the alphabet does not depend on the order of counting.
    counts = sorted(Counter(train).items(), key=lambda item: (-item[1], item[0]))
    alphabet = "".join(sorted(character for character, _ in counts[:characters]))
    index = {character: i for i, character in enumerate(alphabet)}

    def encode(text: str) -> Tensor:
        return torch.tensor([index.get(character, len(alphabet)) for character in text])

    return Text(encode(train), encode(valid), encode(test), alphabet)


def pydoc_words(minimum: int = 2) -> Corpus:
    """Python's own language manual, word by word; words rarer than `minimum` in the training text are unknown."""
    train, valid, test = (part.splitlines() for part in _manual())
    vocabulary = Vocabulary.of(train, minimum)
    return Corpus(
        "Python manual",
        vocabulary,
        *(vocabulary.encode(lines) for lines in (train, valid, test)),
    )


def _manual() -> tuple[str, str, str]:
    """`pydoc_data.topics` in three splits; the prose differs between versions of Python.

    Each topic, in order of the names, goes to the split that lacks most of its share (8 : 1 : 1). Topics quote each
    other, so a paragraph counts only where it comes first.
    """
    from pydoc_data.topics import topics

    shares, parts, seen = (0.8, 0.1, 0.1), ["", "", ""], set[str]()
    for name in sorted(topics):
        fresh = ""
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh += paragraph.strip("\n") + "\n\n"
        sizes = [len(part) for part in parts]
        lacks = [
            share * (sum(sizes) + len(fresh)) - n for share, n in zip(shares, sizes, strict=True)
        ]
        parts[lacks.index(max(lacks))] += fresh
    train, valid, test = parts
    return train, valid, test


def text_windows(tokens: Tensor, length: int, *, stride: int | None = None) -> Examples:
    """Windows x (N, L) of a text and the next tokens y (N, L), `stride` (default L) tokens apart.

    A last, incomplete window is dropped.
    """
    if len(tokens) <= length:
        raise ValueError(f"a window of {length} needs more than {length} tokens, not {len(tokens)}")
    windows = tokens.unfold(0, length + 1, length if stride is None else stride)
    return Examples(windows[:, :-1], windows[:, 1:])


def _digits() -> tuple[Tensor, Tensor]:
    """Pixels (1797, 64) in [0, 1] and labels (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: pip install 'cdeq[demo]'"
        ) from error
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target).long()
