"""Large and hostile bodies: limits are checked first, and other clients are served meanwhile."""

import http.client
import json
import time

import pytest
from servers import TOKENIZER, a_model, a_service, running, wait_until

from transformer_vq.data.tokenizers import CHUNK_CHARS, ByteTokenizer
from transformer_vq.serve.service import Limits


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that are encoded; each takes a while."""

    def __init__(self):
        super().__init__(end_of_document=True)
        self.n_encoded = 0
        self.last = time.monotonic()

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        self.n_encoded += 1
        self.last = time.monotonic()
        time.sleep(0.01)
        return super().encode_batch(texts)


def test_number_of_prompts_is_limited(client):
    for prompts in (["a"] * 300, [[1]] * 300):
        status, _, found = client.post("/v1/completions", {"prompt": prompts})
        assert (status, found["error"]["param"]) == (400, "n")
        assert "300 texts" in found["error"]["message"]


def test_values_and_tokens_of_a_body_are_limited(tmp_path):
    with running(a_service(tmp_path, limits=Limits(prompt_tokens=100))) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, _, found = client.post(path, {"prompt": [[]] * 200_000})
            assert status == 413
            assert "commas" in found["error"]["message"]
        for prompts in (["x" * 60] * 2, [[1] * 60] * 2, [1] * 101):
            status, _, found = client.post("/v1/completions", {"prompt": prompts})
            assert (status, found["error"]["code"]) == (413, "prompt_too_long")
        assert client.post("/v1/completions", {"prompt": [[1] * 50] * 2, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "content",
    [
        b'"a",' * 400_000,
        b'"\\\\",' * 400_000,
        b"[" * 300_000,
        b"[[[[[1]]]]]," * 80_000,
        b'{"a":1},' * 150_000,
    ],
    ids=["texts", "backslashes", "nested", "lists", "objects"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/contexts"])
def test_bodies_that_take_long_to_parse_are_rejected(client, path, content):
    status, _, found = client.post(path, b'{"prompt": [' + content + b"1]}")
    assert (status, "quotes and brackets" in found["error"]["message"]) == (413, True)


def test_long_texts_with_quotes_and_many_tokens_are_accepted(client):
    assert client.post("/v1/contexts", {"text": '"' * 260_000, "tokens": []})[0] == 400
    status, _, found = client.post("/v1/inspect", {"tokens": [1] * 500_000})
    assert (status, found["error"]["code"]) == (413, "prompt_too_long")  # it was parsed


def test_scored_tokens_of_prompts_are_limited(client):
    body = {"prompt": "x" * 999, "max_tokens": 0, "echo": True, "logprobs": 20}
    status, _, found = client.post("/v1/completions", body | {"n": 5})
    assert (status, found["error"]["param"]) == (400, "logprobs")
    assert "at most 4,761" in found["error"]["message"]
    assert len(client.complete(**body)["choices"][0]["logprobs"]["tokens"]) == 1000


def test_long_texts_have_the_same_tokens_as_short_ones(tmp_path):
    text = "a line of text\n" * 5000
    assert len(text) > CHUNK_CHARS
    with running(a_service(tmp_path, a_model(block_len=256))) as client:
        tokens = [TOKENIZER.bos, *text.encode()]
        prompts = (text, tokens, [tokens])
        found = [client.complete(prompt=x, max_tokens=1, seed=1) for x in prompts]
    assert found[0]["choices"] == found[1]["choices"] == found[2]["choices"]
    assert {x["usage"]["prompt_tokens"] for x in found} == {len(tokens)}


def test_text_of_a_client_that_has_left_is_not_encoded(tmp_path):
    tokenizer, n_parts = CountingTokenizer(), 200
    service = a_service(tmp_path, tokenizer=tokenizer)
    with running(service) as client:
        connection = http.client.HTTPConnection(client.host, client.port, timeout=20)
        body = json.dumps({"prompt": "x" * CHUNK_CHARS * n_parts})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_until(lambda: tokenizer.n_encoded > 1)
        connection.close()
        wait_until(lambda: time.monotonic() - tokenizer.last > 0.5)
        assert tokenizer.n_encoded < n_parts
        assert service.engine.metrics.total("prompt_tokens") == 0
