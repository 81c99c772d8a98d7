"""Texts by name, from any folder and from the hub, and their cache, on small files written here."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

import cdeq.files
from cdeq.data import (
    Corpus,
    MissingDataError,
    Vocabulary,
    is_text_available,
    load_hub_text,
    load_text,
    read_text_folder,
)
from cdeq.data.text_sets import require_text_files

# As WikiText's: spaces around a line, blank lines that count, headings between equals signs.
TRAIN = [" \n", " = A title = \n", " \n", " the cat saw the <unk> dog \n", " the end \n"]
VALID = [" \n", " the dog saw a bird \n"]
TEST = [" = Bird = \n", " a cat \n", "\n"]


def write_wikitext(folder: Path, name: str = "wikitext-2") -> Path:
    for split, lines in zip(("train", "valid", "test"), (TRAIN, VALID, TEST), strict=True):
        path = folder / name / f"wiki.{split}.tokens"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8", newline="")
    return folder


def assert_same(one: Corpus, other: Corpus) -> None:
    assert one.vocabulary == other.vocabulary
    for split in ("train", "valid", "test"):
        assert torch.equal(getattr(one, split), getattr(other, split)), split


# --- Public texts. ---


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_wikitext_is_read_as_the_field_counts_it(tmp_path, name):
    corpus = load_text(name, write_wikitext(tmp_path, name))
    assert corpus.name == name
    # Of the training split alone: "a" and "bird" of the others are unknown.
    assert corpus.vocabulary.words == (
        "<eos>", "the", "=", "A", "title", "cat", "saw", "<unk>", "dog", "end",
    )  # fmt: skip
    assert corpus.train.tolist() == [0, 2, 3, 4, 2, 0, 0, 1, 5, 6, 1, 7, 8, 0, 1, 9, 0]
    assert corpus.vocabulary.decode(corpus.valid) == "\nthe dog saw <unk> <unk>\n"
    assert corpus.vocabulary.decode(corpus.test) == "= <unk> =\n<unk> cat\n\n"


def test_ptb_is_read_from_its_text_files(tmp_path):
    (tmp_path / "ptb").mkdir()
    for split, line in (("train", " n years old <unk> \n"), ("valid", " n n\n"), ("test", " old")):
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text(line)
    corpus = load_text("ptb", tmp_path)
    assert corpus.vocabulary.words == ("n", "years", "old", "<unk>", "<eos>")
    assert corpus.valid.tolist() == [0, 0, 4]
    assert corpus.test.tolist() == [2, 4]


def test_missing_files_are_named(tmp_path, monkeypatch):
    write_wikitext(tmp_path)
    monkeypatch.setenv("CDEQ_DATA", str(tmp_path))
    assert is_text_available("wikitext-2")
    assert not is_text_available("wikitext-103")
    (tmp_path / "wikitext-2" / "wiki.valid.tokens").unlink()
    assert not is_text_available("wikitext-2")
    with pytest.raises(MissingDataError, match=r"wiki\.valid\.tokens, looked for in .*CDEQ_DATA"):
        load_text("wikitext-2")
    with pytest.raises(MissingDataError, match=r"ptb\.train\.txt \(and 2 more\)"):
        require_text_files("ptb")
    with pytest.raises(ValueError, match=r"no text 'novel'; there are wikitext-2, .* folder"):
        is_text_available("novel")


def test_an_empty_split_is_refused(tmp_path):
    write_wikitext(tmp_path)
    (tmp_path / "wikitext-2" / "wiki.test.tokens").write_text("")
    with pytest.raises(ValueError, match="the test split of wikitext-2 is empty"):
        load_text("wikitext-2", tmp_path)
    (tmp_path / "wikitext-2" / "wiki.train.tokens").write_text("\n\n")
    with pytest.raises(ValueError, match="training text of wikitext-2 has no words"):
        load_text("wikitext-2", tmp_path)


# --- Any folder. ---


def test_a_folder_with_named_splits(tmp_path):
    for split, text in (("train", "a a b\nb a c"), ("valid", "a\n"), ("test", "c b\n")):
        (tmp_path / f"{split}.txt").write_text(text)
    (tmp_path / "readme.txt").write_text("no part of it")
    corpus = read_text_folder(tmp_path, minimum=2)
    assert corpus.name == tmp_path.name
    assert corpus.vocabulary.words == ("a", "b", "<eos>", "<unk>")
    assert corpus.train.tolist() == [0, 0, 1, 2, 1, 0, 3, 2]
    assert corpus.test.tolist() == [3, 1, 2]


def test_a_folder_with_some_named_splits_is_refused(tmp_path):
    (tmp_path / "train.txt").write_text("a b")
    (tmp_path / "test.txt").write_text("a b")
    with pytest.raises(ValueError, match=r"has train\.txt but no valid\.txt"):
        read_text_folder(tmp_path)


def test_other_files_are_cut_by_tokens_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "c.txt").write_text("p\x0b\N{LINE SEPARATOR}q", encoding="utf-8")  # no line ends
    (tmp_path / "b" / "x.txt").write_text("m n\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfe f\r\ng\re h i\n")  # a byte-order mark
    (tmp_path / "d.md").write_text("not read")
    corpus = read_text_folder(tmp_path, valid=0.1, test=0.2)
    # Fifteen tokens, of which the first ten are e f <eos> g <eos> e h i <eos> m.
    assert corpus.vocabulary.words == ("<eos>", "e", "f", "g", "h", "i", "m", "<unk>")
    assert corpus.vocabulary.decode(corpus.train) == "e f\ng\ne h i\nm"
    assert corpus.vocabulary.decode(corpus.valid) == "<unk>\n"
    assert corpus.vocabulary.decode(corpus.test) == "<unk> <unk>\n"


def test_shares_may_be_nothing_but_not_everything(tmp_path):
    (tmp_path / "text.txt").write_text("a b c d\n" * 4)
    whole = read_text_folder(tmp_path, valid=0, test=0)
    assert [len(whole.train), len(whole.valid), len(whole.test)] == [20, 0, 0]
    for valid, test in ((0.5, 0.5), (-0.1, 0.1), (float("nan"), 0.1)):
        with pytest.raises(ValueError, match="sum below 1"):
            read_text_folder(tmp_path, valid=valid, test=test)
    with pytest.raises(ValueError, match=r"20 tokens .* too few to cut valid = 0\.01"):
        read_text_folder(tmp_path, valid=0.01, test=0.1)


def test_folders_without_text_are_refused(tmp_path):
    with pytest.raises(MissingDataError, match="no files"):
        read_text_folder(tmp_path)
    with pytest.raises(MissingDataError, match="no folder"):
        load_text(tmp_path / "none")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"has no words$"):
        read_text_folder(tmp_path)
    (tmp_path / "a.txt").write_text("\n" * 40)
    with pytest.raises(ValueError, match=r"has no words$"):
        read_text_folder(tmp_path)
    (tmp_path / "a.txt").write_text("every word once " * 20)
    with pytest.raises(ValueError, match="no words that appear 99 times"):
        read_text_folder(tmp_path, minimum=99)


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("fine\n" * 9)
    (tmp_path / "b.txt").write_bytes("Fluß\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 text, somewhere after line 0"):
        read_text_folder(tmp_path)


def test_a_path_is_read_as_a_folder_and_a_name_is_not(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("one two three\n" * 10)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    expected = read_text_folder(tmp_path / "notes")
    for path in (tmp_path / "notes", str(tmp_path / "notes"), "./notes", "~/notes", Path("notes")):
        assert is_text_available(path)
        assert_same(load_text(path), expected)
    assert load_text("./notes").name == "notes"
    assert not is_text_available("./letters")
    with pytest.raises(ValueError, match=r"any folder by its path, such as \./notes"):
        load_text("notes")


# --- The cache. ---


def count_builds(monkeypatch) -> list[str]:
    """Grows by one for every split encoded."""
    built: list[str] = []
    encode = Vocabulary.encode

    def counted(self, lines):
        built.append("encoded")
        return encode(self, lines)

    monkeypatch.setattr(Vocabulary, "encode", counted)
    return built


def test_a_cached_text_is_not_encoded_again(tmp_path, monkeypatch):
    data, cache = write_wikitext(tmp_path / "data"), tmp_path / "cache"
    expected = load_text("wikitext-2", data)
    built = count_builds(monkeypatch)
    assert_same(load_text("wikitext-2", data, cache), expected)
    assert len(built) == 3
    again = load_text("wikitext-2", data, cache)
    assert_same(again, expected)
    assert again.train.dtype == torch.int64
    assert len(built) == 3
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".safetensors"]


def test_a_changed_source_file_is_noticed(tmp_path):
    data, cache = write_wikitext(tmp_path / "data"), tmp_path / "cache"
    load_text("wikitext-2", data, cache)
    path = data / "wikitext-2" / "wiki.train.tokens"
    before = path.stat()
    changed = path.read_text().replace("cat", "cow")
    path.write_text(changed)
    # The same size and times: only the content tells.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    corpus = load_text("wikitext-2", data, cache)
    assert "cow" in corpus.vocabulary.ids
    assert_same(corpus, load_text("wikitext-2", data))


def test_other_settings_have_another_cache(tmp_path):
    folder, cache = tmp_path / "notes", tmp_path / "cache"
    folder.mkdir()
    (folder / "a.txt").write_text("one two three\n" * 10 + "rare words\n" * 10)
    settings = [{}, {"minimum": 10}, {"valid": 0.1}, {"test": 0.1}]
    fresh = [read_text_folder(folder, **chosen) for chosen in settings]
    for _ in range(2):
        for chosen, expected in zip(settings, fresh, strict=True):
            assert_same(read_text_folder(folder, **chosen, cache=cache), expected)


def test_moving_text_between_files_is_noticed(tmp_path):
    cache = tmp_path / "cache"
    folder = tmp_path / "notes"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(f"common {split}\n")
    read_text_folder(folder, cache=cache)
    (folder / "valid.txt").write_text("common test\n")
    (folder / "test.txt").write_text("common valid\n")
    (folder / "train.txt").write_text("common test\n")
    corpus = read_text_folder(folder, cache=cache)
    assert corpus.vocabulary.decode(corpus.valid) == "common test\n"
    assert corpus.vocabulary.decode(corpus.test) == "common <unk>\n"


@pytest.mark.slow
def test_a_damaged_cache_is_rebuilt_whichever_byte_is_hit(tmp_path, monkeypatch):
    data, cache = write_wikitext(tmp_path / "data"), tmp_path / "cache"
    expected = load_text("wikitext-2", data, cache)
    monkeypatch.setattr(cdeq.files.os, "fsync", lambda descriptor: None)  # a thousand writes
    built = count_builds(monkeypatch)
    for path in list(cache.iterdir()):
        whole = path.read_bytes()
        flipped = [
            whole[:place] + bytes([whole[place] ^ 0x04]) + whole[place + 1 :]
            for place in range(0, len(whole), 3)
        ]
        cut = [whole[:size] for size in (0, 1, len(whole) // 2, len(whole) - 1)]
        for damaged in flipped + cut:
            path.write_bytes(damaged)
            assert_same(load_text("wikitext-2", data, cache), expected)
        for spoil in (path.unlink, lambda path=path, half=cut[2]: path.write_bytes(half)):
            spoil()
            built.clear()
            assert_same(load_text("wikitext-2", data, cache), expected)
            assert len(built) == 3
            load_text("wikitext-2", data, cache)
            assert len(built) == 3  # kept again


def test_a_cache_whose_header_lies_about_its_type_is_not_trusted(tmp_path):
    data, cache = write_wikitext(tmp_path / "data"), tmp_path / "cache"
    expected = load_text("wikitext-2", data, cache)
    (path,) = cache.glob("*.safetensors")
    whole = path.read_bytes()
    assert b'"I32"' in whole
    path.write_bytes(whole.replace(b'"I32"', b'"F32"'))  # the same bytes, read as tiny numbers
    assert_same(load_text("wikitext-2", data, cache), expected)


def test_the_cache_of_another_text_is_not_trusted(tmp_path):
    data, cache = write_wikitext(tmp_path / "data"), tmp_path / "cache"
    expected = load_text("wikitext-2", data, cache)
    other = write_wikitext(tmp_path / "other")
    (other / "wikitext-2" / "wiki.test.tokens").write_text("the dog\n")
    load_text("wikitext-2", other, tmp_path / "strange")
    for path in cache.iterdir():
        (strange,) = (tmp_path / "strange").glob(f"*{path.suffix}")
        path.write_bytes(strange.read_bytes())
    assert_same(load_text("wikitext-2", data, cache), expected)


def test_a_text_changed_while_it_is_read_is_not_kept(tmp_path, monkeypatch):
    data, cache = write_wikitext(tmp_path / "data"), tmp_path / "cache"
    test = data / "wikitext-2" / "wiki.test.tokens"
    encode = Vocabulary.encode

    def slow(self, lines):
        tokens = encode(self, lines)
        test.write_text("the end\n")
        return tokens

    monkeypatch.setattr(Vocabulary, "encode", slow)
    load_text("wikitext-2", data, cache)
    assert not cache.exists()


def test_a_cache_is_written_through_atomic_files(tmp_path, monkeypatch):
    data, cache = write_wikitext(tmp_path / "data"), tmp_path / "cache"
    renamed: list[str] = []
    replace = cdeq.files.os.replace

    def failing(source, target):
        renamed.append(Path(target).suffix)
        if len(renamed) == 2:
            raise OSError("the disk is full")
        replace(source, target)

    monkeypatch.setattr(cdeq.files.os, "replace", failing)
    with pytest.raises(OSError, match="disk is full"):
        load_text("wikitext-2", data, cache)
    # The tokens come last, since they hold the vocabulary's checksum; nothing half-written stays.
    assert renamed == [".json", ".safetensors"]
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    monkeypatch.undo()
    assert_same(load_text("wikitext-2", data, cache), load_text("wikitext-2", data))


# --- The hub. ---


def hub_rows(name, split):
    """As the hub gives WikiText: one row for each line, blank lines without their newline."""
    assert name == "wikitext-103-v1"
    lines = {"train": TRAIN, "validation": VALID, "test": TEST}[split]
    return ({"text": line if line.strip() else ""} for line in lines)


def test_the_hub_gives_what_the_files_give(tmp_path):
    from_hub = load_hub_text(load=hub_rows)
    assert_same(from_hub, load_text("wikitext-103", write_wikitext(tmp_path, "wikitext-103")))
    assert from_hub.name == "wikitext-103-v1"


def test_the_hub_is_reached_through_datasets(monkeypatch):
    asked = []

    def load_dataset(path, name, *, split):
        asked.append((path, name, split))
        return hub_rows("wikitext-103-v1", split)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert_same(load_hub_text("wikitext-2-v1"), load_hub_text(load=hub_rows))
    assert {split for _, _, split in asked} == {"train", "validation", "test"}
    assert {(path, name) for path, name, _ in asked} == {("Salesforce/wikitext", "wikitext-2-v1")}


def test_without_datasets_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'cdeq\[text\]'"):
        load_hub_text()


# --- The real thing. ---


def test_wikitext_2_has_the_published_counts():
    if not is_text_available("wikitext-2"):
        pytest.skip("the files of wikitext-2 are not here: set CDEQ_DATA")
    corpus = load_text("wikitext-2")
    assert len(corpus.vocabulary) == 33_278
    sizes = [len(corpus.train), len(corpus.valid), len(corpus.test)]
    assert sizes == [2_088_628, 217_646, 245_569]
