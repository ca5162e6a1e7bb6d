"""Hugging Face tokenizers: ids of the library, text per token, special tokens, and bad files."""

import json
import os
import shutil

import numpy as np
import pytest
from data_helpers import cut_text, rejection, story
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from transformer_vq.data.tokenizers import load_tokenizer, open_tokenizer
from transformer_vq.files import file_digest

NASTY = [
    "",
    " ",
    "  two  spaces ",
    "\n\n\tA tab,\r\nboth line ends,\ra single one.\n",
    "\u00e9t\u00e9, \u65e5\u672c\u8a9e, \U0001f600\u200d\U0001f680 e\u0301",
    "a\u2581b \u2581\u2581",
    "<s> </s> <unk> <0x41> <|endoftext|>",
    "\x00\x01\x7f\u00a0\u2028\u3000\ufeff\ufffd\U0010ffff",
]
LETTERS = sorted(set(story()) - {" ", "\n"})


def gpt2() -> Tokenizer:
    """Return a byte-level tokenizer with bos = eos, as GPT-2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": 330, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator([story()], trainer)
    return tokenizer


def llama() -> Tokenizer:
    """Return a BPE tokenizer with byte fallback that puts a space before each text."""
    special, merges = ["<unk>", "<s>", "</s>"], [("t", "h"), ("th", "e"), ("\u2581", "the")]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *LETTERS]
    vocab = {piece: i for i, piece in enumerate([*pieces, *map("".join, merges)])}
    fallback = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    tokenizer = Tokenizer(models.BPE(vocab, merges, **fallback))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fuse = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*fuse, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def t5() -> Tokenizer:
    """Return a unigram tokenizer, which splits at white space."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("\u2581", -3.0)]
    pieces += [("\u2581the", -2.0), *((letter, -4.0) for letter in [*LETTERS, "<", ">", "/"])]
    tokenizer = Tokenizer(models.Unigram(pieces, 2, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer


OPENED = {}
KINDS = {"gpt2": gpt2, "llama": llama, "t5": t5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a tokenizer.json for each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, build in KINDS.items():
        (root / name).mkdir()
        build().save(str(root / name / "tokenizer.json"))
    return root


@pytest.fixture(params=KINDS)
def folder(request, folders):
    return folders / request.param


def reference(folder) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_bos_and_eos_are_recognized_by_name(folder):
    tokenizer = open_tokenizer(folder, end_of_document=True)
    found = tokenizer.names[tokenizer.bos], tokenizer.names[tokenizer.eod]
    ends = {"gpt2": ["<|endoftext|>"] * 2, "llama": ["<s>", "</s>"], "t5": ["</s>"] * 2}
    assert [*found] == ends[folder.name]
    assert tokenizer.decode([tokenizer.bos, tokenizer.eod]) == b""
    assert open_tokenizer(folder).eod is None
    assert tokenizer.vocab_size == reference(folder).get_vocab_size()


@pytest.mark.parametrize("text", [story(5), *NASTY])
def test_ids_are_those_of_the_library_without_special_tokens(folder, text):
    tokenizer, library = open_tokenizer(folder, True), reference(folder)
    tokens = tokenizer.encode(text)
    special = {i for i, x in library.get_added_tokens_decoder().items() if x.special}
    assert not (special - {library.token_to_id("<unk>")}) & set(tokens)
    want = library.encode(text, add_special_tokens=False).ids
    assert tokens == want or (folder.name == "t5" and special & set(want))


def test_batches_equal_single_texts(folder):
    tokenizer = open_tokenizer(folder)
    for texts in ([*NASTY, story(9)], ["ok", "caf\udce9 \ud800"], []):
        batch = tokenizer.encode_batch(texts)
        assert [x.tolist() for x in batch] == [tokenizer.encode(text) for text in texts]
        assert all(x.dtype == np.uint32 for x in batch)


@pytest.mark.parametrize("text", ["the fox saw 12 dogs", story(3), *NASTY])
def test_tokens_decode_one_by_one_like_the_library(folders, text):
    for kind in ("gpt2", "llama"):
        tokenizer, library = open_tokenizer(folders / kind), reference(folders / kind)
        tokens = tokenizer.encode(text)
        data = b"".join(tokenizer.decode([token]) for token in tokens)
        assert data == tokenizer.decode(tokens)
        expected = (" " if kind == "llama" and text else "") + library.decode(tokens)
        assert data.decode() == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet="abZ 1.,\n\r\u00e9\u65e5'\u00a0<"))
def test_the_tokens_of_a_text_are_those_of_its_parts(folders, kind, text):
    tokenizer = OPENED.setdefault(kind, open_tokenizer(folders / kind))
    parts = cut_text(tokenizer, text)
    assert "".join(parts) == text
    assert [t for part in parts for t in tokenizer.encode(part)] == tokenizer.encode(text)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_saved_tokenizer_is_loaded_with_its_chat_template(folders, tmp_path, as_file):
    shutil.copy(folders / "llama" / "tokenizer.json", tmp_path)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "</s>", "eos_token": "<s>", "model_max_length": 5}
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    given, saved = open_tokenizer(tmp_path, True), tmp_path / "saved"
    saved.mkdir()
    given.save(saved)
    loaded = load_tokenizer(saved, given.sha256, True)
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in saved.iterdir()} == names
    assert (loaded.bos, loaded.eod, loaded.settings) == (2, 1, given.settings)
    assert loaded.settings["chat_template"] == template
    assert loaded.sha256 == given.sha256 == file_digest(saved / "tokenizer.json")
    assert loaded.encode(NASTY[6]) == given.encode(NASTY[6])
    assert "corrupt or another vocabulary" in rejection(load_tokenizer, saved, "0" * 64)


