"""POST /v1/inspect: with a stored context, one at a time, and with a short queue."""

import queue
import socket
import threading

import pytest
from servers import a_model, a_service, running, wait_until

DOCUMENT = "the cat sat on the mat. "


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
        assert got["codes"] == [row[start:] for row in want["codes"]]
        assert min(got["cache"][0]) > 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"text": "a", "context": "ctx-none"}, 404),
        ({"tokens": []}, 400),
        ({"tokens": [257]}, 400),
        ({"tokens": [0] * 4097}, 413),
        ({"text": "x" * 4096}, 413),
        ({"text": "x" * 300_000}, 413),
    ],
)
def test_invalid_bodies_are_rejected(client, body, status):
    found = client.post("/v1/inspect", body)
    assert found[0] == status
    assert len(found[2]["error"]["message"]) < 200


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


def test_many_inspections_are_rejected_and_do_not_delay_other_requests(tmp_path):
    model = a_model()
    gate = Gate(model)
    statuses = queue.SimpleQueue()
    with running(a_service(tmp_path, model)) as client:
        inspect = lambda: statuses.put(client.post("/v1/inspect", {"text": "a"})[0])  # noqa: E731
        threads = [threading.Thread(target=inspect) for _ in range(30)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: gate.seen)
            assert client.complete(prompt="It was", max_tokens=1)
        finally:
            gate.is_open.set()
            for thread in threads:
                thread.join()
    found = [statuses.get() for _ in threads]
    assert set(found) == {200, 429}
    assert found.count(200) <= 10
    assert gate.seen == [ord("a")] * found.count(200)


def test_inspections_of_departed_clients_are_not_computed(tmp_path):
    model = a_model()
    gate = Gate(model)
    with running(a_service(tmp_path, model)) as client:
        body = b'{"text": "b"}'
        head = f"POST /v1/inspect HTTP/1.1\r\nHost: {client.host}\r\nContent-Length: {len(body)}"
        request = f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body
        place = (client.host, client.port)
        try:
            connections = [socket.create_connection(place) for _ in range(3)]
            for connection in connections:
                connection.sendall(request)
            wait_until(lambda: gate.seen)
            for connection in connections:
                connection.close()
            wait_until(lambda: client.get("/health")[0] == 200)
        finally:
            gate.is_open.set()
        assert client.post("/v1/inspect", {"text": "a"})[0] == 200
    assert gate.seen == [ord("b"), ord("a")]
