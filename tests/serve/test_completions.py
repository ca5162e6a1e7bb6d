"""POST /v1/completions: texts of the library, streams, log probabilities, and bad input."""

import json

import pytest
import torch
from servers import TOKENIZER, a_run, a_service, an_endless_service, running, sampled

from transformer_vq.cli.main import main
from transformer_vq.serve.service import Limits
from transformer_vq.training.loading import load_model_and_tokenizer


def test_equal_seeds_give_the_text_of_tvq_sample(tmp_path, capsys):
    run = a_run(tmp_path / "run")
    model, tokenizer = load_model_and_tokenizer(run)
    limits = Limits(new_tokens=60)
    with running(a_service(tmp_path, model, tokenizer, n_slots=1, limits=limits)) as client:
        for seed in range(2):
            arguments = ["--prompt", "the cat", "--seed", str(seed), "--tokens", "60", "--json"]
            main(["sample", str(run), *arguments])
            want = json.loads(capsys.readouterr().out.splitlines()[-1])
            (choice,) = client.complete(prompt="the cat", seed=seed)["choices"]
            assert [choice["text"]] == want["texts"]
            assert [choice["finish_reason"] == "stop"] == want["ended"]


def test_default_length_is_within_the_limit_of_the_server(tmp_path):
    with running(an_endless_service(tmp_path, limits=Limits(new_tokens=7))) as client:
        assert client.complete(prompt="x")["usage"]["completion_tokens"] == 7
    with running(an_endless_service(tmp_path)) as client:
        assert client.complete(prompt="x")["usage"]["completion_tokens"] == 500


def test_several_prompts_and_samples_have_their_own_index(client, service):
    found = client.complete(prompt=["one", "two"], n=3, max_tokens=8, seed=1)
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == sampled(service, "one", 8, 1, n=3) + sampled(service, "two", 8, 1, n=3)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert (found["object"], found["model"]) == ("text_completion", "small")
    usage = found["usage"]
    assert usage["prompt_tokens"] == 8
    assert usage["total_tokens"] == 8 + usage["completion_tokens"]


def test_stream_has_the_same_text_and_ends_with_usage(client):
    body = {"prompt": "It was", "max_tokens": 20, "seed": 5, "n": 2}
    want = client.complete(**body)
    *chunks, last = client.stream(**body, stream_options={"include_usage": True})
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in want["choices"]]
    assert reasons == [choice["finish_reason"] for choice in want["choices"]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
    assert len(chunks) > 10


def test_echo_and_log_probabilities_are_those_of_the_model(client, service):
    body = {"prompt": "It was", "max_tokens": 3, "seed": 5, "echo": True, "logprobs": 2}
    (choice,) = client.complete(**body)["choices"]
    assert choice["text"].startswith("It was")
    found = choice["logprobs"]
    scores = service.engine.model(torch.tensor([[TOKENIZER.bos, *b"It was"]])).logits[0]
    want = scores.detach().log_softmax(-1)
    assert found["tokens"][:7] == ["", *"It was"]
    assert found["token_logprobs"][0] is None
    for i, byte in enumerate(b"It was"):
        assert found["token_logprobs"][i + 1] == pytest.approx(float(want[i, byte]), abs=1e-4)
        assert len(found["top_logprobs"][i + 1]) <= 2
    assert found["text_offset"][:8] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert len(found["tokens"]) == 10
    streamed = client.stream(**body)
    names = [x for chunk in streamed for x in chunk["choices"][0]["logprobs"]["tokens"]]
    assert names == found["tokens"]


def test_stop_string_across_tokens(client):
    (text,) = [x["text"] for x in client.complete(prompt="x", max_tokens=60, seed=1)["choices"]]
    word = next(text[i : i + 2] for i in range(3, 50) if text[i : i + 2].isascii())
    found = client.complete(prompt="x", max_tokens=60, seed=1, stop=[word, "never"])
    (choice,) = found["choices"]
    assert choice["text"] == text[: text.index(word)]
    assert choice["finish_reason"] == "stop"
    streamed = client.stream(prompt="x", max_tokens=60, seed=1, stop=word)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"max_tokens": -1}, 400, "max_tokens: should be greater than or equal to 0"),
        ({"max_tokens": 10**9}, 400, "max_tokens: must be at most 65,536"),
        ({"model": "gpt-4"}, 404, "the model 'gpt-4' does not exist"),
        ({"prompt": {"a": 1}}, 400, "prompt: give a text"),
        ({"prompt": [True]}, 400, "prompt: every entry"),
        ({"prompt": [257]}, 400, "token ids must be from 0 to 256"),
        ({"prompt": "\ud800"}, 400, "not valid Unicode"),
        ({"temperature": float("nan")}, 400, ""),
        ({"top_p": 0}, 400, "top_p: should be greater than 0"),
        ({"stop": ""}, 400, "stop.0: "),
        ({"stop": ["x"] * 17}, 400, "at most 16"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"suffix": "x"}, 400, "suffix: is not a known field"),
        ({"presence_penalty": 1.0}, 400, "presence_penalty is not supported"),
        ({"stream_options": {"include_usage": True}}, 400, "stream is not true"),
        ({"context": "ctx-1"}, 404, "the context 'ctx-1' does not exist"),
        ({"context": "../../etc/passwd"}, 404, "does not exist"),
        (b"{bad", 400, "not valid JSON"),
        (b"", 400, ""),
    ],
)
def test_bad_input_has_a_status_and_one_sentence(client, body, status, says):
    got, _, found = client.post("/v1/completions", body)
    assert got == status, found
    error = found["error"]
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
