"""Decoding: tokens per second, state size, and prefill memory by context length.

Two baselines have about the same number of parameters and a state that grows with the context.
`full` is the same model with full attention, whose keys and values fill a preallocated buffer.
`gpt2` is the GPT-2 of Hugging Face transformers with its own cache. Their contexts are filled with
random keys and values: a prefill would take quadratic time, and the values do not affect the cost
of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from transformer_vq.bench import gpt2
from transformer_vq.bench.cells import (
    best_seconds,
    check_limits,
    in_subprocess,
    machine,
)
from transformer_vq.bench.decode_records import (
    DecodeKind,
    DecodeRecord,
    DecodeRow,
    DecodeTiming,
    PrefillMemory,
    PrefillRow,
    decode_name,
)
from transformer_vq.bench.rates import bandwidth_probe
from transformer_vq.bench.records import Failure
from transformer_vq.config import AttentionType, ModelConfig, Precision
from transformer_vq.device import compile_decoding, evaluating
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.prefill import Context, run_segments
from transformer_vq.generation.snapshot import load_context, save_context
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import VectorQuantizer
from transformer_vq.nn.state import ModelState
from transformer_vq.ops.state import AttentionState
from transformer_vq.progress import progress_bar

ROUNDS = 9
MAX_STEPS = 64  # per round


@dataclass(frozen=True)
class Cell:
    """One measurement: the model, the context length, and the batch size."""

    kind: DecodeKind
    context: int
    batch: int
    compiled: bool = False
    state_precision: Precision = "fp32"


@dataclass(frozen=True)
class Prepared:
    """A decoding step that can be repeated, and the size of the state it carries."""

    step: Callable[[], object]
    state_bytes: int
    weight_bytes: int


def run(
    config: ModelConfig,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    kinds: Sequence[DecodeKind],
    prefills: Sequence[int],
    compiled: bool = False,
    state_precisions: Sequence[Precision] = ("fp32",),
    memory_gb: float = 16.0,
    time_limit: float = 1200.0,
    device: torch.device | None = None,
) -> DecodeRecord:
    """Measure every cell in a subprocess; cells that exceed a limit are reported as failed.

    state_precisions: of the values in the state of VQ attention. time_limit: seconds per cell,
    including the prefill of its context and compilation.
    """
    check_limits(memory_gb=memory_gb, time_limit=time_limit)
    if "gpt2" in kinds:
        gpt2.check_installed()
    device = device or torch.device("cpu")
    cells = _cells(contexts, batches, kinds, compiled, state_precisions)
    rows: list[DecodeRow] = []
    prefill_rows: list[PrefillRow] = []
    with (
        TemporaryDirectory() as folder,
        progress_bar("decoding", len(cells) + len(prefills), "cells") as advance,
    ):
        for cell in cells:
            found: DecodeTiming | Failure
            if (needed := state_bytes(config, cell)) > 0.8e9 * memory_gb:
                found = Failure(failed=f"a state of {needed / 1e9:.0f} GB")
            else:
                arguments = (config, cell, device, Path(folder))
                found = in_subprocess(measure, *arguments, memory_gb=memory_gb, seconds=time_limit)
            rows.append({**_fields(cell), **found})
            advance(1, note=f"{cell.kind}, {cell.context:,} tokens, batch {cell.batch}")
        for n_tokens in prefills:
            memory = in_subprocess(
                measure_prefill, config, n_tokens, device, memory_gb=memory_gb, seconds=time_limit
            )
            prefill_rows.append({"context": n_tokens, **memory})
            advance(1, note=f"prefill of {n_tokens:,} tokens")
    return {
        "what": f"decoding, {gpt2.n_parameters(config):,} parameters, float32",
        "machine": machine(device),
        "model": asdict(config),
        "decode": rows,
        "reading": prefill_rows,
    }


def _cells(
    contexts: Sequence[int],
    batches: Sequence[int],
    kinds: Sequence[DecodeKind],
    compiled: bool,
    state_precisions: Sequence[Precision],
) -> list[Cell]:
    sizes = [(n, b) for b in batches for n in contexts]
    cells = []
    if "vq" in kinds:
        for is_compiled in (False, True)[: 1 + compiled]:
            for precision in dict.fromkeys(state_precisions):
                cells += [Cell("vq", n, b, is_compiled, precision) for n, b in sizes]
    others: tuple[DecodeKind, ...] = ("full", "gpt2")
    return cells + [Cell(kind, n, b) for kind in others if kind in kinds for n, b in sizes]


def _fields(cell: Cell) -> DecodeRow:
    return {
        "kind": cell.kind,
        "context": cell.context,
        "batch": cell.batch,
        "compiled": cell.compiled,
        "state_precision": cell.state_precision,
    }


def measure(config: ModelConfig, cell: Cell, device: torch.device, folder: Path) -> DecodeTiming:
    """Return the time of a decoding step after one context, and the size of the state.

    folder: stores the contexts of the VQ model; a context is computed if it is not there.
    """
    torch.manual_seed(0)
    room = ROUNDS * (2 + MAX_STEPS)
    with torch.device(device):
        if cell.kind == "gpt2":
            prepared = _prepare_gpt2(config, cell, room)
        else:
            prepared = _prepare(config, cell, room, folder)
    bandwidth = bandwidth_probe(device)
    rounds = []  # seconds of a step, and the bandwidth right after it
    for _ in range(ROUNDS):
        seconds = best_seconds(prepared.step, rounds=1, max_steps=MAX_STEPS, device=device)
        rounds.append((seconds, bandwidth()))
    best = min(seconds for seconds, _ in rounds)
    n_bytes = prepared.weight_bytes + prepared.state_bytes
    return {
        "ms_per_step": 1e3 * best,
        "tokens_per_second": cell.batch / best,
        "state_bytes": prepared.state_bytes,
        # Other work slows both down, so that the quotient of a round changes least.
        "share_of_bandwidth": median(n_bytes / seconds / rate for seconds, rate in rounds),
        "read_bandwidth": median(rate for _, rate in rounds),
    }


def measure_prefill(config: ModelConfig, n_tokens: int, device: torch.device) -> PrefillMemory:
    """Return the peak memory of this process before and after a prefill of random tokens."""
    torch.manual_seed(0)
    model = TransformerVQ(replace(config, attention="vq")).to(device)
    before = peak_bytes(device)
    _prefill_random(model, n_tokens)
    return {"before_bytes": before, "peak_bytes": peak_bytes(device)}


def table(record: DecodeRecord) -> str:
    """Return Markdown tables of the decoding steps and of the prefill memory."""
    lines = [
        "| model | batch | context | tokens/s | state MB | step time, relative to shortest "
        "| share of the bandwidth |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    shortest: dict[tuple[str, int], float] = {}
    for row in record["decode"]:
        name = decode_name(row)
        start = f"| {name} | {row['batch']} | {row['context']:,} "
        if "failed" in row:
            lines.append(f"{start}| {row['failed']} | | | |")
            continue
        share = f"{row['share_of_bandwidth']:.2f}" if "share_of_bandwidth" in row else ""
        base = shortest.setdefault((name, row["batch"]), row["ms_per_step"])
        lines.append(
            f"{start}| {row['tokens_per_second']:,.0f} | {row['state_bytes'] / 1e6:,.1f} "
            f"| {row['ms_per_step'] / base:.2f}x | {share} |"
        )
    if record["reading"]:
        lines += ["", "| prefill tokens | peak MB |", "| ---: | ---: |"]
        for prefill in record["reading"]:
            peak = prefill.get("failed") or f"{prefill['peak_bytes'] / 1e6:,.0f}"
            lines.append(f"| {prefill['context']:,} | {peak} |")
    return "\n".join(lines)


def state_bytes(config: ModelConfig, cell: Cell) -> int:
    """Return the bytes of the keys and values of a growing state; 0 for vq."""
    if cell.kind == "vq":
        return 0
    if cell.kind == "gpt2":
        return gpt2.kv_bytes(config, cell.context, cell.batch)
    with torch.device("meta"):
        empty = TransformerVQ(replace(config, attention="full")).init_state(cell.batch)
    widths = sum(x.k.shape[1] * (x.k.shape[-1] + x.v.shape[-1]) for x in empty.layers)
    return 4 * cell.batch * cell.context * widths


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights and codebooks that a step reads.

    A table of embeddings that is not also the output projection is not: a step reads one row of it.
    """
    tables = [x.weight for x in model.modules() if isinstance(x, nn.Embedding)]
    tied = {id(x.weight) for x in model.modules() if isinstance(x, nn.Linear)}
    unread = {id(x) for x in tables} - tied
    parameters = [x for x in model.parameters() if id(x) not in unread]
    codebooks = [x.codebook for x in model.modules() if isinstance(x, VectorQuantizer)]
    return sum(x.nbytes for x in [*parameters, *codebooks])


