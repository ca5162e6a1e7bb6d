"""Engines, servers in a thread or a process, and a small HTTP client, for tests."""

import http.client
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from transformer_vq import ModelConfig, Sampling, TransformerVQ, prefill
from transformer_vq.config import DataConfig, RunConfig, TrainConfig
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.generation.snapshot import Snapshots
from transformer_vq.generation.text import sample_text
from transformer_vq.serve.contexts import ContextStore
from transformer_vq.serve.engine import Engine
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.requests import Request
from transformer_vq.serve.server import Server, listen
from transformer_vq.serve.service import Limits, Service
from transformer_vq.training.checkpoint import write_config

TOKENIZER = ByteTokenizer(end_of_document=True)
LOCAL = frozenset({"127.0.0.1", "localhost"})


def a_model(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 257, "d_model": 16, "n_layer": 1, "d_k": 8, "n_code": 6, "block_len": 4}
    return TransformerVQ(ModelConfig(**sizes | changes)).eval()


def an_engine(model, n_slots=3, max_waiting=64, memory=10**6):
    return Engine(model, TOKENIZER, PrefixStore(memory), n_slots, max_waiting)


def a_prompt(n, seed=0):
    return [TOKENIZER.bos, *random.Random(seed).choices(range(256), k=n - 1)]


def solo(model, request):
    """The text that `tvq sample` generates."""
    start = None if request.start is None else request.start.context
    context = prefill(model, [request.prompt], start) if request.prompt else start
    context = context.repeat(1 + request.sample)
    options = {"seed": request.seed, "stop": request.stop}
    n_tokens, rule = request.max_new_tokens, request.sampling
    return sample_text(model, TOKENIZER, context, n_tokens, rule, **options)[-1].text


def sampled(service, prompt, n_tokens, seed, n=1, **rule):
    """The texts that `tvq sample --batch n` generates; the rule is that of Sampling."""
    rule = Sampling(**{"top_p": 0.95} | rule)
    tokens = [TOKENIZER.bos, *prompt.encode()]
    requests = [Request(tokens, n_tokens, rule, seed, sample) for sample in range(n)]
    return [solo(service.engine.model, request) for request in requests]


def collect(engine, *requests):
    """Run requests to their end on this thread; return the events of each."""
    events = [[] for _ in requests]
    for request, found in zip(requests, events, strict=True):
        engine.submit(request, found.append)
    while engine.run_once():
        pass
    return events


def text_of(events):
    """The whole text, which the events also give bit by bit."""
    end = events[-1].end
    assert "".join(event.text for event in events) == end.text
    return end.text


def a_service(
    folder, model=None, tokenizer=TOKENIZER, n_slots=3, max_waiting=16, limits=None, **more
):
    model = a_model() if model is None else model
    snapshots = Snapshots(model)
    engine = Engine(model, tokenizer, PrefixStore(10**7), n_slots, max_waiting)
    contexts = ContextStore(folder / "contexts", snapshots, more.pop("max_bytes", 10**7))
    return Service("small", engine, contexts, limits or Limits(), **more)


def an_endless_service(folder, **more):
    """A model whose texts have no end."""
    return a_service(folder, a_model(vocab_size=256), ByteTokenizer(), **more)


def a_run(folder, data=None, train=None, tokenizer=None, **sizes):
    """Write a run folder with a small random model; return it. By default, texts have no end."""
    tokenizer = tokenizer or ByteTokenizer()
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "n_layer": 1, "d_k": 8} | sizes
    model = ModelConfig(**{"n_code": 8, "block_len": 8} | sizes)
    data = data or DataConfig(end_of_document=tokenizer.eod is not None)
    (folder / "best").mkdir(parents=True)
    write_config(folder, RunConfig(model, data, train=train or TrainConfig(steps=1)), tokenizer)
    torch.manual_seed(0)
    TransformerVQ(model).save(folder / "best" / "model.safetensors", step="2")
    return folder


@contextmanager
def serving(run, store, *options, log=None, max_files=None, api_key=None):
    """Start `tvq serve` in a subprocess; yield a client.

    max_files: hard limit of open files. api_key: in the environment.
    """

    def limit():
        if max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

    given = {name: x for name, x in os.environ.items() if name != "TVQ_API_KEY"}
    given |= {} if api_key is None else {"TVQ_API_KEY": api_key}
    command = [sys.executable, "-m", "transformer_vq", "serve", str(run), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--store", str(store), *options],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**given, "OMP_NUM_THREADS": "1"},
        preexec_fn=limit,
    )
    try:
        port = int(re.search(r":(\d+)/", process.stdout.readline()).group(1))
        yield Client("127.0.0.1", port, process)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def running(service, hosts=LOCAL, **limits):
    """Serve on a free port; yield the address."""
    listener = listen("127.0.0.1", 0)
    server = Server(service, hosts, stop_seconds=0.0, **limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Client(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class Client:
    """Sends requests to a server."""

    host: str
    port: int
    process: subprocess.Popen | None = None
    """The server, if it is a process of its own."""

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    def send(self, method, path, body=None, **headers):
        """Return status, headers and the body, parsed if it is JSON. body: an object or bytes."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        is_json = "json" in response.headers.get("Content-Type", "")
        return response.status, response.headers, json.loads(content) if is_json else content

    def raw(self, request, timeout=20):
        """Send bytes as they are; return all that comes back before the connection is closed."""
        with socket.create_connection((self.host, self.port), timeout=timeout) as connection:
            connection.sendall(request)
            found = b""
            while part := connection.recv(65536):
                found += part
        return found

    def get(self, path, **headers):
        return self.send("GET", path, **headers)

    def post(self, path, body, **headers):
        return self.send("POST", path, body, **headers)

    def complete(self, **body):
        """Return the body of a successful completion."""
        status, _, found = self.post("/v1/completions", body)
        assert status == 200, found
        return found

    def stream(self, path="/v1/completions", **body):
        """Return the objects of a streamed response."""
        status, headers, content = self.post(path, body | {"stream": True})
        assert status == 200, content
        assert headers["Content-Type"].startswith("text/event-stream")
        *events, done, rest = content.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


def wait_until(is_true, seconds=30):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
