"""Decoding: tokens per second, state and the memory of reading, as the context grows.

Beside the model with quantized keys stand two whose state grows, of the same number of parameters:
the same model with full attention, keys and values in one buffer filled in place, and a GPT-2 of
Hugging Face's library with its own cache. Their contexts are filled with random keys and values,
since reading them would take quadratic time and the cost of a step does not depend on the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from transformer_vq.bench.cells import (
    best_seconds,
    check_limits,
    in_subprocess,
    machine,
    peak_bytes,
)
from transformer_vq.config import ModelConfig
from transformer_vq.errors import missing_extra
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.prefill import SEGMENT_LEN, Context, prefill
from transformer_vq.generation.snapshot import load_context, save_context
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.state import ModelState
from transformer_vq.ops.state import AttentionState
from transformer_vq.progress import progress_bar

Kind = Literal["vq", "full", "gpt2"]
ROUNDS = 5
MAX_STEPS = 64  # of a round


@dataclass(frozen=True)
class Cell:
    """One measurement: which model, how much it has read, how many rows."""

    kind: Kind
    context: int
    batch: int
    compiled: bool = False


@dataclass(frozen=True)
class Prepared:
    """A step that can be repeated, and the bytes that are carried from one to the next."""

    step: Callable[[], object]
    state_bytes: int


def run(
    config: ModelConfig,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    kinds: Sequence[Kind],
    prefills: Sequence[int],
    compiled: bool = False,
    memory_gb: float = 16.0,
    time_limit: float = 1200.0,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Measure every cell in a subprocess; one that needs too much memory or time is reported.

    time_limit: seconds that one cell may take, including reading its context and compiling.
    """
    check_limits(memory_gb=memory_gb, time_limit=time_limit)
    if "gpt2" in kinds:
        _check_transformers()
    device = device or torch.device("cpu")
    limits = {"memory_gb": memory_gb, "seconds": time_limit}
    kinds = [kind for kind in ("vq", "full", "gpt2") if kind in kinds]
    cells = [Cell(kind, n, b) for kind in kinds for b in batches for n in contexts]
    if compiled and "vq" in kinds:
        cells += [Cell("vq", n, b, compiled=True) for b in batches for n in contexts]
    rows, reading = [], []
    with (
        TemporaryDirectory() as folder,
        progress_bar("decoding", len(cells) + len(prefills), "cells") as advance,
    ):
        for cell in cells:
            if (needed := state_bytes(config, cell)) > 0.8e9 * memory_gb:
                row: dict[str, Any] = {"failed": f"a state of {needed / 1e9:.0f} GB"}
            else:
                row = in_subprocess(measure, config, cell, device, Path(folder), **limits)
            rows.append(asdict(cell) | row)
            advance(1, note=f"{cell.kind}, {cell.context:,} tokens, batch {cell.batch}")
        for n_tokens in prefills:
            row = in_subprocess(measure_reading, config, n_tokens, device, **limits)
            reading.append({"context": n_tokens} | row)
            advance(1, note=f"reading {n_tokens:,} tokens")
    what = f"decoding, {n_parameters(config):,} parameters, float32"
    facts = {"what": what, "machine": machine(device), "model": asdict(config)}
    return facts | {"decode": rows, "reading": reading}


def measure(config: ModelConfig, cell: Cell, device: torch.device, folder: Path) -> dict[str, Any]:
    """Time of a step at one context, and the size of the state there.

    folder: where what the model has read is found, or written if it is not there yet.
    """
    torch.manual_seed(0)
    room = 2 + ROUNDS * MAX_STEPS
    with torch.device(device):
        if cell.kind == "gpt2":
            prepared = _prepare_gpt2(config, cell, room)
        else:
            prepared = _prepare(config, cell, room, folder)
    seconds = best_seconds(prepared.step, rounds=ROUNDS, max_steps=MAX_STEPS, device=device)
    return {
        "ms_per_step": 1e3 * seconds,
        "tokens_per_second": cell.batch / seconds,
        "state_bytes": prepared.state_bytes,
    }


def measure_reading(config: ModelConfig, n_tokens: int, device: torch.device) -> dict[str, Any]:
    """Peak memory of a process that reads so many tokens, and what it had before it began."""
    torch.manual_seed(0)
    model = TransformerVQ(replace(config, attention="vq")).to(device)
    before = peak_bytes(device)
    _read(model, n_tokens)
    return {"before_bytes": before, "peak_bytes": peak_bytes(device)}