def _prepare(config: ModelConfig, cell: Cell, room: int, folder: Path) -> Prepared:
    """room: the number of steps that will be taken."""
    attention: AttentionType = "vq" if cell.kind == "vq" else "full"
    model = TransformerVQ(replace(config, attention=attention)).eval()
    token = torch.randint(config.vocab_size, (cell.batch,))
    if cell.kind == "vq":
        path = folder / f"{cell.context}.safetensors"
        if not path.exists():
            save_context(path, model, _prefill_random(model, cell.context))
        state = load_context(path, model).repeat(cell.batch).state
    else:
        state = _random_state(model, cell)
    dtype = torch.bfloat16 if cell.state_precision == "bf16" else None
    decoder = Decoder(model, state, room, dtype)
    step: Callable[[Tensor], Tensor] = decoder.step
    if cell.compiled:
        step = compile_decoding(step, token.device, decoder.tensors())
    n_bytes = state.n_bytes
    if dtype is not None:
        n_bytes -= sum(_halved_bytes(layer) for layer in state.layers)
    return Prepared(lambda: step(token), n_bytes, weight_bytes(model))


def _halved_bytes(state: AttentionState) -> int:
    """Return the bytes that a step does not read if keys, values and means are bfloat16."""
    mean = 0 if state.cache is None else state.cache.mean.nbytes
    return (state.k.nbytes + state.v.nbytes + mean) // 2


