"""Samples: text as it comes, stop strings, characters split over tokens, images."""

import json

import numpy as np
import pytest
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from servers import a_run

from transformer_vq import TransformerVQ
from transformer_vq.cli.main import main
from transformer_vq.config import DataConfig
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.generation import text as text_module
from transformer_vq.generation.decode import generate
from transformer_vq.generation.sampling import Sampling
from transformer_vq.generation.text import (
    TextStream,
    generate_text,
    prefill_text,
    sample_images,
    sample_text,
    save_grid,
)


def pushed(text, stop=()):
    """Return the chunks of text after each byte, and whether a stop string was found."""
    stream = TextStream(ByteTokenizer(), stop)
    chunks = [stream.push(token) for token in text.encode()]
    return [*chunks, stream.end()], stream.stopped


@given(st.text(max_size=30))
def test_streamed_text_round_trips(text):
    chunks, stopped = pushed(text)
    assert "".join(chunks) == text
    assert not stopped


def test_a_character_appears_with_its_last_byte():
    chunks, _ = pushed("a\u00e9\U0001f600b")
    assert chunks == ["a", "", "\u00e9", "", "", "", "\U0001f600", "b", ""]


def test_an_incomplete_character_at_the_end_is_replaced():
    stream = TextStream(ByteTokenizer())
    assert stream.push(0xC3) == ""
    assert stream.end() == "\ufffd"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_text_ends_before_a_stop_string(text, stop):
    chunks, stopped = pushed(text, stop)
    # The stop string that is complete first ends the text, whatever comes later.
    ends = [text.find(word) + len(word) for word in stop if word in text]
    first = min(ends, default=None)
    want = text
    if first is not None:
        want = min((text[:first].split(word)[0] for word in stop), key=len)
    assert "".join(chunks) == want
    assert stopped == (first is not None)


def test_a_possible_stop_string_is_held_back():
    assert pushed("xSTy", ["STOP"])[0] == ["x", "", "", "STy", ""]
    assert pushed("xST", ["STOP"])[0] == ["x", "", "", "ST"]


def test_row_zero_is_written_while_decoding():
    model, tokenizer = TransformerVQ(tiny_config(vocab_size=256)).eval(), ByteTokenizer()
    context = prefill_text(model, tokenizer, "hello")
    written = []
    options = {"seed": 1, "write": written.append}
    texts = sample_text(model, tokenizer, context.repeat(3), 20, Sampling(), **options)
    assert len({sample.text for sample in texts}) == 3
    assert "".join(written) == texts[0].text
    assert sample_text(model, tokenizer, context, 20, Sampling(), seed=1) == texts[:1]


def test_a_text_ends_where_the_model_ends_the_document(monkeypatch):
    tokenizer = ByteTokenizer(end_of_document=True)
    script = [[120, 120, 256], [120, 256, 121], [256, 120, 121], [65, 65, 121]]

    def scripted(model, context, max_new_tokens, sampling, seed, stop_tokens, **options):
        done = [False] * 3
        for tokens in script[:max_new_tokens]:
            yield [None if over else t for t, over in zip(tokens, done, strict=True)]
            done = [o or t in stop_tokens for o, t in zip(done, tokens, strict=True)]

    monkeypatch.setattr(text_module, "stream", scripted)
    model = TransformerVQ(tiny_config(vocab_size=257)).eval()
    context = prefill_text(model, tokenizer, "hello").repeat(3)
    texts = sample_text(model, tokenizer, context, 4, Sampling())
    assert texts == [("xx", True), ("x", True), ("", True)]
    texts = sample_text(model, tokenizer, context, 1, Sampling())
    assert texts == [("x", False), ("x", False), ("", True)]
    texts = sample_text(model, tokenizer, context, 4, Sampling(), stop_at_end=False)
    assert texts == [("xxA", False), ("xxA", False), ("yyy", False)]
    texts = sample_text(model, tokenizer, context, 4, Sampling(), stop=["x"])
    assert texts == [("", False), ("", False), ("", True)]


