"""`transformers serve` and `transformers chat` with an export, without importing our package."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers import tiny_run
from openai import OpenAI
from tokenizers.decoders import DecodeStream

from transformer_vq.generation.decode import generate
from transformer_vq.hf import TransformerVQTokenizer
from transformer_vq.hf.export import export
from transformer_vq.training.checkpoint import load_model, read_tokenizer
from transformer_vq.training.run import train

COMMAND = str(Path(sys.executable).parent / "transformers")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
STARTUP_SECONDS = 180


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run on bytes and its export with a chat template."""
    folder = tmp_path_factory.mktemp("run")
    train(tiny_run(folder, train={"steps": 60}, optim={"lr": 1e-2}), folder / "run")
    (folder / "chat.jinja").write_text(TEMPLATE)
    export(folder / "run", folder / "model", chat_template=folder / "chat.jinja")
    return folder / "run", folder / "model"


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    """Start the server on a free port; return its address."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = ["--trust-remote-code", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [COMMAND, "serve", str(trained[1]), *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_until_healthy(url, process, folder / "log")
        yield url
    finally:
        process.kill()
        process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"the server did not start:\n{log.read_text()[-2000:]}")


@pytest.fixture
def client(server):
    with OpenAI(base_url=f"{server}/v1", api_key="unused", timeout=60, max_retries=0) as client:
        yield client


def continuation(run: Path, prompt: str, n: int) -> str:
    """Return the text that greedy search of the core model finds."""
    core, tokenizer = load_model(run)[0], read_tokenizer(run)
    tokens = generate(core, [tokenizer.bos, *tokenizer.encode(prompt)], n, temperature=0)
    ends = [i for i, token in enumerate(tokens) if token == tokenizer.eod]
    return tokenizer.decode(tokens[: ends[0]] if ends else tokens).decode()


def test_completion_equals_our_generate(client, trained):
    run, folder = trained
    options = {"model": str(folder), "prompt": "the cat", "max_tokens": 20, "temperature": 0}
    want = continuation(run, "the cat", 20)
    answer = client.completions.create(**options)
    assert answer.choices[0].text == want
    assert answer.usage.prompt_tokens == len("the cat") + 1
    chunks = list(client.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == want
    assert len(chunks) > len(want)
    stop = want[3]
    answer = client.completions.create(stop=[stop], **options)
    assert answer.choices[0].text == want[: want.index(stop) + 1]


def test_chat_completion_continues_the_chat_template(client, trained):
    run, folder = trained
    messages = [{"role": "user", "content": "the cat"}]
    options = {"model": str(folder), "messages": messages, "max_tokens": 20, "temperature": 0}
    want = continuation(run, "user: the cat\nassistant: ", 20)
    assert client.chat.completions.create(**options).choices[0].message.content == want
    chunks = client.chat.completions.create(stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want


def test_chat_command_prints_the_answer(server, trained, tmp_path):
    run, folder = trained
    want = continuation(run, "user: the cat\nassistant: ", 20)
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    result = subprocess.run(
        [COMMAND, "chat", str(folder), server, "max_new_tokens=20", "do_sample=False"],
        input="the cat\nn\n!exit\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**environment, "HF_HOME": str(tmp_path), "COLUMNS": "200", "TERM": "dumb"},
    )
    assert result.returncode == 0, result.stderr
    assert " ".join(want.split()) in " ".join(result.stdout.split())


@pytest.mark.parametrize("has_end", [True, False])
def test_stream_of_tokens_decodes_to_the_text(has_end):
    tokenizer = TransformerVQTokenizer(end_of_document=has_end)
    text = "na\u00efve \u4e2d\u6587 \U0001f642 \u0100\n"
    stream = DecodeStream([], skip_special_tokens=True)
    parts = [stream.step(tokenizer._tokenizer, token) for token in tokenizer(text).input_ids]
    assert "".join(part or "" for part in parts) == text
    invalid = [97, 255, 98, 195, 99]
    stream = DecodeStream([], skip_special_tokens=True)
    parts = [stream.step(tokenizer._tokenizer, token) for token in invalid]
    assert "".join(part or "" for part in parts) == tokenizer.decode(invalid) == "a\ufffdb\ufffdc"


def test_stream_of_tokens_includes_added_tokens():
    tokenizer = TransformerVQTokenizer(end_of_document=True)
    tokenizer.add_tokens(["<new>"])
    tokenizer.add_tokens(["<|user|>"], special_tokens=True)
    tokens = [256, 97, 257, 258, 98]
    assert tokenizer._tokenizer.decode(tokens) == "a<new>b"
    whole = "<|endoftext|>a<new><|user|>b"
    assert tokenizer._tokenizer.decode(tokens, skip_special_tokens=False) == whole
