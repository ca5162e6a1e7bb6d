"""Clients that are slow, silent or too many cannot stop the server or fill its log."""

import socket
from contextlib import ExitStack, suppress

import pytest
from servers import a_run, a_service, running, serving, wait_until

HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
CLIENT_SECONDS = 1.0


@pytest.fixture
def client(tmp_path):
    with running(a_service(tmp_path), client_seconds=CLIENT_SECONDS, max_connections=20) as client:
        yield client


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        HALF,
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + HALF,
        b"POST /v1/contexts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhalf",
    ],
    ids=["nothing", "header", "second header", "body"],
)
def test_connection_of_a_silent_client_is_closed(client, request_):
    answers = client.raw(request_)  # returns when the server closes the connection
    assert answers.count(b"200 OK") == request_.count(b"\r\n\r\nGET")


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_invalid_data_after_the_response_closes_the_connection(client, caplog, connection):
    head = b"POST /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection((client.host, client.port), timeout=20) as sending:
        sending.sendall(head + b"Connection: " + connection + b"\r\n\r\n")
        assert sending.recv(15) == b"HTTP/1.1 405 Me"
        sending.sendall(b"not a chunk\r\n")
        with suppress(ConnectionResetError):
            while sending.recv(65536):
                pass
    assert client.get("/health")[0] == 200
    assert [x for x in caplog.records if x.levelname == "ERROR"] == []


def is_closed(connection, data):
    """Return whether the server has closed a connection; send more data."""
    try:
        connection.sendall(data)
    except TimeoutError:
        pass
    except OSError:
        return True
    return False


def test_drops_of_a_body_do_not_extend_the_time(client):
    head = b"POST /v1/contexts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999\r\n\r\n"
    with socket.create_connection((client.host, client.port)) as connection:
        connection.sendall(head)
        wait_until(lambda: is_closed(connection, b"x"))


def test_client_that_does_not_read_is_disconnected(client):
    request = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((client.host, client.port))
        connection.settimeout(0.2)
        wait_until(lambda: is_closed(connection, request * 100))


def test_new_client_is_served_while_silent_ones_fill_the_server(client):
    with ExitStack() as stack:
        for _ in range(40):
            connection = socket.create_connection((client.host, client.port))
            stack.enter_context(connection).sendall(HALF)
            assert client.get("/health")[0] == 200


def test_few_file_descriptors_and_many_half_requests(tmp_path):
    log = tmp_path / "log"
    options = ("--client-timeout", "2")
    with (
        log.open("wb") as messages,
        serving(
            a_run(tmp_path / "run"), tmp_path / "store", *options, log=messages, max_files=200
        ) as client,
        ExitStack() as stack,
    ):
        connections = []
        for _ in range(250):
            connection = socket.create_connection((client.host, client.port), timeout=10)
            connection.sendall(HALF)
            connections.append(stack.enter_context(connection))
        assert client.get("/health")[0] == 200
        for _ in range(300):  # each is a line in the log of a server without a limit
            client.raw(b"garbage\r\n\r\n")
        assert client.get("/health")[0] == 200
        for connection in connections:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert client.get("/health")[0] == 200
    assert log.stat().st_size < 10_000
    assert b"Traceback" not in log.read_bytes()
