"""Tokenizers: exact round trips of any text, and models that are corrupt or missing."""

import os

import numpy as np
import pytest
import sentencepiece
from data_helpers import cut_text, rejection, story
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece_models import train_sentencepiece

from transformer_vq.data.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    open_tokenizer,
)

VOCAB_SIZE = 400
EXACT = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
AWKWARD = [
    " ",
    "   three before, two  within, one after ",
    "\n\n\tA tab,\r\nboth line ends,\ra single one.\n",
    "\u00e9t\u00e9, \u65e5\u672c\u8a9e, \u05d0\u05d1, \U0001f600\u200d\U0001f680",
    "<s> <unk> <0x41> </s>",
    "\x00\x01\x1f\x7f\u00a0\u2028\u3000\ufeff\ufffd\U0010ffff",
    "e\u0301 is not \u00e9",
]


def train_other(path, **options) -> None:
    """Write a model trained by SentencePiece with other options."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(story().splitlines()),
        model_prefix=str(path.with_suffix("")),
        minloglevel=2,
        **{"vocab_size": 80, **options},
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "books.model"
    train_sentencepiece([story()], VOCAB_SIZE, path)
    return path


@pytest.fixture(scope="module")
def learned(model_path):
    return SentencePieceTokenizer(model_path)


ANY = st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=9)


@given(st.lists(ANY | st.sampled_from([*AWKWARD, story(2)]), max_size=9))
def test_any_text_round_trips(learned, parts):
    text = "".join(parts)
    for tokenizer in (learned, ByteTokenizer()):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text.encode()
        assert b"".join(tokenizer.decode([token]) for token in tokens) == text.encode()
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer is not learned or tokenizer.bos not in tokens


def test_surrogate_escapes_are_bytes_for_bytes_only_and_other_surrogates_are_replaced(learned):
    data = b"caf\xe9 \xff\xfe ok"
    assert ByteTokenizer().decode(ByteTokenizer().encode(os.fsdecode(data))) == data
    assert ByteTokenizer().encode("\ud800") == list("\ufffd".encode())
    assert learned.encode("fox \ud800 \udfff\udcff ok") == learned.encode(
        "fox \ufffd \ufffd\ufffd ok"
    )


@pytest.mark.parametrize("texts", [[], [""], AWKWARD, [story(9), "", "x"], ["a", "b\udcff\ud800"]])
def test_batches_equal_single_texts(learned, texts):
    for tokenizer in (learned, ByteTokenizer(), ByteTokenizer(True)):
        batch = tokenizer.encode_batch(texts)
        assert [x.tolist() for x in batch] == [tokenizer.encode(text) for text in texts]
        assert all(x.dtype == np.uint32 for x in batch)


@pytest.mark.parametrize(
    ("options", "bos", "eod"),
    [({}, 1, 2), ({"bos_id": -1, "eos_id": 1}, 1, 1), ({"eos_id": -1}, 1, 1)],
)
def test_bos_and_eos_of_a_model_replace_each_other(tmp_path, options, bos, eod):
    path = tmp_path / "other.model"
    train_other(path, **options)
    tokenizer = open_tokenizer(path, end_of_document=True)
    assert (tokenizer.bos, tokenizer.eod) == (bos, eod)
    assert tokenizer.decode([bos, eod]) == b""
    assert open_tokenizer(path).eod is None


def test_lines_are_cut_only_where_that_keeps_the_tokens(learned, tmp_path):
    path = tmp_path / "other.model"
    train_other(path, add_dummy_prefix=False)
    tokenizers = (learned, ByteTokenizer(), SentencePieceTokenizer(path))
    text = "The old\nman and"
    assert [cut_text(tokenizer, text) for tokenizer in tokenizers] == [
        ["The old\n", "man and"],
        list(text),
        [text],
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_type": "bpe", "byte_fallback": True, "vocab_size": 330},
        {"user_defined_symbols": ["\n"], "add_dummy_prefix": False},
        {"user_defined_symbols": ["\n", "\n\n"], **EXACT},
        {"user_defined_symbols": ["\n"], **EXACT},
    ],
)
def test_models_with_other_options_give_the_ids_of_sentencepiece(tmp_path, options):
    path = tmp_path / "other.model"
    train_other(path, **options)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = SentencePieceTokenizer(path)
    for text in (story(9), "\n\n  two  words \n\n\n", "caf\u00e9\r\n"):
        assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode("the fox")).decode().strip() == "the fox"


def test_a_saved_tokenizer_is_loaded(learned, model_path, tmp_path):
    learned.save(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == model_path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.model"]
    assert load_tokenizer(tmp_path, learned.sha256).encode("the fox") == learned.encode("the fox")
    assert load_tokenizer(tmp_path, end_of_document=True).eod == learned.bos
    assert open_tokenizer(tmp_path).sha256 == open_tokenizer(model_path).sha256 == learned.sha256


def test_a_corrupt_or_unusable_model_is_rejected(model_path, tmp_path):
    path = tmp_path / "broken.model"
    for keep in (0, 100, -1):
        path.write_bytes(model_path.read_bytes()[:keep])
        message = rejection(SentencePieceTokenizer, path)
        assert f"{path} is not a SentencePiece model" in message
    train_other(path, bos_id=-1, eos_id=-1)
    assert f"{path} has no bos piece" in rejection(SentencePieceTokenizer, path)


def test_load_tokenizer_rejects_a_different_digest(learned, tmp_path):
    learned.save(tmp_path)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(path.read_bytes() + b" ")
    message = rejection(load_tokenizer, tmp_path, learned.sha256)
    assert "tokenizer.model is corrupt or another vocabulary" in message
    path.unlink()
    message = rejection(load_tokenizer, tmp_path, learned.sha256)
    assert "has no tokenizer.json and no tokenizer.model" in message
