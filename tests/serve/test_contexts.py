"""/v1/contexts: documents that are read once, stored, branched and moved."""

import errno
import os

import pytest
import torch
from servers import a_model, a_service, running, sampled

from transformer_vq import Context, load_context, prefill, save_context
from transformer_vq.files import read_tensors, write_tensors


def test_document_is_read_once_and_continued(client, service, tmp_path):
    document = "A long document. " * 30
    status, _, made = client.post("/v1/contexts", {"text": document, "name": "doc"})
    assert status == 201
    assert made["tokens"] == 1 + len(document)
    found = client.complete(context=made["id"], prompt=" Then", max_tokens=12, seed=3)
    want = sampled(service, f"{document} Then", 12, 3)
    assert [choice["text"] for choice in found["choices"]] == want
    usage = found["usage"]
    assert usage["prompt_tokens"] == 1 + len(document) + 5
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 1 + len(document)

    status, _, branch = client.post(f"/v1/contexts/{made['id']}/branch", {"text": " Then"})
    assert (status, branch["parent"]) == (201, made["id"])
    found = client.complete(context=branch["id"], max_tokens=12, seed=3)
    assert [choice["text"] for choice in found["choices"]] == want

    status, _, content = client.get(f"/v1/contexts/{made['id']}/content")
    path = tmp_path / "context.safetensors"
    path.write_bytes(content)
    assert status == 200
    assert int(load_context(path, service.engine.model).state.position) == made["tokens"]
    status, _, again = client.post(
        "/v1/contexts?name=again", content, Content_Type="application/octet-stream"
    )
    assert (status, again["tokens"], again["name"]) == (201, made["tokens"], "again")
    assert client.get(f"/v1/contexts/{again['id']}")[2] == again
    listed = {entry["id"] for entry in client.get("/v1/contexts")[2]["data"]}
    assert {made["id"], branch["id"], again["id"]} <= listed
    for entry in (made, branch, again):
        assert client.send("DELETE", f"/v1/contexts/{entry['id']}")[2]["deleted"]
    assert client.get(f"/v1/contexts/{made['id']}")[0] == 404
    assert client.post("/v1/completions", {"context": made["id"]})[0] == 404


def test_plain_text_is_accepted_as_a_document(client):
    status, _, made = client.post("/v1/contexts", b"text", Content_Type="text/plain")
    assert (status, made["tokens"]) == (201, 5)
    status, _, found = client.post("/v1/contexts", b"\xff", Content_Type="text/plain")
    assert (status, found["error"]["message"]) == (400, "the document is not valid UTF-8")


@pytest.mark.parametrize("body", [{}, {"text": "a", "tokens": [1]}, {"tokens": [999]}, b"{", b"3"])
def test_bad_documents_are_rejected(client, body):
    status, _, found = client.post("/v1/contexts", body)
    assert status == 400
    assert "\n" not in found["error"]["message"]


def upload(client, content):
    return client.post("/v1/contexts", content, Content_Type="application/octet-stream")


def test_uploads_of_other_models_or_garbage_are_rejected(client, tmp_path):
    other = a_service(tmp_path, a_model(seed=1))
    with running(other) as stranger:
        made = stranger.post("/v1/contexts", {"text": "x"})[2]
        content = stranger.get(f"/v1/contexts/{made['id']}/content")[2]
    status, _, found = upload(client, content)
    assert status == 400
    assert "another model" in found["error"]["message"]
    assert str(tmp_path) not in found["error"]["message"]
    for garbage in (b"", b"garbage" * 100, content[:-5]):
        assert upload(client, garbage)[0] == 400


def test_long_names_are_rejected(client):
    assert client.post("/v1/contexts", {"text": "x", "name": "n" * 201})[0] == 400
    path = f"/v1/contexts?name={'n' * 201}"
    status, _, found = client.post(path, b"text", Content_Type="text/plain")
    assert status == 400
    assert "200 characters" in found["error"]["message"]
    assert client.post(path[:-1], b"text", Content_Type="text/plain")[0] == 201