def test_saved_tokenizers_put_bos_before_texts_and_keep_their_digest(folder, tmp_path):
    given = open_tokenizer(folder)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        given.save(tmp_path / name)
        saved = open_tokenizer(tmp_path / name)
        assert saved.sha256 == given.sha256 == file_digest(tmp_path / name / "tokenizer.json")
        library = reference(tmp_path / name)
        assert library.encode("the fox").ids == [given.bos, *given.encode("the fox")]
        given = saved


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {}}', b"\xff\xfe\x00", b"null"])
def test_a_file_that_is_not_a_tokenizer_is_rejected(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert f"{path} is not a Hugging Face tokenizer" in rejection(open_tokenizer, path)


def test_a_tokenizer_without_bos_and_eos_names_the_fix(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "stop": 1}))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert "not those of tokenizer_config.json; name one" in rejection(open_tokenizer, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "stop"}')
    tokenizer = open_tokenizer(tmp_path, True)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.encode("a")) == (1, 1, [0])
    assert "cannot encode a text" in rejection(tokenizer.encode, "b")
    assert "cannot encode a text" in rejection(tokenizer.encode_batch, ["b"])


def test_a_folder_without_a_tokenizer_is_rejected(tmp_path):
    message = rejection(open_tokenizer, tmp_path)
    assert "has no tokenizer.json and no tokenizer.model" in message
    assert "absent: No such file" in rejection(open_tokenizer, tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    assert "neither a regular file nor a folder" in rejection(open_tokenizer, tmp_path / "pipe")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert "is not a SentencePiece model" in rejection(open_tokenizer, tmp_path)


def test_a_model_with_a_vocabulary_is_not_read_as_bytes(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "transformer_vq", "vocab_size": 4096}')
    message = rejection(load_tokenizer, tmp_path)
    assert message.startswith(f"{tmp_path} has 4,096 tokens, but no tokenizer.model or tokenizer")
    (tmp_path / "config.json").write_text('{"vocab_size": 257}')
    assert load_tokenizer(tmp_path, end_of_document=True).eod == 256


def test_special_tokens_in_a_text_stay_text(folders):
    tokenizer = open_tokenizer(folders / "t5")
    assert tokenizer.decode(tokenizer.encode("the </s>")).split() == [b"the", b"</s>"]
