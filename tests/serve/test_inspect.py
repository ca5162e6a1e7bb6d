"""POST /v1/inspect: with a stored context, one at a time, and with a short queue."""

import http.client
import json
import threading
from contextlib import closing

import pytest
from servers import TOKENIZER, a_model, a_service, running, wait_until

DOCUMENT = "the cat sat on the mat. "


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with running(a_service(tmp_path_factory.mktemp("server"))) as client:
        yield client


@pytest.fixture(scope="module")
def context(client):
    return client.post("/v1/contexts", {"text": DOCUMENT})[2]["id"]


def test_text_after_a_context_equals_that_of_the_whole_text(client, context):
    whole = client.post("/v1/inspect", {"text": DOCUMENT + "it ran off"})[2]
    status, _, found = client.post("/v1/inspect", {"text": "it ran off", "context": context})
    assert status == 200
    start = 1 + len(DOCUMENT)
    assert (whole["position"], found["position"]) == (0, start)
    assert found["texts"] == list("it ran off")
    assert found["tokens"] == whole["tokens"][start:]
    assert found["surprisal"] == pytest.approx(whole["surprisal"][start:], abs=2e-3)
    for got, want in zip(found["layers"], whole["layers"], strict=True):
        for name in ("codes", "window", "cache"):
            for row, of_whole in zip(got[name], want[name], strict=True):
                assert row == pytest.approx(of_whole[start:], abs=2e-4)
        assert min(got["cache"][0]) > 0


def test_tokens_after_a_context_are_used_as_they_are(client, context):
    tokens = TOKENIZER.encode("it ran")
    found = client.post("/v1/inspect", {"tokens": tokens, "context": context})[2]
    assert found == client.post("/v1/inspect", {"text": "it ran", "context": context})[2]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"text": "a", "context": "ctx-none"}, 404),
        ({"tokens": []}, 400),
        ({"tokens": [257]}, 400),
        ({"tokens": [0] * 4097}, 400),
        ({"text": "x" * 4096}, 413),
        ({"text": "x" * 300_000}, 413),
    ],
)
def test_invalid_bodies_are_rejected(client, body, status):
    found = client.post("/v1/inspect", body)
    assert found[0] == status
    assert len(found[2]["error"]["message"]) < 200


def test_empty_text_after_a_context_is_rejected(client, context):
    status, _, found = client.post("/v1/inspect", {"context": context})
    assert (status, found["error"]["message"]) == (400, "the text is empty; give text or tokens")


class Gate:
    """Stops inspections before the model, until it is opened; records their first tokens."""

    def __init__(self, model):
        self.is_open = threading.Event()
        self.seen = []
        model.register_forward_pre_hook(self._wait)

    def _wait(self, model, args):
        if threading.current_thread().name != "engine":
            self.seen.append(args[0][0, -1].item())
            assert self.is_open.wait(60)


def sent(client, text):
    """Send an inspection; return the connection without waiting for the response."""
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    body = json.dumps({"text": text})
    connection.request("POST", "/v1/inspect", body, {"Content-Type": "application/json"})
    return closing(connection)


def test_inspection_of_a_departed_client_is_not_computed(tmp_path):
    model = a_model()
    gate = Gate(model)
    with running(a_service(tmp_path, model)) as client, sent(client, "a") as first:
        wait_until(lambda: gate.seen)
        with sent(client, "b"):
            pass  # the client leaves
        with sent(client, "c") as last:
            gate.is_open.set()
            assert first.getresponse().status == last.getresponse().status == 200
    assert bytes(gate.seen) == b"ac"


def test_many_inspections_are_rejected_and_do_not_delay_other_requests(tmp_path):
    model = a_model()
    gate = Gate(model)
    with running(a_service(tmp_path, model)) as client:
        waiting = [sent(client, "a").thing for _ in range(50)]
        try:
            wait_until(lambda: gate.seen)
            connection = http.client.HTTPConnection(client.host, client.port, timeout=10)
            body = json.dumps({"prompt": "It was", "max_tokens": 1})
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            assert connection.getresponse().status == 200
            connection.close()
            gate.is_open.set()
            statuses = [connection.getresponse().status for connection in waiting]
        finally:
            gate.is_open.set()
            for connection in waiting:
                connection.close()
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= 10
    assert gate.seen == [ord("a")] * statuses.count(200)


def test_health_reports_the_progress_of_a_document(tmp_path):
    model = a_model()
    may_read = threading.Event()
    may_read.set()
    n_segments = 0

    def wait(model, args):
        nonlocal n_segments
        n_segments += 1
        assert n_segments == 1 or may_read.wait(60)

    model.register_forward_pre_hook(wait)
    service = a_service(tmp_path, model)
    with running(service) as client:
        may_read.clear()
        body = {"tokens": [0] * 5000}
        upload = threading.Thread(target=client.post, args=("/v1/contexts", body))
        upload.start()
        wait_until(lambda: n_segments == 2)
        found = client.get("/health")[2]["prefill"]
        may_read.set()
        upload.join()
        assert found["total"] == 5000
        assert 0 < found["tokens"] < 5000
        assert client.get("/health")[2]["prefill"] == {"tokens": 0, "total": 0}
