"""/v1/contexts: documents that are read once, stored, branched and moved."""

import pytest
from servers import a_model, a_service, running, sampled

from transformer_vq import load_context


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


def test_uploads_of_other_models_or_garbage_are_rejected(client, tmp_path):
    def upload(content):
        status, _, found = client.post(
            "/v1/contexts", content, Content_Type="application/octet-stream"
        )
        assert str(tmp_path) not in found["error"]["message"]
        return status, found["error"]["message"]

    other = a_service(tmp_path, a_model(seed=1))
    with running(other) as stranger:
        made = stranger.post("/v1/contexts", {"text": "x"})[2]
        content = stranger.get(f"/v1/contexts/{made['id']}/content")[2]
    status, message = upload(content)
    assert status == 400
    assert "another model" in message
    for garbage in (b"", b"garbage" * 100, content[:-5]):
        assert upload(garbage)[0] == 400


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
    (tmp_path / "contexts" / f"ctx-{'0' * 24}.json").write_text('{"id": "ctx-1"}')  # damaged
    with running(a_service(tmp_path, model)) as client:
        assert client.get("/v1/contexts")[2]["data"] == [made]
        assert client.complete(context=made["id"], seed=1)["choices"] == want
