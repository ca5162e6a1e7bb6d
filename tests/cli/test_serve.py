"""`tvq serve`: one server per store, private files, allowed hosts."""

import stat

import pytest
from servers import a_run, serving

from transformer_vq.cli.main import main
from transformer_vq.errors import UserError
from transformer_vq.files import lock_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    """A server on all addresses with a few allowed names, and its store."""
    store = tmp_path_factory.mktemp("server") / "new" / "store"
    hosts = ("--host", "0.0.0.0", "--allow-hosts", "127.0.0.1", "Example.org", "[::2]")
    with serving(run, store, *hosts) as client:
        yield client, store


def test_allowed_hosts_hold_on_every_address(served):
    client, _ = served
    for host in ("127.0.0.1", "example.org:80", "EXAMPLE.org", "[::2]:80"):
        assert client.get("/health", Host=host)[0] == 200
    for host in ("localhost", "evil.example", "0.0.0.0", "sub.example.org"):
        assert client.get("/health", Host=host)[0] == 400


def test_store_is_private_and_used_by_one_server(run, served, capsys):
    client, store = served
    made = client.post("/v1/contexts", {"text": "a document"})[2]
    (store / "contexts" / ".x.safetensors.0123abcd.partial").write_bytes(b"")  # being written
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(run), "--port", "0", "--store", str(store)])
    found = capsys.readouterr()
    assert (ended.value.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert str(store) in found.err
    assert "--store" in found.err
    names = {path.name for path in (store / "contexts").iterdir()}
    assert names == {".x.safetensors.0123abcd.partial", f"{made['id']}.safetensors"}
    assert client.complete(context=made["id"])["choices"]
    (store / "contexts" / ".x.safetensors.0123abcd.partial").unlink()
    for path in [store, *store.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert path.name == ".lock" or mode == (0o700 if path.is_dir() else 0o600), path


def test_another_loopback_address_is_local_and_locks_end_with_the_process(run, tmp_path):
    with lock_folder(tmp_path, UserError("in use")):
        pass
    with serving(run, tmp_path, "--host", "127.0.0.2") as client:
        client.host = "127.0.0.2"
        assert client.get("/health")[0] == client.get("/health", Host="localhost")[0] == 200
        assert client.get("/health", Host="evil.example")[0] == 400
        with pytest.raises(UserError), lock_folder(tmp_path, UserError("in use")):
            pass
    with lock_folder(tmp_path, UserError("in use")):
        pass