def test_generate_text_returns_the_continuation():
    model, tokenizer = TransformerVQ(tiny_config(vocab_size=256)).eval(), ByteTokenizer()
    text = generate_text(model, tokenizer, "hello", 20, temperature=0)
    tokens = generate(model, [0, *b"hello"], 20, temperature=0)
    assert text == bytes(tokens).decode(errors="replace")


def test_an_empty_prompt_starts_a_document_or_keeps_the_context():
    model = TransformerVQ(tiny_config(vocab_size=256)).eval()
    started = prefill_text(model, ByteTokenizer(), "")
    assert started.state.position.tolist() == [1]
    assert prefill_text(model, ByteTokenizer(), "", started) is started


def test_images_keep_their_upper_part(tmp_path):
    from PIL import Image

    original = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(original).save(tmp_path / "a.png")
    model = TransformerVQ(tiny_config(vocab_size=256, block_len=64)).eval()
    drawn = sample_images(
        model, 0, Sampling(), n=2, images=[tmp_path / "a.png"], keep=63 / 64, seed=1
    )
    assert drawn.shape == (2, 64, 64, 3)
    assert (drawn[:, :63] == original[:63]).all()
    assert (drawn[0, 63] != drawn[1, 63]).any()
    save_grid(np.concatenate([drawn, drawn[:1]]), tmp_path / "grid.png", scale=2)
    with Image.open(tmp_path / "grid.png") as image:
        grid = np.asarray(image)
    assert grid.shape == (256, 256, 3)
    assert (grid[::2, ::2][:64, 64:] == drawn[1]).all()
    assert (grid[128:, 128:] == 255).all()  # three images leave one place free
    with pytest.raises(ValueError, match="keep=1"):
        sample_images(model, 0, Sampling(), images=[tmp_path / "a.png"], keep=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("sample") / "run")


def sampled(capsys, *arguments):
    capsys.readouterr()
    main(["sample", *map(str, arguments)])
    return capsys.readouterr().out


def test_the_command_prints_what_the_library_samples(run, tmp_path, capsys):
    options = ["--tokens", 30, "--seed", 3]
    out = sampled(capsys, run, "--prompt", "the cat", *options)
    assert out.startswith("the cat")
    (tmp_path / "prompt.txt").write_text("the cat")
    from_file = sampled(capsys, run, "--prompt-file", tmp_path / "prompt.txt", *options)
    assert out == "the cat" + from_file
    several = sampled(capsys, run, "--prompt", "the cat", "--batch", 2, "--json", *options)
    texts = json.loads(several.splitlines()[-1])["texts"]
    assert texts[0] + "\n" == from_file
    assert "--- 2 ---" in several
    assert sampled(capsys, run, *options)  # no prompt
    assert sampled(capsys, run, "--prompt", "the cat", "--tokens", 0) == "the cat\n"


def test_a_saved_state_continues_without_its_prompt(run, tmp_path, capsys):
    options = ["--tokens", 30, "--seed", 3]
    whole = sampled(capsys, run, "--prompt", "the cat sat", *options)
    state = tmp_path / "state"
    sampled(capsys, run, "--prompt", "the cat", "--tokens", 0, "--save-state", state)
    later = sampled(capsys, run, "--load-state", state, "--prompt", " sat", *options)
    assert whole == "the cat" + later


def test_a_model_of_images_samples_a_grid(tmp_path, capsys):
    from PIL import Image

    picture = tmp_path / "0.png"
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(picture)
    run = a_run(tmp_path / "run", DataConfig("images", str(tmp_path)), block_len=256)
    out = tmp_path / "drawn.png"
    arguments = ["--images", picture, "--keep", 63 / 64, "--seed", 1]
    assert sampled(capsys, run, *arguments, "--out", out) == f"{out}\n"
    with Image.open(out) as image:
        assert image.size == (256, 256)

    # Without --out the image is written to the run and replaces the previous one, nothing else.
    default = run / "samples.png"
    default.write_bytes(b"the one before")
    assert sampled(capsys, run, *arguments) == f"{default}\n"
    assert default.read_bytes() == out.read_bytes()