def _prefill_random(model: TransformerVQ, n_tokens: int) -> Context:
    """Prefill random tokens; each segment is drawn when needed, so memory stays constant."""
    device = next(model.parameters()).device

    def run(start: int, stop: int, state: ModelState, n_last: int) -> tuple[Tensor, ModelState]:
        tokens = torch.randint(model.config.vocab_size, (1, stop - start), device=device)
        output = model(tokens, state, n_logits=n_last)
        return output.logits, output.state

    with evaluating(model):
        logits, state = run_segments(run, n_tokens, model.init_state(1), n_last=1)
    return Context(logits[:, -1], state)


def _random_state(model: TransformerVQ, cell: Cell) -> ModelState:
    """Return a state of full attention with random keys and values."""
    position = torch.full((cell.batch,), cell.context)
    layers = []
    for empty in model.init_state(cell.batch).layers:
        k, v = (torch.randn(*x.shape[:2], cell.context, x.shape[-1]) for x in (empty.k, empty.v))
        layers.append(AttentionState(k, v, position))
    return ModelState(tuple(layers))


def _prepare_gpt2(config: ModelConfig, cell: Cell, room: int) -> Prepared:
    model = gpt2.build(config, cell.context + room)
    from transformers import DynamicCache

    token = torch.randint(config.vocab_size, (cell.batch, 1))
    width, n_layer = gpt2.shape(config)
    shape = (cell.batch, width // gpt2.HEAD_WIDTH, cell.context, gpt2.HEAD_WIDTH)
    cache = DynamicCache(config=model.config)
    for layer in range(n_layer):
        cache.update(torch.randn(shape), torch.randn(shape), layer)

    def step() -> Any:
        with torch.no_grad():
            return model(token, past_key_values=cache, use_cache=True).logits

    return Prepared(step, state_bytes(config, cell), weight_bytes(model))
