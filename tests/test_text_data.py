"""Words and their numbers: vocabularies, corpora, and streams of segments."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdeq.data import Corpus, Streams, Vocabulary
from cdeq.labels import IGNORED
from cdeq.training import task_loss

LINES = st.lists(st.lists(st.sampled_from(["a", "b", "c", "é", "<unk>", "dd"])).map(" ".join))


def test_words_are_ordered_by_frequency_and_then_by_first_appearance():
    vocabulary = Vocabulary.of(["b a", "c a b", "d a"])
    # a 3, <eos> 3 (later than a), b 2, then c and d once, and <unk> never.
    assert vocabulary.words == ("a", "<eos>", "b", "c", "d", "<unk>")
    assert len(vocabulary) == 6
    assert vocabulary.ids["b"] == 2


def test_every_line_ends_in_eos_and_unknown_words_become_unk():
    vocabulary = Vocabulary.of(["b a", "c a b", "d a"])
    tokens = vocabulary.encode(iter(["", "a zebra", "  d  b \n"]))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [1, 0, 5, 1, 4, 2, 1]
    assert vocabulary.decode(tokens) == "\na <unk>\nd b\n"
    assert vocabulary.encode([]).shape == (0,)


def test_a_minimum_counts_rare_words_as_unk():
    vocabulary = Vocabulary.of(["x a y", "b z a", "a"], minimum=2)
    # b, x, y and z are rare: <unk> appears four times once the text is encoded.
    assert vocabulary.words == ("<unk>", "a", "<eos>")
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Vocabulary.of(["a"], minimum=0)


@pytest.mark.slow
@given(lines=LINES, minimum=st.integers(1, 4))
def test_tokens_are_ordered_by_how_often_they_appear_in_the_encoded_text(lines, minimum):
    vocabulary = Vocabulary.of(lines, minimum)
    counts = vocabulary.encode(lines).bincount(minlength=len(vocabulary)).tolist()
    assert counts == sorted(counts, reverse=True)
    assert all(
        count >= minimum
        for word, count in zip(vocabulary.words, counts, strict=True)
        if word not in ("<eos>", "<unk>")
    )


@pytest.mark.slow
@given(lines=LINES)
def test_decoding_gives_the_text_back(lines):
    assert Vocabulary.of(lines).decode(Vocabulary.of(lines).encode(lines)) == "".join(
        line + "\n" for line in lines
    )


def test_impossible_vocabularies_and_tokens_are_refused():
    with pytest.raises(ValueError, match="must have <unk>"):
        Vocabulary(("a", "<eos>"))
    with pytest.raises(ValueError, match="'a' is in the vocabulary more than once"):
        Vocabulary(("a", "<eos>", "a", "<unk>"))
    with pytest.raises(ValueError, match="'a b' is no word"):
        Vocabulary(("a b", "<eos>", "<unk>"))
    with pytest.raises(ValueError, match="-100 is no token of a vocabulary of 2"):
        Vocabulary(("<eos>", "<unk>")).decode([0, IGNORED])
    with pytest.raises(TypeError, match="not one string"):
        Vocabulary.of("one two")


def test_a_vocabulary_comes_back_from_json(tmp_path):
    vocabulary = Vocabulary.of(["ein Fluß 戦場 \\ \" '"])
    vocabulary.to_json(tmp_path / "words.json")
    assert Vocabulary.from_json(tmp_path / "words.json") == vocabulary
    assert [path.name for path in tmp_path.iterdir()] == ["words.json"]


def test_a_damaged_vocabulary_is_a_clear_error(tmp_path):
    path = tmp_path / "words.json"
    Vocabulary.of(["a river", "a sea"]).to_json(path)
    whole = path.read_bytes()
    described = json.loads(whole)
    damaged = {
        "cut": whole[:-5],
        "one character": whole.replace(b"river", b"rover"),
        "not UTF-8": b"\xff" + whole,
        "a list": b"[]",
        "no words": b"{}",
        "numbers": json.dumps({**described, "words": [1, 2]}).encode(),
        "twice": json.dumps({**described, "words": ["<eos>", "<unk>", "<unk>"]}).encode(),
        "no checksum": json.dumps({"words": described["words"]}).encode(),
    }
    for content in damaged.values():
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"words\.json is no vocabulary, or a damaged one"):
            Vocabulary.from_json(path)
    with pytest.raises(FileNotFoundError):
        Vocabulary.from_json(tmp_path / "none.json")


def test_a_corpus_refuses_tokens_that_are_not_its_own():
    vocabulary = Vocabulary.of(["a b"])
    good, empty = vocabulary.encode(["a"]), torch.empty(0, dtype=torch.int64)
    Corpus("small", vocabulary, good, empty, good)
    for bad in (torch.tensor([4]), torch.tensor([-1])):
        with pytest.raises(ValueError, match=r"valid split of small .* vocabulary of 4"):
            Corpus("small", vocabulary, good, bad, good)
    for bad in (good.float(), good[None]):
        with pytest.raises(ValueError, match=r"must be tokens \(T,\) of int64"):
            Corpus("small", vocabulary, good, good, bad)


# --- Streams. ---


@given(size=st.integers(2, 60), batch=st.integers(1, 9), length=st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_once_and_follows_its_input(size, batch, length):
    text = torch.arange(100, 100 + size)  # all different, none 0
    streams = Streams(text, batch, length)
    segments = [streams.segment(i) for i in range(len(streams))]
    assert all(tokens.shape == targets.shape for tokens, targets in segments)
    widths = [tokens.shape[1] for tokens, _ in segments]
    assert widths[:-1] == [length] * (len(streams) - 1)
    assert 1 <= widths[-1] <= length

    tokens = torch.cat([segment[0] for segment in segments], dim=1)  # (B, S)
    targets = torch.cat([segment[1] for segment in segments], dim=1)
    real = targets != IGNORED
    assert torch.equal(targets[real], text[1:])  # row by row: in the order of the streams
    assert torch.equal(tokens[real], text[:-1])
    assert torch.equal(tokens[real] + 1, targets[real])
    assert (tokens[~real] == 0).all()
    # The filling is as short as equal streams allow, and all at the end.
    assert tokens.shape[1] == -(-(size - 1) // batch)
    assert torch.equal(real.flatten(), torch.arange(real.numel()) < size - 1)


def test_streams_are_laid_out_as_drawn():
    streams = Streams(torch.arange(1, 10), batch=3, length=2)  # 8 targets in 3 streams of 3
    (first, next_first), (last, next_last) = streams
    assert first.tolist() == [[1, 2], [4, 5], [7, 8]]
    assert next_first.tolist() == [[2, 3], [5, 6], [8, 9]]
    assert last.tolist() == [[3], [6], [0]]
    assert next_last.tolist() == [[4], [7], [IGNORED]]
    assert first.is_contiguous()
    assert next_first.is_contiguous()


def test_reading_a_segment_leaves_the_text_alone():
    text = torch.arange(1, 8)
    for tokens, targets in Streams(text, batch=2, length=3):
        tokens.zero_()
        targets.zero_()
    assert torch.equal(text, torch.arange(1, 8))


def test_training_ignores_the_same_label():
    assert task_loss.IGNORED == IGNORED == torch.nn.CrossEntropyLoss().ignore_index


def test_impossible_streams_are_refused():
    text = torch.arange(5)
    for batch, length in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Streams(text, batch, length)
    with pytest.raises(ValueError, match="two tokens or more, not 1"):
        Streams(text[:1], 1, 1)
    with pytest.raises(ValueError, match="int64"):
        Streams(text.int(), 1, 1)
    for i in (-1, 2):
        with pytest.raises(IndexError, match="there are 2"):
            Streams(text, 1, 2).segment(i)
