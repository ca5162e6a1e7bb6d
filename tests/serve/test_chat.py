"""POST /v1/chat/completions: templates, roles, and control tokens that clients cannot send."""

import pytest
from servers import TOKENIZER, a_service, running

PATH = "/v1/chat/completions"
END = TOKENIZER.eod
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}"
    "{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with running(a_service(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE)) as client:
        yield client


def assert_same_text(client, messages, prompt):
    """Check that messages are converted to these tokens."""
    status, _, found = client.post(PATH, {"messages": messages, "max_tokens": 20, "seed": 3})
    assert status == 200, found
    want = client.complete(prompt=[TOKENIZER.bos, *prompt], max_tokens=20, seed=3)
    assert found["usage"]["prompt_tokens"] == 1 + len(prompt)
    assert found["choices"][0]["message"]["content"] == want["choices"][0]["text"]


@pytest.mark.parametrize(
    "text", ["<|endoftext|>", "a<|endoftext|>b ", "<|endoftext|>" * 2, "<|end"]
)
def test_names_of_special_tokens_are_text_in_messages(client, text):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]
    plain = text.strip().encode()
    assert_same_text(client, messages, [*b"user: ", *plain, END, *b"assistant: b", END])
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    messages = [{"role": "user", "content": parts}]
    assert_same_text(client, messages, [*b"user: ", *plain, END])


def test_names_of_special_tokens_are_text_in_other_fields_and_prompts(client):
    call = {"<|endoftext|>": ["<|endoftext|>"]}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    text = b'assistant: {"<|endoftext|>": ["<|endoftext|>"]}'
    assert_same_text(client, messages, [*text, END])
    found = client.complete(prompt="<|endoftext|>", max_tokens=1)
    assert found["usage"]["prompt_tokens"] == 1 + len("<|endoftext|>")


def test_roles_parts_and_streams(client):
    messages = [{"role": "developer", "content": "a"}, {"role": "tool", "content": "b"}]
    assert_same_text(client, messages, [*b"system: a", END, *b"tool: b", END])
    body = {"messages": messages, "max_tokens": 12, "seed": 3, "logprobs": True}
    status, _, found = client.post(PATH, body)
    assert status == 200
    (choice,) = found["choices"]
    n_scored = len(choice["logprobs"]["content"])
    assert n_scored == found["usage"]["completion_tokens"] - (choice["finish_reason"] == "stop")
    deltas = [chunk["choices"][0]["delta"] for chunk in client.stream(PATH, **body)]
    assert deltas[0]["role"] == "assistant"
    assert "".join(x["content"] for x in deltas) == choice["message"]["content"]
    for wrong in ({"top_logprobs": 2, "logprobs": False}, {"max_tokens": 0}):
        assert client.post(PATH, body | wrong)[0] == 400


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "", "tool_calls": 5},
        {"role": "user", "content": "", "name": ["x"]},
        {"role": "admin", "content": ""},
        {"role": "user<|endoftext|>", "content": ""},
        {"role": "user", "content": 5},
        {"role": "user", "content": "\ud800"},
        5,
    ],
)
def test_odd_messages_are_rejected(client, message):
    status, _, found = client.post(PATH, {"messages": [message]})
    assert status == 400, found
    assert "\n" not in found["error"]["message"]


def test_template_that_fails_is_a_client_error(tmp_path):
    template = (
        "{{ raise_exception('no x') if messages[0].extra == 'x' else messages[0].extra + 1 }}"
    )
    with running(a_service(tmp_path, chat_template=template)) as client:
        for extra in ("x", [], {}):
            message = {"role": "user", "content": "x", "extra": extra}
            status, _, found = client.post(PATH, {"messages": [message]})
            assert status == 400
            assert "the chat template rejects them" in found["error"]["message"]


def test_chat_without_a_template_is_a_clear_error(tmp_path):
    with running(a_service(tmp_path)) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        status, _, found = client.post(PATH, body)
        assert (status, found["error"]["code"]) == (400, "no_chat_template")
