"""The model card of an export: README.md with what the run folder records about the model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from transformer_vq.config import RunConfig
from transformer_vq.files import CorruptFileError, read_json, read_object
from transformer_vq.hf.configuration import FILE
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.plots import positions
from transformer_vq.progress import warn
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import finite, read_metrics
from transformer_vq.training.packaged import ABOUT, is_packaged
from transformer_vq.training.run_list import model_step

SMALL = 100_000_000
"""Parameters below which the card warns about the size."""
HUB_NAME = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
"""Names that the Hub accepts as `base_model`; it rejects a card with any other."""
HEADS = {
    "shga": "SHGA: one gated head",
    "mha": "MHA: multi-head attention",
    "mqa": "MQA: multi-query attention",
    "gqa": "GQA: grouped-query attention",
}
TEMPLATE = Path(__file__).with_name("model_card.md")

Row = dict[str, Any]


def model_card(
    run: Path, name: str, model: TransformerVQ, which: str, license_id: str | None = None
) -> str:
    """Return the model card of a checkpoint of a run.

    name: of the model, as given to `from_pretrained`. which: the checkpoint, "best" or "step N".
    license_id: as on the Hub, such as "mit"; by default that of a packaged model, else not stated.
    Paths of the run are reduced to their last part.
    """
    config, rows = read_config(run), read_metrics(run)
    about = read_json(run / ABOUT) if is_packaged(run) else {}
    step, n_parameters = _step(run, rows, which), sum(p.numel() for p in model.parameters())
    images, linear = config.data.has_images, config.model.attention == "vq"
    base = config.train.init_from and _base_name(config.train.init_from)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="unconditional-image-generation" if images else "text-generation",
        license=license_id or about.get("license"),
        base_model=base if base and re.fullmatch(HUB_NAME, base) else None,
        tags=["transformer-vq", *(["long-context", "linear-attention"] if linear else [])],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        quoted=json.dumps(name),
        kind="image model; its tokens are pixel values" if images else "language model",
        linear=linear,
        images=images,
        file=FILE,
        architecture=_table(("", ""), _architecture(model, n_parameters)),
        training=_table(("", ""), _training(config, about.get("data"), rows, which, step)),
        results=_results(run, rows, which, step),
        seq_len=f"{config.train.seq_len:,}",
        small=n_parameters < SMALL,
        n_parameters=f"{n_parameters:,}",
    )
    return f"{str(card).rstrip()}\n"


def _architecture(model: TransformerVQ, n_parameters: int) -> list[tuple[str, ...]]:
    config = model.config
    layer = "two gated attention units" if config.head_type == "shga" else "attention, feed-forward"
    rows: list[tuple[str, ...]] = [
        ("parameters", f"{n_parameters:,}"),
        ("dtype of the weights", str(model.embed.weight.dtype).removeprefix("torch.")),
        ("layers", f"{config.n_layer} ({layer})"),
        ("width (`d_model`)", f"{config.d_model:,}"),
        ("heads", f"{HEADS[config.head_type]}, {config.layer.heads.n_head} x {config.d_k} wide"),
        ("vocabulary", f"{config.vocab_size:,} tokens"),
    ]
    if config.attention == "full":
        return [*rows, ("attention", "full; the state grows with the length")]
    return [
        *rows,
        ("codes per codebook", f"{config.n_code:,}"),
        ("block length and window", f"{config.block_len:,} tokens"),
        ("cache of older tokens", "yes" if config.compressive_cache else "no"),
        ("state per sequence", f"{model.init_state(1).n_bytes:,} bytes, for any length"),
    ]


def _training(
    config: RunConfig, about_data: str | None, rows: list[Row], which: str, step: int | None
) -> list[tuple[str, ...]]:
    data, train = config.data, config.train
    found: list[tuple[str, ...]] = [("dataset", str(data.dataset))]
    if about_data is not None:
        found = [("data", about_data)]
    elif data.path:
        found.append(("files", ", ".join(f"`{_base_name(path)}`" for path in data.path)))
    elif data.dataset == "text":
        found.append(("files", "the sources of Python's standard library"))
    if data.has_images:
        found.append(("tokens", "pixel values"))
    else:
        ends = "with" if data.ends_documents else "without"
        tokenizer = _base_name(data.tokenizer_name)
        found.append(("tokenizer", f"{tokenizer}, {ends} an end-of-document token"))
    at = "unknown step" if step is None else f"step {step:,} of {train.steps:,}"
    found.append(("checkpoint", f"lowest validation loss, {at}" if which == "best" else at))
    if step is not None and (tokens := _tokens(rows, step)):
        found.append(("tokens trained on", f"{tokens:,}"))
    found += [
        ("sequence length", f"{train.seq_len:,} tokens"),
        ("backpropagation length", f"{train.backprop_len:,} tokens"),
        ("batch size", f"{train.batch_size:,} sequences"),
        ("optimizer", f"{config.optim.optimizer}, learning rate {config.optim.lr:g}"),
        ("precision of training", train.precision),
    ]
    if train.init_from is not None:
        found.append(("fine-tuned from", f"`{_base_name(train.init_from)}`"))
    return found


def _results(run: Path, rows: list[Row], which: str, step: int | None) -> str:
    """Return a table of the recorded scores of the checkpoint; empty if there are none."""
    found: list[tuple[str, ...]] = []
    for row in finite(rows, "bits_per_byte"):
        if row["kind"] == "validation" and row["step"] == step:
            bits = f"{row['bits_per_byte']:.4f}"
            found = [("validation", "during training", f"{row['tokens']:,}", bits, "")]
    for path in sorted(run.glob("evaluation-*.json")):
        try:
            evaluation = read_object(path)
            if (evaluation["step"], evaluation["checkpoint"]) == (step, which):
                found += _evaluation(evaluation)
        except (CorruptFileError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = error if isinstance(error, CorruptFileError) else "it has an unknown format"
            warn(f"the model card omits {path.name}: {why}")
    if not found:
        return ""
    return _table(("split", "protocol", "tokens", "bits per byte", "word-level perplexity"), found)


def _evaluation(evaluation: Row) -> list[tuple[str, ...]]:
    """Return the rows of a recorded evaluation."""
    names = {"windowed": f"windowed, {evaluation['seq_len']:,} tokens"}
    return [
        (
            str(evaluation["split"]),
            names.get(protocol, protocol),
            f"{result['tokens']:,}",
            f"{result['bits_per_byte']:.4f}",
            "" if result["word_perplexity"] is None else f"{result['word_perplexity']:,.4g}",
        )
        for protocol, result in evaluation["protocols"].items()
    ]


def _step(run: Path, rows: list[Row], which: str) -> int | None:
    """Return the step of a checkpoint; of a best model without one, that of the lowest loss."""
    losses = [row for row in finite(rows, "nats_per_token") if row["kind"] == "validation"]
    best = min(losses, key=lambda row: row["nats_per_token"], default={"step": None})
    return model_step(run, which) or best["step"]


def _tokens(rows: list[Row], step: int) -> int:
    """Return the number of tokens trained on up to a step; 0 if the log does not show it."""
    found = zip(rows, positions(rows, "tokens"), strict=True)
    total = max((n for row, n in found if row["step"] <= step), default=0)
    return int(total) if math.isfinite(total) else 0


def _base_name(path: str) -> str:
    """Return the last part of a path, because folders can contain private names."""
    return "standard input" if path == "-" else Path(path).name or "."


def _table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
