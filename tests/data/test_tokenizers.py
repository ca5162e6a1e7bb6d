"""Text to tokens and back, exactly; learning a vocabulary, and what can go wrong with it."""

import io
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data import tokenizers as module
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from transformer_vq.errors import MissingExtraError

VOCAB_SIZE = 400
EXACT = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
AWKWARD = [
    " ",
    "   three before, two  within, one after ",
    "\n\n\tA tab,\r\nboth line ends,\ra lone one.\n",
    "\u00e9t\u00e9, \u65e5\u672c\u8a9e, \u05d0\u05d1, \U0001f600\u200d\U0001f680",
    "a\u2581b \u2581\u2581 \u2581",
    "<s> <unk> <0x41> </s>",
    "\x00\x01\x1f\x7f\u00a0\u2028\u3000\ufeff\ufffd\U0010ffff",
    "e\u0301 is not \u00e9",
]


def story(n_lines: int = 400) -> str:
    """Lines that are alike but not the same."""
    who = ["the fox", "a dog", "the old man", "her sister", "nobody", "the captain"]
    what = ["jumped over", "looked at", "had never seen", "walked along", "remembered"]
    return "".join(
        f"{'  ' * (i % 3)}In {1800 + i % 90} {who[i % 6]} {what[i % 5]} the lazy river.\n"
        for i in range(n_lines)
    )


