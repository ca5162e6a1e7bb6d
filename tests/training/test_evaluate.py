"""Evaluation of runs on their own and on other data, with their own vocabulary."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny_run
from test_evaluation import nats_of

from transformer_vq.data.corpus import prepare
from transformer_vq.data.tokenizers import MODEL_FILE, load_tokenizer
from transformer_vq.training.checkpoint import load_model, read_config
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import train


def test_evaluate_uses_the_data_of_the_run_or_other_data(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 2})
    train(config, tmp_path / "run")
    result = evaluate(str(tmp_path / "run"))
    assert list(result.protocols) == ["windowed", "streaming"]
    assert result.checkpoint == "best"
    other = tmp_path / "other.txt"
    other.write_text("something else entirely " * 50)
    data = type(config.data)(path=str(other), cache=config.data.cache)
    elsewhere = evaluate(tmp_path / "run", data=data, protocols=["windowed"])
    assert elsewhere.protocols["windowed"].tokens == 60
    with pytest.raises(ValueError, match="unknown split 'dev'"):
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
    config = tiny_run(tmp_path, model={"vocab_size": 300}, train={"steps": 1})
    config = replace(config, data=replace(config.data, dataset="pg19", path=str(tmp_path)))
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
    explicit = replace(other, tokenizer=str(run / MODEL_FILE))
    found = evaluate(run, data=other, max_tokens=50)
    assert found == evaluate(run, data=explicit, max_tokens=50)

    # If the books of the run change, another vocabulary is learned from them.
    write_books(tmp_path, tolstoy)
    message = f"do not have the vocabulary of {run}.*--data.tokenizer {run / MODEL_FILE}$"
    with pytest.raises(ValueError, match=message):
        evaluate(run)
    evaluate(run, data=replace(own, tokenizer=str(run / MODEL_FILE)), max_tokens=50)

    # A vocabulary given by the user is not replaced silently.
    learned = prepare(own, 300).folder / MODEL_FILE
    with pytest.raises(ValueError, match=message):
        evaluate(run, data=replace(other, tokenizer=str(learned)))
