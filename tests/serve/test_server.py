"""The server around its routes: information, limits, keys, origins, lost clients."""

import http.client
import json
import socket
import threading
from contextlib import ExitStack

import pytest
from servers import a_service, an_endless_service, running, wait_until

from transformer_vq.serve.service import Limits


def test_unknown_path_and_method_are_json_errors(client):
    assert client.get("/v2/nothing")[0] == 404
    assert "does not exist" in client.get("/v2/nothing")[2]["error"]["message"]
    assert client.get("/v1/completions")[0] == 405
    assert client.get("/page/../app.py")[0] == 404
    assert client.get("/page/%2e%2e/app.py")[0] == 404


def test_models_health_and_documentation(client, service):
    status, _, found = client.get("/v1/models")
    assert (status, [model["id"] for model in found["data"]]) == (200, ["small"])
    assert client.get("/v1/models/small")[2]["state_bytes"] == service.engine.state_bytes
    assert client.get("/v1/models/other")[0] == 404
    assert client.get("/health")[2]["status"] == "ok"
    assert client.get("/openapi.json")[2]["info"]["title"] == "Transformer-VQ"
    assert client.get("/docs")[0] == 404


def test_metrics_have_latencies_and_tokens_of_contexts(tmp_path):
    service = a_service(tmp_path)
    with running(service) as client:
        made = client.post("/v1/contexts", {"text": "A document."})[2]
        body = {"context": made["id"], "prompt": " It", "max_tokens": 7, "seed": 1}
        n_new = sum(client.complete(**body)["usage"]["completion_tokens"] for _ in range(2))
        wait_until(lambda: service.engine.n_active == 0)
        lines = client.get("/metrics")[2].decode().splitlines()
    found = {name: float(x) for name, x in (line.split() for line in lines if line[0] != "#")}
    assert found["tvq_generated_tokens_total"] == n_new
    # The second prompt is a stored prefix, too.
    assert found["tvq_cached_tokens_total"] == 2 * made["tokens"] + 3
    counts = {"queue_wait": 3, "time_to_first_token": 2, "request_duration": 3}
    for name, n in (counts | {"time_per_output_token": n_new - 2}).items():
        assert found[f"tvq_{name}_seconds_count"] == n, name
        assert found[f"tvq_{name}_seconds_sum"] >= 0


@pytest.mark.parametrize(
    "host", ["evil.example", "[", "evil.com@127.0.0.1", "127.0.0.1:x", "a b", "[::1", "/"]
)
def test_other_and_invalid_hosts_are_rejected(client, host):
    assert client.get("/v1/models", Host=host)[0] == 400


def test_server_for_any_host_survives_odd_hosts(tmp_path):
    with running(a_service(tmp_path), hosts=None) as client:
        for host in ("[", "a b", "evil.com@127.0.0.1", "[::1", ""):
            for path in ("/v1/models", "/v1/models/", "/nothing", "/page", "/page/", "/"):
                assert client.get(path, Host=host)[0] < 500, (host, path)


def test_other_and_invalid_origins_are_rejected(client):
    address = client.url.removeprefix("http://")
    invalid = ("http://[", "//127.0.0.1", "null", "", "http://a@127.0.0.1", "file://127.0.0.1")
    for origin in ("http://evil.example", f"//{address}", f"http://user@{address}", *invalid):
        assert client.get("/v1/models", Origin=origin)[0] == 403, origin
    assert client.get("/v1/models", Origin=client.url)[0] == 200


def test_allowed_names_are_accepted_with_any_port(tmp_path):
    with running(
        a_service(tmp_path), frozenset({"127.0.0.1", "example.org", "127.0.0.2"})
    ) as client:
        assert client.get("/v1/models", Host="Example.org:8000")[0] == 200
        proxied = {"Host": "127.0.0.1", "Origin": "https://example.org"}
        assert client.get("/v1/models", **proxied)[0] == 200
        # Pages of other servers on this machine are other origins.
        assert client.get("/v1/models", Origin="http://127.0.0.2:1")[0] == 403


def test_key_is_required_except_for_the_page(tmp_path):
    with running(a_service(tmp_path, api_key="secret")) as client:
        wrong = ("Bearer wrong", "Bearer secre", "secret", "Basic secret", "Bearersecret", "Bearer")
        for headers in ({}, *({"Authorization": value} for value in wrong)):
            status, _, found = client.get("/v1/models", **headers)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
            assert client.get("/metrics", **headers)[0] == 401
        for right in ("Bearer secret", "bearer secret", "BEARER  secret"):
            assert client.get("/v1/models", Authorization=right)[0] == 200
        assert client.get("/health")[0] == client.get("/")[0] == 200


def test_large_bodies_are_refused(tmp_path):
    limits = Limits(body_bytes=2000)
    with running(a_service(tmp_path, limits=limits)) as client:
        status, _, found = client.post("/v1/completions", {"prompt": "x" * 3000})
        assert (status, found["error"]["code"]) == (413, "request_too_large")
        connection = http.client.HTTPConnection(client.host, client.port, timeout=20)
        chunks = (b"x" * 500 for _ in range(10))  # without a length
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 413
        response.close()
        connection.close()


def test_busy_server_answers_429(tmp_path):
    with running(an_endless_service(tmp_path, n_slots=1, max_waiting=1)) as client:
        body = {"prompt": "x", "max_tokens": 60_000}  # longer than the test
        threads = []
        for place in ("active", "waiting"):
            thread = threading.Thread(target=client.post, args=("/v1/completions", body))
            thread.start()
            threads.append(thread)
            wait_until(lambda place=place: client.get("/health")[2][place] == 1)
        status, headers, found = client.post("/v1/completions", {"prompt": "x"})
        assert (status, found["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["Retry-After"]) >= 1
    for thread in threads:
        thread.join()


def test_slow_request_ends_with_408(tmp_path):
    with running(an_endless_service(tmp_path, limits=Limits(seconds=0.3))) as client:
        status, _, found = client.post("/v1/completions", {"max_tokens": 60_000, "prompt": "x"})
        assert (status, found["error"]["type"]) == (408, "timeout_error")
        events = client.stream(prompt="x", max_tokens=60_000)
        assert events[-1]["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_vanished_client_frees_its_slot(tmp_path, stream):
    service = an_endless_service(tmp_path)
    with running(service) as client:
        connection = http.client.HTTPConnection(client.host, client.port, timeout=20)
        body = {"prompt": "x", "max_tokens": 60_000, "stream": stream}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        wait_until(lambda: service.engine.n_active == 1)
        connection.close()
        wait_until(lambda: service.engine.n_active == 0)
        assert service.engine.metrics.total("requests", reason="cancelled") == 1


def test_bodies_in_memory_are_limited(tmp_path):
    """Requests that are sent slowly hold their bodies; together they may not fill the memory."""
    limits = Limits(body_bytes=100_000)
    with running(a_service(tmp_path, limits=limits)) as client, ExitStack() as stack:
        head = f"POST /v1/contexts HTTP/1.1\r\nHost: {client.host}\r\nContent-Length: 100000\r\n"
        head = head.encode() + b"Content-Type: text/plain\r\n\r\n"
        for _ in range(8):
            place = (client.host, client.port)
            connection = stack.enter_context(socket.create_connection(place))
            connection.sendall(head + b"x" * 99_999)

        def status():
            return client.post("/v1/contexts", b"x" * 10_000, Content_Type="text/plain")[0]

        wait_until(lambda: status() == 503)
        assert client.get("/health")[0] == 200
        stack.close()
        wait_until(lambda: status() == 201)