def train_other(**options) -> bytes:
    """A model of SentencePiece's own making."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(story().splitlines()),
        model_writer=model,
        minloglevel=2,
        **{"vocab_size": 80, **options},
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "books.model"
    module.train_sentencepiece([story()], VOCAB_SIZE, path)
    return path


@pytest.fixture(scope="module")
def learned(model_path):
    return SentencePieceTokenizer(model_path)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_survive(learned, text):
    for tokenizer in (learned, ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode(text)) == text.encode()


@given(st.lists(st.text(max_size=9) | st.sampled_from([*AWKWARD, story(2)]), max_size=9))
def test_any_text_survives(learned, parts):
    text = "".join(parts)
    for tokenizer in (learned, ByteTokenizer()):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text.encode()
        assert b"".join(tokenizer.decode([token]) for token in tokens) == text.encode()
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer is not learned or tokenizer.bos not in tokens


def test_bytes_that_are_no_utf8_survive(learned):
    data = b"caf\xe9 \xff\xfe ok"
    for tokenizer in (learned, ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode(os.fsdecode(data))) == data


def test_the_vocabulary_is_the_one_asked_for(learned):
    assert (learned.vocab_size, learned.bos) == (VOCAB_SIZE, 1)
    assert learned.decode([0]) == "\ufffd".encode()
    assert learned.decode([learned.bos]) == b""
    assert len(learned.encode(story())) < len(story()) / 2


def test_ids_are_those_of_sentencepiece(learned, model_path):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    for text in [story(), *(text for text in AWKWARD if "\u2581" not in text)]:
        assert learned.encode(text) == reference.encode(text)


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
def test_models_of_another_make_give_their_own_ids(tmp_path, options):
    path = tmp_path / "other.model"
    path.write_bytes(train_other(**options))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = SentencePieceTokenizer(path)
    for text in (story(9), "\n\n  two  words \n\n\n", "caf\u00e9\r\n"):
        assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode("the fox")).decode().strip() == "the fox"


def test_the_same_text_gives_the_same_file(model_path, tmp_path):
    module.train_sentencepiece(iter([story()]), VOCAB_SIZE, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == model_path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.model"]


def test_a_saved_tokenizer_is_loaded(learned, model_path, tmp_path):
    learned.save(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == model_path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.model"]
    assert module.load_tokenizer(tmp_path).encode("the fox") == learned.encode("the fox")


def test_without_a_model_tokens_are_bytes(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    tokenizer = module.load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos) == (256, 0)
    assert tokenizer.encode("a\u00e9") == [97, 195, 169]


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_broken_model_is_named(model_path, tmp_path, keep):
    path = tmp_path / "broken.model"
    path.write_bytes(model_path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"broken\.model is not a SentencePiece model"):
        SentencePieceTokenizer(path)


@pytest.mark.parametrize("error", [RuntimeError(), ValueError(), TypeError(), MemoryError()])
def test_any_error_of_sentencepiece_is_named(model_path, monkeypatch, error):
    def fail(*_):
        raise error

    processor = sentencepiece.SentencePieceProcessor
    monkeypatch.setattr(processor, "LoadFromSerializedProto", fail)
    with pytest.raises(DataError, match=r"books\.model is not a SentencePiece model"):
        SentencePieceTokenizer(model_path)


def test_a_model_that_is_not_a_regular_file_is_named(tmp_path):
    with pytest.raises(DataError, match="neither a regular file nor a folder"):
        SentencePieceTokenizer(Path("/dev/zero"))
    with pytest.raises(DataError, match="is a folder"):
        SentencePieceTokenizer(tmp_path)


def test_a_tokenizer_is_loaded_only_with_the_digest_that_was_recorded(learned, tmp_path):
    learned.save(tmp_path)
    assert module.load_tokenizer(tmp_path, learned.sha256).sha256 == learned.sha256
    path = tmp_path / "tokenizer.model"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tokenizer\.model is corrupt or another vocabulary"):
        module.load_tokenizer(tmp_path, learned.sha256)
    path.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.model does not exist"):
        module.load_tokenizer(tmp_path, learned.sha256)


def test_a_model_that_is_a_broken_link_is_not_replaced_by_bytes(tmp_path):
    (tmp_path / "tokenizer.model").symlink_to("nowhere")
    with pytest.raises(DataError, match="broken symbolic link"):
        module.load_tokenizer(tmp_path)


def test_bytes_have_no_digest():
    assert ByteTokenizer().sha256 is None


def test_an_absent_model_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.model does not exist"):
        SentencePieceTokenizer(tmp_path / "absent.model")


def test_a_model_must_have_a_bos(tmp_path):
    path = tmp_path / "other.model"
    path.write_bytes(train_other(bos_id=-1))
    with pytest.raises(DataError, match=r"other\.model has no bos piece"):
        SentencePieceTokenizer(path)


def test_sentencepiece_must_be_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'transformer-vq\[text\]'"):
        module.train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")


def test_too_large_a_vocabulary_says_which_is_not(tmp_path):
    text = story(20)
    with pytest.raises(DataError, match=r"set --model\.vocab-size to at most") as caught:
        module.train_sentencepiece([text], 5000, tmp_path / "books.model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    largest = int(str(caught.value).split()[-1])
    module.train_sentencepiece([text], largest, tmp_path / "books.model")
    assert SentencePieceTokenizer(tmp_path / "books.model").vocab_size == largest


def test_too_small_a_vocabulary_says_which_is_not(tmp_path):
    with pytest.raises(DataError, match=r"set --model\.vocab-size to at least") as caught:
        module.train_sentencepiece([story()], 100, tmp_path / "books.model")
    smallest = int(str(caught.value).split()[-1])
    module.train_sentencepiece([story()], smallest, tmp_path / "books.model")


def test_there_must_be_text_to_learn_from(tmp_path):
    with pytest.raises(DataError, match="there is no text"):
        module.train_sentencepiece(["", "\n\n"], VOCAB_SIZE, tmp_path / "books.model")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.exit('out of luck')", "out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_a_failing_process_is_reported(monkeypatch, tmp_path, program, message):
    monkeypatch.setattr(module, "_TRAINER", program)
    with pytest.raises(DataError, match=message):
        module.train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_process_and_no_file(monkeypatch, tmp_path):
    seen = []

    def interrupt(log, vocab_size):
        seen.append(int(next(iter(log))))
        raise KeyboardInterrupt

    program = "import os, time; os.write(2, b'%d\\n' % os.getpid()); time.sleep(60)"
    monkeypatch.setattr(module, "_TRAINER", program)
    monkeypatch.setattr(module, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        module.train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_all_pieces(monkeypatch, tmp_path):
    steps = []
    monkeypatch.setattr(module, "progress_bar", lambda *args: nullcontext(steps.append))
    module.train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")
    assert all(step > 0 for step in steps)
    assert VOCAB_SIZE - 20 <= sum(steps) <= VOCAB_SIZE


@given(st.text(alphabet="ab \n"), st.floats(0, 1))
def test_some_lines_are_never_more_than_their_share(text, share):
    lines = list(module._some_lines(text, share))
    assert sum(map(len, lines)) <= share * len(text)
    assert share < 1 or "".join(lines) == text


def test_text_beyond_the_limit_is_taken_evenly(monkeypatch, tmp_path):
    texts = [f"{letter * 9}\n" * 100 for letter in "abcd"]
    n_chars = sum(map(len, texts))

    def keep_text(folder, vocab_size):
        Path(folder, "text").rename(Path(folder, "learned.model"))

    monkeypatch.setattr(module, "MAX_CHARS", n_chars // 4)
    monkeypatch.setattr(module, "_learn", keep_text)
    module.train_sentencepiece(texts, VOCAB_SIZE, tmp_path / "text", n_chars)
    lines = (tmp_path / "text").read_text().split("\n")
    assert [lines.count(letter * 9) for letter in "abcd"] == [25] * 4