def test_upload_has_one_row(client, service, tmp_path):
    path = tmp_path / "two"
    model = service.engine.model
    context = prefill(model, [[1, 2], [3]])
    save_context(path, model, context)
    assert upload(client, path.read_bytes())[0] == 400
    one = Context(context.logits[:1], context.state.select(torch.tensor([0])))
    save_context(path, model, one)
    assert upload(client, path.read_bytes())[0] == 201


def test_whatever_is_uploaded_does_not_break_the_server(client, service, tmp_path):
    """Tensors with other values, dtypes or shapes: rejected, or usable afterwards."""
    path = tmp_path / "context"
    save_context(path, service.engine.model, prefill(service.engine.model, [list(range(50))]))
    tensors, metadata = read_tensors(path)
    for name, x in tensors.items():
        if "layers/1" in name:
            continue
        if x.is_floating_point():
            changes = [x.double(), *(torch.full_like(x, value) for value in (3e38, -1e9, 0))]
        else:
            changes = [x.int(), *(torch.full_like(x, value) for value in (2**62, 2**47, 0, -1))]
        for changed in (*changes, x.new_empty(10**9, 0)):
            write_tensors(path, tensors | {name: changed}, metadata)
            status, _, found = upload(client, path.read_bytes())
            assert status in (201, 400), name
            if status == 201:
                body = {"context": found["id"], "prompt": "abc", "max_tokens": 8}
                assert client.post("/v1/completions", body)[0] == 200, name
            elif changed.dtype != x.dtype:
                assert "not a snapshot" in found["error"]["message"]


def test_context_whose_file_is_gone_is_not_found(tmp_path):
    model = a_model()
    with running(a_service(tmp_path, model)) as client:
        made = [client.post("/v1/contexts", {"text": "x"})[2]["id"] for _ in range(2)]
    with running(a_service(tmp_path, model)) as client:  # none is in memory
        for path in (tmp_path / "contexts").glob("*.safetensors"):
            path.unlink()
        status, _, found = client.post("/v1/completions", {"context": made[0]})
        assert status == 404
        assert made[0] in found["error"]["message"]
        status, _, found = client.get(f"/v1/contexts/{made[1]}/content")
        assert status == 404
        assert made[1] in found["error"]["message"]
        assert client.get("/v1/contexts")[2]["data"] == []
    assert list((tmp_path / "contexts").iterdir()) == []


def test_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with running(a_service(tmp_path)) as client:
        monkeypatch.setattr(os, "replace", full)
        status, _, found = client.post("/v1/contexts", {"text": "x"})
        assert (status, found["error"]["code"]) == (507, "storage_full")
        assert "no space left" in found["error"]["message"]
        assert str(tmp_path) not in found["error"]["message"]
        assert list((tmp_path / "contexts").iterdir()) == []
        assert client.get("/v1/contexts")[2]["data"] == []
        monkeypatch.undo()
        assert client.post("/v1/contexts", {"text": "x"})[0] == 201


def test_full_store_is_refused(tmp_path):
    with running(a_service(tmp_path, max_bytes=100)) as client:
        status, _, found = client.post("/v1/contexts", {"text": "x"})
        assert (status, found["error"]["code"]) == (413, "storage_full")
        assert client.get("/v1/contexts")[2]["data"] == []
    assert list((tmp_path / "contexts").iterdir()) == []


def test_contexts_survive_a_restart(tmp_path):
    model = a_model()
    with running(a_service(tmp_path, model)) as client:
        made = client.post("/v1/contexts", {"text": "document", "name": "d"})[2]
        want = client.complete(context=made["id"], seed=1)["choices"]
    (tmp_path / "contexts" / f"ctx-{'0' * 24}.safetensors").write_bytes(b"damaged")
    with running(a_service(tmp_path, model)) as client:
        assert client.get("/v1/contexts")[2]["data"] == [made]
        assert client.complete(context=made["id"], seed=1)["choices"] == want
