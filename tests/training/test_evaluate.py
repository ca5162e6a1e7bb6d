"""Evaluation of runs on their own and on other data, with their own vocabulary."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny_run
from test_evaluation import nats_of

from transformer_vq.data.prepare import prepare
from transformer_vq.data.tokenizers import JSON_FILE, load_tokenizer
from transformer_vq.training.checkpoint import load_model, read_config
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import train


def test_evaluate_uses_the_data_of_the_run_or_other_data(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 2})
    train(config, tmp_path / "run")
    result = evaluate(str(tmp_path / "run"))
    assert list(result.protocols) == ["windowed", "streaming"]
    assert (result.checkpoint, result.step, result.to_dict()["step"]) == ("best", 2, 2)
    last = evaluate(tmp_path / "run", checkpoint="last", protocols=["windowed"])
    assert (last.checkpoint, last.step) == ("step 2", 2)
    other = tmp_path / "other.txt"
    other.write_text("something else entirely " * 50)
    data = type(config.data)(path=str(other), cache=config.data.cache)
    elsewhere = evaluate(tmp_path / "run", data=data, protocols=["windowed"])
    assert elsewhere.protocols["windowed"].tokens == 60 + 1  # bytes and the end of the document
    with pytest.raises(ValueError, match="there is no dev split"):
        evaluate(tmp_path / "run", split="dev")


def write_books(folder, sentences):
    """Write two books per split, with sentences in random order."""
    generator = random.Random(0)
    for name in ("train", "validation", "test"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            text = "\r\n".join(generator.choices(sentences, k=60))
            (folder / name / f"{number}.txt").write_bytes(text.encode())


def train_on_books(tmp_path):
    """Train one step on books in `tmp_path`, with a learned vocabulary; return the run folder."""
    write_books(
        tmp_path, ["It was the best of times,", "it was the worst of times.", "Call me Ishmael."]
    )
    config = tiny_run(tmp_path, model={"vocab_size": 270}, train={"steps": 1})
    config = replace(
        config,
        data=replace(
            config.data, dataset="pg19", path=str(tmp_path), tokenizer="bpe", end_of_document=False
        ),
    )
    train(config, tmp_path / "run")
    return tmp_path / "run"


def test_word_perplexity_of_books_matches_the_definition(tmp_path):
    run = train_on_books(tmp_path)
    windowed, streaming = evaluate(run).protocols.values()

    tokenizer = load_tokenizer(run)
    model, _ = load_model(run)
    model.eval()
    nats = words = 0.0
    for path in sorted((tmp_path / "test").iterdir()):
        original = path.read_bytes()
        tokens = np.array(tokenizer.encode(original.decode().replace("\r\n", "\n")))
        nats += float(nats_of(model, tokens, tokenizer.bos).sum())
        words += len(original.split())
    assert streaming.words == words
    assert streaming.word_perplexity == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert windowed.words == words
    assert windowed.nats != streaming.nats


def test_evaluate_rejects_books_in_another_vocabulary(tmp_path):
    run = train_on_books(tmp_path)
    own = read_config(run).data
    tolstoy = ["Happy families are all alike;", "every unhappy family is unhappy."]
    write_books(tmp_path / "elsewhere", tolstoy)
    other = replace(own, path=str(tmp_path / "elsewhere"))
    explicit = replace(other, tokenizer=str(run / JSON_FILE))
    found = evaluate(run, data=other, max_tokens=50)
    assert found == evaluate(run, data=explicit, max_tokens=50)

    # If the books of the run change, another vocabulary is learned from them.
    write_books(tmp_path, tolstoy)
    message = f"do not have the vocabulary of {run}; use --data.tokenizer {run}$"
    with pytest.raises(ValueError, match=message):
        evaluate(run)
    evaluate(run, data=replace(own, tokenizer=str(run / JSON_FILE)), max_tokens=50)

    # A vocabulary given by the user is not replaced silently.
    learned = prepare(own, 270).folder / JSON_FILE
    with pytest.raises(ValueError, match=message):
        evaluate(run, data=replace(other, tokenizer=str(learned)))


def test_split_all_scores_every_document_with_the_vocabulary_of_the_run(tmp_path):
    run = train_on_books(tmp_path)
    own = read_config(run).data
    book = tmp_path / "book.txt"
    book.write_text("It was the worst of times. Call me anything else.\n" * 9)
    found = evaluate(run, data=replace(own, path=str(book)), split="all")
    assert found.split == "all"
    for result in found.protocols.values():
        assert result.bytes == len(book.read_bytes())
        assert result.words == len(book.read_text().split())
        assert result.tokens == len(load_tokenizer(run).encode(book.read_text()))
    everything = evaluate(run, split="all", protocols=["windowed"]).protocols["windowed"]
    books = [x for name in ("train", "validation", "test") for x in (tmp_path / name).iterdir()]
    assert everything.words == sum(len(book.read_text().split()) for book in books)


def test_other_data_do_not_use_the_validation_and_test_files_of_the_run(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    (tmp_path / "held-out.txt").write_text("held out " * 50)
    data = replace(config.data, test_path=str(tmp_path / "held-out.txt"))
    train(replace(config, data=data), tmp_path / "run")
    assert evaluate(tmp_path / "run").protocols["streaming"].bytes == 450
    (tmp_path / "other.txt").write_text("something else " * 100)
    other = replace(data, path=str(tmp_path / "other.txt"))
    assert evaluate(tmp_path / "run", data=other).protocols["streaming"].bytes == 75
    found = evaluate(tmp_path / "run", data=other, split="all").protocols["streaming"]
    assert (found.bytes, found.tokens) == (1500, 1501)
