"""tvq serve: serve a model over HTTP, with the OpenAI API and a page to try it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformer_vq.checks import Range
from transformer_vq.cli.arguments import Checkpoint, Device, Matmul, Run, parse
from transformer_vq.cli.output import computing
from transformer_vq.config import DataConfig, Rows
from transformer_vq.errors import UserError

API_KEY = "TVQ_API_KEY"  # environment variable: unlike an option, other users cannot see it
MEGABYTE = 1_000_000
Seconds = Annotated[float, Range(1e-3, 1e9)]
Limit = Annotated[int, Range(1, 10**9)]
Megabytes = Annotated[int, Range(0, 10**9)]


@dataclass(frozen=True)
class ServeOptions:
    """Serve a model with the OpenAI API at /v1, and a page to try it at /.

    Many requests are processed at the same time; the memory of each is constant, whatever its
    length.
    """

    run: Run
    """Run folder, one written by `tvq export`, or books, the model in the package."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 is reachable from other machines; set an API key then."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    """Port to listen on; 0 uses any free one."""
    api_key: str | None = None
    """Require this key from clients. The environment variable TVQ_API_KEY does the same."""
    allow_hosts: tuple[str, ...] = ()
    """Host names that clients may use, such as that of a reverse proxy. On a local address its own
    names are always accepted. On other addresses, without this option, any name is accepted."""
    name: str | None = None
    """Name of the model in the API. None uses the name of RUN."""
    slots: Rows = 8
    """Texts that are generated at the same time; others wait."""
    queue: Limit = 256
    """Texts that may wait; more are refused with status 429."""
    max_tokens: Limit = 65_536
    """Largest number of tokens that a request may ask for, per text."""
    max_prompt_tokens: Limit = 4_000_000
    """Longest document, or all prompts of a request together."""
    max_body_mb: Limit = 64
    """Largest request in megabytes."""
    client_timeout: Seconds = 30.0
    """Seconds for a client to send a request, or to read the next part of a response. A large
    request must arrive at 1 kB per second or more."""
    time_limit: Seconds = 600.0
    """Seconds after which a request ends with status 408."""
    stop_time: Seconds = 10.0
    """Seconds for requests in progress after Ctrl-C or SIGTERM."""
    store: Path | None = None
    """Folder for contexts, of one server at a time. None uses a folder per model in
    ~/.cache/transformer_vq, or in that of XDG_CACHE_HOME."""
    contexts_mb: Megabytes = 10_000
    """Largest size of all stored contexts in megabytes."""
    prefix_memory_mb: Megabytes = 512
    """Memory for the beginnings of prompts, which are not processed again; 0 disables it."""
    checkpoint: Checkpoint = "best"
    precision: Matmul = "fp32"
    device: Device = "auto"


def run(arguments: list[str]) -> None:
    """Serve a model until Ctrl-C."""
    options = parse(ServeOptions, arguments, "serve")
    key = os.environ.get(API_KEY) if options.api_key is None else options.api_key
    if key is not None and not (key.strip() == key != "" and key.isascii() and key.isprintable()):
        where = f"--api-key, or the environment variable {API_KEY}"
        raise UserError(f"{where}: must be printable ASCII text, not empty; or unset it")

    from transformer_vq.device import find_device, matmul_precision
    from transformer_vq.files import lock_folder
    from transformer_vq.generation.snapshot import Snapshots
    from transformer_vq.serve.contexts import ContextStore
    from transformer_vq.serve.engine import Engine, check_servable
    from transformer_vq.serve.prefixes import PrefixStore
    from transformer_vq.serve.server import serve
    from transformer_vq.serve.service import Limits, Service
    from transformer_vq.training.loading import (
        has_images,
        load_model_and_tokenizer,
        read_chat_template,
        read_sampling,
    )

    with computing("reduce --slots"):
        device = find_device(options.device)
        name = options.run
        if has_images(name):
            raise UserError(f"{name} is a model of images; serve a model of text")
        model, tokenizer = load_model_and_tokenizer(name, options.checkpoint)
        check_servable(model)
        model.to(device)
        snapshots = Snapshots(model)
        cache = Path(os.path.expanduser(DataConfig().cache_folder))
        store = options.store or cache / "serve" / snapshots.identity["weights"][:12]
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        in_use = UserError(f"another server uses {store}; stop it, or use another --store")
        with lock_folder(store, in_use):
            engine = Engine(
                model,
                tokenizer,
                PrefixStore(options.prefix_memory_mb * MEGABYTE),
                options.slots,
                options.queue,
                lambda: matmul_precision(device, options.precision),
            )
            contexts = ContextStore(store / "contexts", snapshots, options.contexts_mb * MEGABYTE)
            limits = Limits(
                options.max_body_mb * MEGABYTE,
                options.max_prompt_tokens,
                options.max_tokens,
                options.time_limit,
            )
            shown = options.name or Path(name).resolve().name
            serve(
                Service(
                    shown,
                    engine,
                    contexts,
                    limits,
                    key,
                    chat_template=read_chat_template(name),
                    sampling=read_sampling(name),
                ),
                options.host,
                options.port,
                options.allow_hosts,
                options.stop_time,
                lambda line: print(line, flush=True),
                client_seconds=options.client_timeout,
            )
