"""The model card of an export: README.md with what the run folder records about the model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from transformer_vq.files import CorruptFileError, read_object
from transformer_vq.hf.configuration import FILE
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.plots import positions
from transformer_vq.progress import warn
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import finite, read_metrics
from transformer_vq.training.packaged import ABOUT, has_no_data
from transformer_vq.training.run_list import model_step

SMALL = 100_000_000  # parameters below which the card warns about the size
HUB_NAME = r"[A-Za-z0-9][\w.-]*(/[\w.-]*)?(?<=[A-Za-z0-9])"
"""Names that the Hub accepts as `base_model`; it rejects a card with any other."""
TEMPLATE = Path(__file__).with_name("model_card.md")

Row = dict[str, Any]


def model_card(
    run: Path, name: str, model: TransformerVQ, which: str, license_id: str | None = None
) -> str:
    """Return the model card of a checkpoint of a run.

    name: of the model, as given to `from_pretrained`. which: the checkpoint, "best" or "step N".
    license_id: as on the Hub, such as "mit"; by default that of a packaged or
    converted model, else not stated.
    Paths of the run are reduced to their last part.
    """
    config, rows = read_config(run), read_metrics(run)
    about = read_object(run / ABOUT) if (run / ABOUT).is_file() else {}
    losses = [row for row in finite(rows, "nats_per_token") if row["kind"] == "validation"]
    best = min(losses, key=lambda row: row["nats_per_token"], default={"step": None})
    step: int | None = model_step(run, which) or best["step"]  # an older best model has no step
    n_parameters = sum(p.numel() for p in model.parameters())
    logged = zip(rows, positions(rows, "tokens"), strict=True)  # tokens trained on so far
    n_tokens = max((n for row, n in logged if row["step"] <= (step or 0)), default=0)
    images, linear = config.data.has_images, config.model.attention == "vq"
    base = about.get("source")
    if base is None and config.train.init_from:
        base = _base_name(config.train.init_from)
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
        linear=linear,
        images=images,
        file=FILE,
        config=config,
        model=model.config,
        dtype=str(model.embed.weight.dtype).removeprefix("torch."),
        state_bytes=model.init_state(1).n_bytes if linear else 0,
        about=about,
        is_trained=not (has_no_data(run) and "source" in about),
        files=[_base_name(path) for path in config.data.path or ()],
        tokenizer="" if images else _base_name(config.data.tokenizer_name),
        base=base,
        is_best=which == "best",
        step=step,
        n_tokens=int(n_tokens) if math.isfinite(n_tokens) else 0,
        results=_results(run, rows, which, step),
        small=n_parameters < SMALL,
        n_parameters=n_parameters,
    )
    return f"{str(card).rstrip()}\n"


def _results(run: Path, rows: list[Row], which: str, step: int | None) -> list[Row]:
    """Return the recorded scores of the checkpoint."""
    found: list[Row] = []
    for row in finite(rows, "bits_per_byte"):
        if row["kind"] == "validation" and row["step"] == step:
            found = [row | {"split": "validation", "protocol": "during training"}]
    for path in sorted(run.glob("evaluation-*.json")):
        try:
            evaluation = read_object(path)
            if (evaluation["step"], evaluation["checkpoint"]) == (step, which):
                names = {"windowed": f"windowed, {evaluation['seq_len']:,} tokens"}
                found += [
                    {
                        "split": evaluation["split"],
                        "protocol": names.get(protocol, protocol),
                        "tokens": int(result["tokens"]),
                        "bits_per_byte": float(result["bits_per_byte"]),
                        "word_perplexity": float(result["word_perplexity"] or 0),
                    }
                    for protocol, result in evaluation["protocols"].items()
                ]
        except (CorruptFileError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = error if isinstance(error, CorruptFileError) else "it has an unknown format"
            warn(f"the model card omits {path.name}: {why}")
    return found


def _base_name(path: str) -> str:
    """Return the last part of a path, because folders can contain private names."""
    name = "standard input" if path == "-" else Path(path).name or "."
    return name.replace("|", r"\|")  # a column of a Markdown table ends here
