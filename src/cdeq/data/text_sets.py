"""Word-level texts by name, from any folder of text files, and from the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cdeq.data.cache import KEY_DIGITS, keep_tensors, kept_tensors, key_of
from cdeq.data.folders import MissingDataError, as_path, data_folder, require_in_folder
from cdeq.data.text import END, UNKNOWN, Corpus, Vocabulary, words_of
from cdeq.files import sha256_of_file

SPLITS = ("train", "valid", "test")
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
CACHE_VERSION = 1

# A text that can be read more than once: once to count its words, once to encode them.
Lines = Callable[[], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """A public text: its files for train, valid and test below the data folder, and their public home."""

    files: tuple[str, str, str]
    home: str


def _wikitext(name: str) -> TextSet:
    train, valid, test = (f"{name}/wiki.{split}.tokens" for split in SPLITS)
    return TextSet(
        files=(train, valid, test),
        home=f"the WikiText data sets of Salesforce Research ({name}-v1.zip, word level)",
    )


TEXT_SETS: dict[str, TextSet] = {
    "wikitext-2": _wikitext("wikitext-2"),
    "wikitext-103": _wikitext("wikitext-103"),
    "ptb": TextSet(
        files=("ptb/ptb.train.txt", "ptb/ptb.valid.txt", "ptb/ptb.test.txt"),
        home="Mikolov's simple-examples.tgz, the Penn Treebank of 10,000 words, folder data",
    ),
}


def load_text(
    name: str | Path, folder: str | Path | None = None, cache: str | Path | None = None
) -> Corpus:
    """A public text from the data folder (`data_folder(folder)`), or the text files of a folder given by its path.

    The vocabulary is that of the training split, and `<unk>`. A path is recognised by its separator ("./notes");
    it is read by `read_text_folder`. `cache` is a folder where texts are kept encoded.
    """
    require_text_files(name, folder)
    if (path := as_path(name)) is not None:
        return read_text_folder(path, cache=cache)
    place = data_folder(folder)
    files = {
        split: [place / file] for split, file in zip(SPLITS, _text_set(name).files, strict=True)
    }
    return _read_splits(str(name), files, minimum=1, cache=cache)


def require_text_files(name: str | Path, folder: str | Path | None = None) -> None:
    """A `MissingDataError` that says what to do, if files of a text are not where they should be."""
    if (path := as_path(name)) is not None:
        _text_files(path)
        return
    chosen = _text_set(name)
    require_in_folder(str(name), chosen.files, chosen.home, folder)


def is_text_available(name: str | Path, folder: str | Path | None = None) -> bool:
    """Whether all files of a text are where they should be."""
    try:
        require_text_files(name, folder)
    except MissingDataError:
        return False
    return True


def read_text_folder(
    path: str | Path,
    *,
    valid: float = 0.05,
    test: float = 0.05,
    minimum: int = 1,
    cache: str | Path | None = None,
) -> Corpus:
    """The plain text (UTF-8) of a folder, words that appear less than `minimum` times in training as `<unk>`.

    With train.txt, valid.txt and test.txt those are the splits. Otherwise all *.txt below the folder are one text in
    the order of their paths, whose last tokens are the test split, and those before them the validation split, of the
    shares `test` and `valid`.
    """
    folder = Path(path).expanduser()
    files = _text_files(folder)
    name = folder.resolve().name or "text"
    named = {split: [folder / f"{split}.txt"] for split in SPLITS}
    present = [file for (file,) in named.values() if file in files]
    if len(present) == len(SPLITS):
        return _read_splits(name, named, minimum=minimum, cache=cache)
    if present:
        # One text of all files would silently put the user's test split into training.
        absent = next(file.name for (file,) in named.values() if file not in present)
        raise ValueError(
            f"{folder} has {present[0].name} but no {absent}: add it, or rename "
            f"{present[0].name} to have all files cut into splits"
        )
    if not (valid >= 0 and test >= 0 and valid + test < 1):
        raise ValueError(f"valid and test must be shares with a sum below 1, not {valid}, {test}")
    return _with_cache(
        {"all": files},
        {"minimum": minimum, "valid": valid, "test": test},
        lambda: _cut(name, partial(_lines_of, files), valid, test, minimum),
        name=name,
        cache=cache,
    )


def load_hub_text(
    name: str = "wikitext-103-v1",
    load: Callable[[str, str], Iterable[Mapping[str, Any]]] | None = None,
) -> Corpus:
    """WikiText from the Hugging Face hub: the same tokens as from its files.

    `load(name, split)` gives the rows {"text": a line} of a split, "train", "validation" or "test"; it is called once
    to count words and once to encode them. By default it is `datasets.load_dataset`, which downloads.
    """
    source = _hub_loader() if load is None else load
    lines = {split: partial(_row_lines, source, name, hub) for split, hub in HUB_SPLITS.items()}
    return _encoded(name, lines, minimum=1)


def _hub_loader() -> Callable[[str, str], Iterable[Mapping[str, Any]]]:
    try:
        load_dataset = import_module("datasets").load_dataset
    except ImportError as error:
        raise ImportError(
            "texts of the hub come with datasets, which is not installed: pip install 'cdeq[text]'"
        ) from error
    # The hub's clients no longer take the bare name "wikitext".
    return lambda name, split: load_dataset("Salesforce/wikitext", name, split=split)


def _row_lines(
    load: Callable[[str, str], Iterable[Mapping[str, Any]]], name: str, split: str
) -> Iterator[str]:
    for row in load(name, split):
        yield from row["text"].removesuffix("\n").split("\n")


def _lines_of(files: Iterable[Path]) -> Iterator[str]:
    """The lines of UTF-8 files with any line ends, with or without a byte-order mark."""
    for file in files:
        number = 0
        try:
            with open(file, encoding="utf-8-sig") as text:
                for line in text:
                    number += 1
                    yield line
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text, somewhere after line {number}: {error.reason}"
            ) from error


def _encoded(name: str, lines: Mapping[str, Lines], minimum: int) -> Corpus:
    """A corpus of three texts, with the vocabulary of the first."""
    vocabulary = Vocabulary.of(lines["train"](), minimum)
    _require_words(name, vocabulary, minimum)
    parts = {split: vocabulary.encode(lines[split]()) for split in SPLITS}
    if empty := [split for split in SPLITS if not len(parts[split])]:
        raise ValueError(f"the {empty[0]} split of {name} is empty")
    return Corpus(name, vocabulary, **parts)


def _cut(name: str, lines: Lines, valid: float, test: float, minimum: int) -> Corpus:
    """A corpus of one text, cut by tokens; the vocabulary is of the tokens before the first cut."""
    total = sum(1 for _ in words_of(lines()))
    sizes = [0, round(valid * total), round(test * total)]
    sizes[0] = total - sum(sizes)
    for split, share, size in zip(SPLITS, (1 - valid - test, valid, test), sizes, strict=True):
        if total and share and size < 1:
            raise ValueError(
                f"the {total} tokens of {name} are too few to cut {split} = {share:g} of them off"
            )
    vocabulary = Vocabulary.of_words(islice(words_of(lines()), sizes[0]), minimum)
    _require_words(name, vocabulary, minimum)
    # Copies, so that a split does not keep the whole text in memory.
    parts = [part.clone() for part in vocabulary.encode(lines()).split(sizes)]
    return Corpus(name, vocabulary, *parts)


def _require_words(name: str, vocabulary: Vocabulary, minimum: int) -> None:
    if set(vocabulary.words) <= {END, UNKNOWN}:
        often = "" if minimum == 1 else f" that appear {minimum} times or more"
        raise ValueError(f"the training text of {name} has no words{often}")


def _read_splits(
    name: str, files: dict[str, list[Path]], *, minimum: int, cache: str | Path | None
) -> Corpus:
    lines: dict[str, Lines] = {split: partial(_lines_of, files[split]) for split in SPLITS}
    settings = {"minimum": minimum}
    return _with_cache(
        files, settings, lambda: _encoded(name, lines, minimum), name=name, cache=cache
    )


def _text_set(name: str | Path) -> TextSet:
    if name not in TEXT_SETS:
        raise ValueError(
            f"no text {str(name)!r}; there are {', '.join(TEXT_SETS)}, and any folder by its path, "
            f"such as {os.path.join('.', name)}"
        )
    return TEXT_SETS[str(name)]


def _text_files(folder: Path) -> list[Path]:
    """All *.txt below a folder in the order of their paths; a `MissingDataError` if there are none."""
    if not folder.is_dir():
        raise MissingDataError(f"there is no folder {folder} to read text from")
    files = sorted(
        (file for file in folder.rglob("*.txt") if file.is_file()),
        key=lambda file: file.relative_to(folder).parts,
    )
    if not files:
        raise MissingDataError(f"there are no files *.txt in {folder} or below it")
    return files


def _with_cache(
    files: Mapping[str, Sequence[Path]],
    settings: Mapping[str, float],
    build: Callable[[], Corpus],
    *,
    name: str,
    cache: str | Path | None,
) -> Corpus:
    """What `build` gives; with a folder `cache`, what it gave for the same contents of the files and settings."""
    if cache is None:
        return build()
    key = _key(files, settings)
    stem = Path(cache).expanduser() / f"{name}-{key[:KEY_DIGITS]}"
    corpus = _from_cache(stem, name, key)
    if corpus is None:
        corpus = build()
        if _key(files, settings) == key:  # else a file was changed while it was read
            _to_cache(stem, corpus, key)
    return corpus


def _key(files: Mapping[str, Sequence[Path]], settings: Mapping[str, float]) -> str:
    """A digest of all that an encoded text depends on."""
    contents = {part: [sha256_of_file(file) for file in files[part]] for part in files}
    return key_of(version=CACHE_VERSION, settings=dict(settings), contents=contents)


def _cache_files(stem: Path) -> tuple[Path, Path]:
    """Vocabulary and tokens."""
    return stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.safetensors")


def _to_cache(stem: Path, corpus: Corpus, key: str) -> None:
    words, tokens = _cache_files(stem)
    words.parent.mkdir(parents=True, exist_ok=True)
    corpus.vocabulary.to_json(words)
    parts = {split: getattr(corpus, split).to(torch.int32) for split in SPLITS}
    keep_tensors(tokens, parts, {"key": key, "vocabulary": corpus.vocabulary.digest})


def _from_cache(stem: Path, name: str, key: str) -> Corpus | None:
    """The corpus kept under a name; None if there is none, a damaged one, or that of another text."""
    words, tokens = _cache_files(stem)
    try:
        vocabulary = Vocabulary.from_json(words)
    except (OSError, ValueError):
        return None
    parts = kept_tensors(tokens, {"key": key, "vocabulary": vocabulary.digest})
    if parts is None:
        return None
    return Corpus(name, vocabulary, **{split: parts[split].long() for split in SPLITS})