def table(result: dict[str, Any]) -> str:
    """Markdown; the last column is the time of a step, that at the shortest context being 1."""
    lines = [
        "| model | batch | context | tokens/s | state MB | time of a step, shortest = 1 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    first: dict[tuple[str, int], float] = {}
    for row in result["decode"]:
        name = f"{row['kind']}, compiled" if row["compiled"] else row["kind"]
        start = f"| {name} | {row['batch']} | {row['context']:,} "
        if "failed" in row:
            lines.append(f"{start}| {row['failed']} | | |")
            continue
        base = first.setdefault((name, row["batch"]), row["ms_per_step"])
        lines.append(
            f"{start}| {row['tokens_per_second']:,.0f} | {row['state_bytes'] / 1e6:,.1f} "
            f"| {row['ms_per_step'] / base:.2f} |"
        )
    if result["reading"]:
        lines += ["", "| tokens read | peak MB |", "| ---: | ---: |"]
        for row in result["reading"]:
            peak = row.get("failed") or f"{row['peak_bytes'] / 1e6:,.0f}"
            lines.append(f"| {row['context']:,} | {peak} |")
    return "\n".join(lines)


def n_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in TransformerVQ(config).parameters())


def state_bytes(config: ModelConfig, cell: Cell) -> int:
    """Bytes of keys and values of all layers; 0 for the model whose state does not grow."""
    if cell.kind == "vq":
        return 0
    if cell.kind == "gpt2":
        width, n_layer = _gpt2_shape(config)
        return 4 * cell.batch * cell.context * n_layer * 2 * width
    with torch.device("meta"):
        empty = TransformerVQ(replace(config, attention="full")).init_state(cell.batch)
    widths = sum(x.k.shape[1] * (x.k.shape[-1] + x.v.shape[-1]) for x in empty.layers)
    return 4 * cell.batch * cell.context * widths


def _prepare(config: ModelConfig, cell: Cell, room: int, folder: Path) -> Prepared:
    model = TransformerVQ(replace(config, attention=cell.kind)).eval()  # type: ignore[arg-type]
    token = torch.randint(config.vocab_size, (cell.batch,))
    if cell.kind == "vq":
        path = folder / f"{cell.context}.safetensors"
        if not path.exists():
            save_context(path, model, _read(model, cell.context))
        state = load_context(path, model).repeat(cell.batch).state
    else:
        state = _random_state(model, cell)
    decoder = Decoder(model, state, room)
    step = torch.compile(decoder.step, fullgraph=True) if cell.compiled else decoder.step
    return Prepared(lambda: step(token), state.n_bytes)


def _read(model: TransformerVQ, n_tokens: int) -> Context:
    """What a model has after so many random tokens, never more of them in memory than needed."""
    context = None
    for start in range(0, n_tokens, SEGMENT_LEN):
        tokens = torch.randint(model.config.vocab_size, (min(SEGMENT_LEN, n_tokens - start),))
        context = prefill(model, [tokens.tolist()], context)
    assert context is not None
    return context


def _random_state(model: TransformerVQ, cell: Cell) -> ModelState:
    """The state of full attention after so many tokens, filled at random."""
    position = torch.full((cell.batch,), cell.context)
    layers = []
    for empty in model.init_state(cell.batch).layers:
        k, v = (torch.randn(*x.shape[:2], cell.context, x.shape[-1]) for x in (empty.k, empty.v))
        layers.append(AttentionState(k, v, position))
    return ModelState(tuple(layers))


def _gpt2_shape(config: ModelConfig) -> tuple[int, int]:
    """Width and layers of a GPT-2 with about as many parameters, positions not counted."""
    n_layer = 2 * config.n_layer
    width = math.sqrt(n_parameters(config) / (12 * n_layer))
    return max(round(width / 64), 1) * 64, n_layer


def _check_transformers() -> None:
    """Raise before anything is measured: importing transformers takes seconds."""
    if find_spec("transformers") is None:
        raise missing_extra("the gpt2 baseline", "transformers", "hf")


def _prepare_gpt2(config: ModelConfig, cell: Cell, room: int) -> Prepared:
    _check_transformers()
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    width, n_layer = _gpt2_shape(config)
    settings = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=cell.context + room,
        n_embd=width,
        n_layer=n_layer,
        n_head=width // 64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(settings).eval()
    token = torch.randint(config.vocab_size, (cell.batch, 1))
    shape = (cell.batch, width // 64, cell.context, 64)
    cache = DynamicCache(config=settings)
    for layer in range(n_layer):
        cache.update(torch.randn(shape), torch.randn(shape), layer)

    @torch.no_grad()
    def step() -> object:
        return model(token, past_key_values=cache, use_cache=True).logits

    return Prepared(step, state_bytes(config, cell))
