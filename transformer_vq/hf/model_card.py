"""The model card of an export: README.md with what the run folder records about the model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformer_vq.config import RunConfig
from transformer_vq.files import CorruptFileError, read_json, read_verified_json
from transformer_vq.hf.remote_code import FILE
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import warn
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.packaged import ABOUT, is_packaged
from transformer_vq.training.plots import positions
from transformer_vq.training.report_charts import finite
from transformer_vq.training.run_list import model_step

PAPER = "https://arxiv.org/abs/2309.16354"
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
CITATION = """\
    @inproceedings{lingle2024transformervq,
      title = {Transformer-{VQ}: Linear-Time Transformers via Vector Quantization},
      author = {Lucas D. Lingle},
      booktitle = {International Conference on Learning Representations},
      year = {2024},
      url = {https://arxiv.org/abs/2309.16354}
    }"""

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
    data = about.get("data")
    step, n_parameters = _step(rows, which), sum(p.numel() for p in model.parameters())
    sections = [
        _front_matter(config, license_id or about.get("license")),
        f"# {name}",
        _summary(config),
        f"## Use\n\n{_usage(config, name)}",
        f"## Architecture\n\n{_architecture(model, n_parameters)}",
        f"## Training\n\n{_training(config, data, rows, which, step)}",
        f"## Results\n\n{_results(run, rows, which, step)}",
        f"## Limits\n\n{_limits(config, n_parameters)}",
        f"## Citation\n\n{CITATION}",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: RunConfig, license_id: str | None) -> str:
    task = "unconditional-image-generation" if config.data.has_images else "text-generation"
    tags = ["transformer-vq"]
    if config.model.attention == "vq":
        tags += ["long-context", "linear-attention"]
    lines = ["library_name: transformers", f"pipeline_tag: {task}"]
    if license_id is not None:
        lines.append(f"license: {license_id}")
    base = config.train.init_from
    if base is not None and re.fullmatch(HUB_NAME, _base_name(base)):
        lines.append(f"base_model: {json.dumps(_base_name(base))}")
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _summary(config: RunConfig) -> str:
    what = (
        "image model; its tokens are pixel values" if config.data.has_images else "language model"
    )
    if config.model.attention == "full":
        return (
            f"The full-attention baseline of [Transformer-VQ]({PAPER}): a decoder-only transformer "
            f"with quadratic-time attention. It is an autoregressive {what}."
        )
    return (
        f"A [Transformer-VQ]({PAPER}): a decoder-only transformer with dense softmax attention in "
        f"linear time. It is an autoregressive {what}.\n\n"
        "Keys are vector-quantized. The last tokens are stored as they are, older tokens in a "
        "cache of fixed size. So time and memory per generated token do not depend on the length."
    )


def _usage(config: RunConfig, name: str) -> str:
    quoted = json.dumps(name)
    if config.data.has_images:
        lines = [
            "from transformers import AutoModelForCausalLM",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({quoted})",
            "tokens = model.generate(max_new_tokens=100, do_sample=True)",
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({quoted})",
            f"tokenizer = AutoTokenizer.from_pretrained({quoted})",
            'inputs = tokenizer("The", return_tensors="pt")',
            "tokens = model.generate(**inputs, max_new_tokens=100, do_sample=True)",
            "print(tokenizer.decode(tokens[0], skip_special_tokens=True))",
        ]
    code = "\n".join(
        ["```python", "import transformer_vq.hf  # registers the model", *lines, "```"]
    )
    images = "\n\nTokens are pixel values, not text, so there is no tokenizer."
    return (
        "The model needs the Python package `transformer-vq` with the extra `hf`. In a clone of "
        f"its repository:\n\n    pip install '.[hf]'\n\n{code}\n\n"
        "Instead of the first import, you can pass `trust_remote_code=True` to each "
        f"`from_pretrained`. It runs `{FILE}`, which imports the same package."
        f"{images if config.data.has_images else ''}"
    )


def _architecture(model: TransformerVQ, n_parameters: int) -> str:
    config = model.config
    layer = "two gated attention units" if config.head_type == "shga" else "attention, feed-forward"
    rows = [
        ("parameters", f"{n_parameters:,}"),
        ("dtype of the weights", str(model.embed.weight.dtype).removeprefix("torch.")),
        ("layers", f"{config.n_layer} ({layer})"),
        ("width (`d_model`)", f"{config.d_model:,}"),
        ("heads", f"{HEADS[config.head_type]}, {config.layer.heads.n_head} x {config.d_k} wide"),
        ("vocabulary", f"{config.vocab_size:,} tokens"),
    ]
    if config.attention == "full":
        rows.append(("attention", "full; the state grows with the length"))
    else:
        state = model.init_state(1)
        rows += [
            ("codes per codebook", f"{config.n_code:,}"),
            ("block length and window", f"{config.block_len:,} tokens"),
            ("cache of older tokens", "yes" if config.compressive_cache else "no"),
            ("state per sequence", f"{state.n_bytes:,} bytes, for any length"),
        ]
    return _table(("", ""), rows)


def _training(
    config: RunConfig, about_data: str | None, rows: list[Row], which: str, step: int | None
) -> str:
    data, train = config.data, config.train
    found = [("dataset", str(data.dataset))]
    if about_data is not None:
        found = [("data", about_data)]
    elif data.path:
        found.append(("files", ", ".join(f"`{_base_name(path)}`" for path in data.path)))
    elif data.dataset == "text":
        found.append(("files", "the sources of Python's standard library"))
    if data.has_images:
        found.append(("tokens", "pixel values"))
    else:
        tokenizer = data.tokenizer_name
        ends = "with" if data.ends_documents else "without"
        found.append(("tokenizer", f"{_base_name(tokenizer)}, {ends} an end-of-document token"))
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
    return _table(("", ""), found)


def _results(run: Path, rows: list[Row], which: str, step: int | None) -> str:
    found: list[tuple[str, ...]] = []
    for row in finite(rows, "bits_per_byte"):
        if row["kind"] == "validation" and row["step"] == step:
            tokens = f"{row['tokens']:,}" if "tokens" in row else ""
            bits = f"{row['bits_per_byte']:.4f}"
            found.append(("validation", "during training", tokens, bits, ""))
            break
    for path in sorted(run.glob("evaluation-*.json")):
        try:
            evaluation = read_verified_json(path)
            if evaluation.get("step") == model_step(run, which):
                found += _evaluation(evaluation, which)
        except (CorruptFileError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = error if isinstance(error, CorruptFileError) else "it has an unknown format"
            warn(f"the model card omits {path.name}: {why}")
    if not found:
        return "The run has no recorded evaluation of this checkpoint."
    heads: tuple[str, ...] = ("split", "protocol", "tokens", "bits per byte")
    if any(row[-1] for row in found):
        return _table((*heads, "word-level perplexity"), found)
    return _table(heads, [row[:-1] for row in found])


def _evaluation(evaluation: Row, which: str) -> list[tuple[str, ...]]:
    """Return the rows of a recorded evaluation; none if it is of another checkpoint."""
    if evaluation["checkpoint"] != which:
        return []
    window = f"windowed, {evaluation['seq_len']:,} tokens"
    return [
        (
            str(evaluation["split"]),
            window if protocol == "windowed" else str(protocol),
            f"{result['tokens']:,}",
            f"{result['bits_per_byte']:.4f}",
            "" if result["word_perplexity"] is None else f"{result['word_perplexity']:,.4g}",
        )
        for protocol, result in evaluation["protocols"].items()
    ]


def _limits(config: RunConfig, n_parameters: int) -> str:
    train, model = config.train, config.model
    lines = [
        f"There is no maximum length, but training used sequences of {train.seq_len:,} tokens. "
        "Quality beyond that length was not measured unless a result above says so.",
        "Attention weights are never available (`output_attentions`), because they are not stored.",
        "No safety evaluation is recorded. The output can be wrong or offensive.",
    ]
    if n_parameters < SMALL:
        lines.append(
            f"A model of {n_parameters:,} parameters makes many errors; use it for research."
        )
    if model.attention == "full":
        lines[0] = (
            f"Training used sequences of {train.seq_len:,} tokens; cost grows with the length."
        )
    if not config.data.has_images:
        lines.append("It reproduces the languages and the style of its training data only.")
    return "\n".join(f"- {line}" for line in lines)


def _step(rows: list[Row], which: str) -> int | None:
    """Return the step of a checkpoint; None if the log does not show it."""
    if which != "best":
        return int(which.removeprefix("step "))
    valid = [row for row in finite(rows, "nats_per_token") if row["kind"] == "validation"]
    best = min(valid, key=lambda row: row["nats_per_token"], default=None)
    return None if best is None else int(best["step"])


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
