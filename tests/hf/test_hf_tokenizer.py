"""The transformers tokenizer gives our ids and decodes them, in memory and from disk."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece_models import train_sentencepiece
from transformers import AutoTokenizer

from transformer_vq.data.tokenizers import MODEL_FILE, ByteTokenizer, SentencePieceTokenizer
from transformer_vq.hf import TransformerVQConfig, TransformerVQTokenizer

NAMES = ["<s>", "<unk>", "<|endoftext|>", "<0x00>", "<0x41>", "  ", "\n", " fox \u00e9t\u00e9"]
PARTS = st.one_of(st.text(max_size=20), st.sampled_from(NAMES))
TEXTS = st.lists(PARTS, max_size=6).map(lambda parts: "".join(parts).replace("\u2581", "_"))


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "bytes-eod", "sentencepiece-eod"])
def pair(request, tmp_path_factory):
    """Return our tokenizer and the one that AutoTokenizer loads from a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    ends = request.param.endswith("eod")
    ours, vocab_file = ByteTokenizer(ends), None
    if request.param.startswith("sentencepiece"):
        vocab_file = str(folder / "books.model")
        lines = "".join(f"In {1800 + i % 90} the fox saw {i} dogs.\n" for i in range(200))
        train_sentencepiece([lines], 300, Path(vocab_file))
        ours = SentencePieceTokenizer(Path(vocab_file), end_of_document=ends)
    TransformerVQTokenizer(vocab_file, end_of_document=ends).save_pretrained(folder / "saved")
    TransformerVQConfig().save_pretrained(folder / "saved")
    theirs = AutoTokenizer.from_pretrained(folder / "saved")
    assert isinstance(theirs, TransformerVQTokenizer)
    return ours, theirs


@given(text=TEXTS)
def test_ids_equal_ours_and_decode_to_the_text(pair, text):
    ours, theirs = pair
    tokens = theirs.encode(text, add_special_tokens=False)
    assert tokens == ours.encode(text)
    assert theirs(text)["input_ids"] == [ours.bos, *tokens]
    assert theirs.decode(tokens) == text
    assert theirs.decode(theirs(text)["input_ids"][1:]) == text


def test_token_names_and_ids_map_one_to_one(pair):
    ours, theirs = pair
    names = theirs.convert_ids_to_tokens(list(range(ours.vocab_size)))
    assert len(set(names)) == len(theirs) == theirs.vocab_size == ours.vocab_size
    assert theirs.convert_tokens_to_ids(names) == list(range(ours.vocab_size))
    assert theirs.get_vocab() == {name: i for i, name in enumerate(names)}


def test_invalid_utf8_is_decoded_according_to_errors(pair):
    ours, theirs = pair
    tokens = ours.encode("a\udcff\u00e9")
    assert theirs.encode("a\udcff\u00e9", add_special_tokens=False) == tokens
    assert theirs.decode(tokens) == "a\ufffd\u00e9"
    if isinstance(ours, SentencePieceTokenizer):
        return
    theirs.errors = "surrogateescape"
    assert theirs.decode(tokens) == "a\udcff\u00e9"
    theirs.errors = "replace"


def test_batches_are_padded_on_the_left(pair):
    ours, theirs = pair
    batch = theirs(["dogs saw", "a"], padding=True, return_tensors="pt")
    long, short = ([ours.bos, *ours.encode(text)] for text in ("dogs saw", "a"))
    n_more = len(long) - len(short)
    assert batch["input_ids"].tolist() == [long, [ours.bos] * n_more + short]
    mask = [[1] * len(long), [0] * n_more + [1] * len(short)]
    assert batch["attention_mask"].tolist() == mask
    texts = theirs.batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert texts == ["dogs saw", "a"]


def test_special_tokens_are_skipped_on_request(pair):
    ours, theirs = pair
    assert theirs.decode([ours.bos]) == (ours.decode([ours.bos]).decode() or theirs.bos_token)
    assert theirs.decode([ours.bos], skip_special_tokens=True) == ""
    assert theirs.eos_token_id == ours.eod
    assert (theirs.bos_token_id, theirs.pad_token_id) == (ours.bos, ours.bos)
    assert theirs.unk_token_id is None


def test_missing_vocabulary_file_is_rejected(pair, tmp_path):
    ours, theirs = pair
    theirs.save_pretrained(tmp_path)
    TransformerVQConfig().save_pretrained(tmp_path)
    assert (tmp_path / MODEL_FILE).is_file() == isinstance(ours, SentencePieceTokenizer)
    if isinstance(ours, SentencePieceTokenizer):
        (tmp_path / MODEL_FILE).unlink()
        with pytest.raises((ValueError, OSError), match=r"tokenizer\.model"):
            AutoTokenizer.from_pretrained(tmp_path)
