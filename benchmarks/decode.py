"""Decoding: tokens per second, state size, and prefill memory by context length.

Two baselines have about the same number of parameters and a state that grows with the context.
`full` is the same model with full attention, whose keys and values fill a preallocated buffer.
`gpt2` is the GPT-2 of Hugging Face transformers with its own cache. Their contexts are filled with
random keys and values: a prefill would take quadratic time, and the values do not affect the cost
of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gpt2
from common import (
    Device,
    Output,
    Record,
    check_positive,
    label_end,
    log_lengths,
    log_values,
    main,
    new_figure,
)
from measure import (
    Failure,
    bandwidth_probe,
    best_seconds,
    in_subprocess,
    machine,
)
from transformer_vq.config import AttentionType, ModelConfig
from transformer_vq.device import compile_decoding, evaluating, find_device
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.prefill import Context, run_segments
from transformer_vq.generation.snapshot import load_context, save_context
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.nn.quantizer import VectorQuantizer
from transformer_vq.ops.state import FullState
from transformer_vq.plots import BLUE, GREEN, VERMILION, note
from transformer_vq.presets import PRESETS
from transformer_vq.progress import progress_bar

DecodeKind = Literal["vq", "full", "gpt2"]


ROUNDS = 9


MAX_STEPS = 64  # per round


@dataclass(frozen=True)
class Cell:
    """One measurement: the model, the context length, and the batch size."""

    kind: DecodeKind
    context: int
    batch: int
    compiled: bool = False


@dataclass(frozen=True)
class Prepared:
    """A decoding step that can be repeated, and the size of the state it carries."""

    step: Callable[[], object]
    state_bytes: int
    weight_bytes: int


def run(options: Options) -> Record:
    """Measure every cell in a subprocess; cells that exceed a limit are reported as failed."""
    check_positive(contexts=options.contexts, batches=options.batches, prefills=options.prefills)
    check_positive(memory_gb=options.memory_gb, time_limit=options.time_limit)
    sizes = {name: getattr(options, name) for name in ("d_k", "n_code", "block_len")}
    changes = {name: n for name, n in sizes.items() if n is not None}
    config = replace(PRESETS[options.preset].model, **changes)
    if "gpt2" in options.kinds:
        gpt2.check_installed()
    device = find_device(options.device)
    limits = {"memory_gb": options.memory_gb, "seconds": options.time_limit}
    modes = [(kind, False) for kind in options.kinds]
    modes += [("vq", True)] * (options.compile and "vq" in options.kinds)
    cells = [
        Cell(kind, context, batch, is_compiled)
        for kind, is_compiled in modes
        for batch in options.batches
        for context in options.contexts
    ]
    rows: list[Record] = []
    prefill_rows: list[Record] = []
    with (
        TemporaryDirectory() as folder,
        progress_bar("decoding", len(cells) + len(options.prefills), "cells") as advance,
    ):
        for cell in cells:
            found: Record | Failure
            if (needed := state_bytes(config, cell)) > 0.8e9 * options.memory_gb:
                found = Failure(failed=f"a state of {needed / 1e9:.0f} GB")
            else:
                arguments = (config, cell, device, Path(folder))
                found = in_subprocess(measure, *arguments, **limits)
            rows.append({**asdict(cell), **found})
            advance(1, note=f"{cell.kind}, {cell.context:,} tokens, batch {cell.batch}")
        for n_tokens in options.prefills:
            memory = in_subprocess(measure_prefill, config, n_tokens, device, **limits)
            prefill_rows.append({"context": n_tokens, **memory})
            advance(1, note=f"prefill of {n_tokens:,} tokens")
    return {
        "what": f"decoding, {gpt2.n_parameters(config):,} parameters, float32",
        "machine": machine(device),
        "model": asdict(config),
        "decode": rows,
        "reading": prefill_rows,
    }


def measure(config: ModelConfig, cell: Cell, device: torch.device, folder: Path) -> Record:
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


def measure_prefill(config: ModelConfig, n_tokens: int, device: torch.device) -> Record:
    """Return the peak memory of this process before and after a prefill of random tokens."""
    torch.manual_seed(0)
    model = TransformerVQ(replace(config, attention="vq")).to(device)
    before = peak_bytes(device)
    _prefill_random(model, n_tokens)
    return {"before_bytes": before, "peak_bytes": peak_bytes(device)}


def table(record: Record) -> str:
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
    decoder = Decoder(model, state, room)
    step: Callable[[Tensor], Tensor] = decoder.step
    if cell.compiled:
        step = compile_decoding(step, token.device, decoder.tensors())
    return Prepared(lambda: step(token), state.n_bytes, weight_bytes(model))


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
        layers.append(FullState(k, v, position))
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


def decode_name(row: Record) -> str:
    """Return the name of the model of a row in tables and figures."""
    state = ", bf16 state" if row.get("state_precision") == "bf16" else ""
    return f"{row['kind']}{state}, compiled" if row["compiled"] else f"{row['kind']}{state}"


DECODE_NAMES: dict[DecodeKind, tuple[str, str]] = {
    "vq": ("Transformer-VQ", BLUE),
    "full": ("full attention", VERMILION),
    "gpt2": ("GPT-2", GREEN),
}
"""Name and color of a decoding benchmark."""


DecodeKey = Literal["tokens_per_second", "state_bytes"]


def plot_decode(record: Record, path: Path, batches: list[int] | None = None) -> None:
    """Plot tokens per second and state size by context length: a row of panels per batch size.

    batches: batch sizes to show; None shows all.
    """
    shown = [row for row in record["decode"] if batches is None or row["batch"] in batches]
    sizes = sorted({row["batch"] for row in shown})
    contexts = sorted({row["context"] for row in shown})
    with new_figure(path, rows=len(sizes), columns=2, height=3.2) as (figure, axes):
        for number, batch in enumerate(sizes):
            left, right = axes[2 * number : 2 * number + 2]
            lines: dict[tuple[DecodeKind, bool], list[Record]] = {}
            for row in shown:
                if row["batch"] == batch:
                    lines.setdefault((row["kind"], row["compiled"]), []).append(row)
            for (kind, compiled), rows in lines.items():
                _draw_decode(left, rows, "tokens_per_second")
                if not compiled or (kind, False) not in lines:  # compiling does not change it
                    _draw_decode(right, rows, "state_bytes")
            which = f", batch {batch}" if len(sizes) > 1 else ""
            left.set_title(f"Tokens per second{which}")
            right.set_title(f"State size in MB{which}")
            for panel in (left, right):
                log_lengths(panel, contexts, "context length (tokens)")
                panel.margins(y=0.12)
                log_values(panel)
        failed = "Crosses: the last context that could be measured. "
        gpt2 = "GPT-2: Hugging Face model with about as many parameters."
        has_failed = any("failed" in row for row in shown)
        note(figure, failed * has_failed + gpt2 * any(row["kind"] == "gpt2" for row in shown))


def _draw_decode(axes: Any, rows: list[Record], key: DecodeKey) -> None:
    """Draw one line; a cross marks its end if a longer context failed."""
    measured = [row for row in rows if "failed" not in row]
    if not measured:
        return
    name, color = DECODE_NAMES[rows[0]["kind"]]
    style = {"linestyle": "--", "marker": "s"} if rows[0]["compiled"] else {"marker": "o"}
    unit = 1e6 if key == "state_bytes" else 1
    line = [row["context"] for row in measured], [row[key] / unit for row in measured]
    axes.plot(*line, color=color, **style)
    if rows[0]["compiled"]:
        name += ",\ncompiled"
    failed = next((row for row in rows if "failed" in row), None)
    if failed is None:
        label_end(axes, line, name, color)
        return
    end = line[0][-1], line[1][-1]
    axes.plot(*end, "x", color=color, ms=10, mew=2)
    if key == "state_bytes":  # lines rise, so the space is above
        style = {"ha": "right", "va": "bottom", "color": color, "textcoords": "offset points"}
        axes.annotate(name.replace(" ", "\n"), end, xytext=(5, 8), **style)
    else:
        reason = f"\n{failed['failed']}\nat {failed['context']:,}"
        label_end(axes, line, name + reason, color)


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Measure tokens per second, state size and memory of decoding by context length."""

    preset: str = "small"
    """Preset with the size of the model."""
    d_k: int | None = None
    """Width of keys instead of the preset's."""
    n_code: int | None = None
    """Number of codes instead of the preset's."""
    block_len: int | None = None
    """Block length instead of the preset's."""
    contexts: tuple[int, ...] = (1024, 8192, 65536, 524288)
    """Context lengths: tokens before the timed steps."""
    batches: tuple[int, ...] = (1, 8)
    """Batch sizes."""
    kinds: tuple[DecodeKind, ...] = ("vq", "full", "gpt2")
    """vq; full: the same model with full attention and a key-value cache; gpt2: GPT-2 of Hugging
    Face transformers."""
    prefills: tuple[int, ...] = (65536, 1048576)
    """Prompt lengths for which the peak memory of the prefill is measured."""
    compile: bool = False
    """Also measure compiled decoding."""
    memory_gb: float = 16.0
    """Memory limit of a measurement."""
    time_limit: float = 1200.0
    """Seconds per measurement, including the prefill; a longer one is stopped and reported as
    failed."""
    device: Device = "auto"


if __name__ == "__main__":
    main(Options, run, table, plot_decode)
