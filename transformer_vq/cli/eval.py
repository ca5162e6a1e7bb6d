"""tvq eval: evaluate a run on a split of its data, or of other data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import tyro

from transformer_vq.cli.arguments import Checkpoint, Device, Json, Matmul, Run, parse, run_name
from transformer_vq.cli.output import computing, print_json
from transformer_vq.config import Count, DataConfig, Rows
from transformer_vq.errors import UserError
from transformer_vq.progress import IS_SILENT
from transformer_vq.training.run_list import checkpoint_label

if TYPE_CHECKING:
    from transformer_vq.training.evaluate import RunEvaluation


@dataclass(frozen=True)
class EvalOptions:
    """Evaluate a run: bits per byte and word-level perplexity, one line per protocol.

    After a complete split of the run's own data, RUN/evaluation-SPLIT.json has the results too.
    Processes of `torchrun` share the work.
    """

    data: DataConfig
    """Data to evaluate on; by default, the data of the run."""
    name: Run
    """Run folder, or books, the model in the package."""
    split: Literal["train", "validation", "test", "all"] = "test"
    """Split to evaluate; all: every document of the given files, without splitting them (the
    default for models in the package)."""
    protocol: Literal["windowed", "streaming", "both", "auto"] = "auto"
    """windowed: a new state every seq-len tokens, as in the paper.
    streaming: one state per document.
    auto: windowed; with --json both, except for full attention, whose cost grows with the length.
    """
    positions: bool = False
    """Also print the loss by position in the context."""
    checkpoint: Checkpoint = "best"
    seq_len: Count | None = None
    """Tokens per window of the windowed protocol; None uses the value of the run."""
    batch_size: Rows | None = None
    """Sequences per batch and process; does not affect the result. None uses the value of the
    run."""
    max_tokens: Count | None = None
    """Evaluate only this many tokens, from the start of the split."""
    precision: Matmul = "fp32"
    device: Device = "auto"
    json: Json = False


def run(arguments: list[str]) -> None:
    """Evaluate a run; print the results and write them to a file."""
    name = run_name(arguments, "eval", EvalOptions(DataConfig(), tyro.MISSING))

    from transformer_vq.device import find_device
    from transformer_vq.files import write_json
    from transformer_vq.training.checkpoint import read_config
    from transformer_vq.training.evaluate import default_split, evaluate
    from transformer_vq.training.packaged import find_run

    folder = find_run(name)
    own = read_config(folder).data
    default = EvalOptions(own, name, cast(Any, default_split(folder)))
    options = parse(EvalOptions, arguments, "eval", default)
    if options.protocol == "streaming" and options.seq_len is not None:
        raise UserError("--seq-len does not apply to --protocol streaming")
    default_protocols = None if options.json else ["windowed"]
    choices: dict[str, Any] = {"both": ["windowed", "streaming"], "auto": default_protocols}
    with computing("reduce --batch-size"):
        result = evaluate(
            name,
            data=None if options.data == own else options.data,
            split=options.split,
            protocols=choices.get(options.protocol, [options.protocol]),
            checkpoint=options.checkpoint,
            seq_len=options.seq_len,
            batch_size=options.batch_size,
            max_tokens=options.max_tokens,
            precision=options.precision,
            device=find_device(options.device),
        )
    print(evaluation_text(result, options.positions))
    if options.data == own and options.max_tokens is None and not IS_SILENT:
        write_json(folder / f"evaluation-{options.split}.json", result.to_dict())
    print_json(result.to_dict(), options.json)


def evaluation_text(evaluation: RunEvaluation, positions: bool = False) -> str:
    """Return one line per protocol; positions: followed by a table of its loss by position."""
    which = checkpoint_label(evaluation.checkpoint, evaluation.step)
    name = f"{evaluation.run} ({which}), {evaluation.split} of {evaluation.dataset}"
    how = {"windowed": f"windows of {evaluation.seq_len:,} tokens", "streaming": "whole documents"}
    lines = []
    for result in evaluation.protocols.values():
        figures = f"{result.bits_per_byte:.4f} bits per byte, "
        figures += f"{result.nats_per_token:.4f} nats per token"
        counts = f"{result.tokens:,} tokens, {result.bytes:,} bytes"
        if result.word_perplexity is not None:
            figures += f", word-level perplexity {result.word_perplexity:,.4g}"
            counts += f", {result.words:,} words"
        lines.append(f"{name}, {result.protocol} ({how[result.protocol]}): {figures}; {counts}")
        if positions:
            lines += ["", "| position | tokens | nats per token |", "| ---: | ---: | ---: |"]
            for row in result.by_position:
                span = f"{row.first:,}" + f" - {row.last:,}" * (row.first != row.last)
                lines.append(f"| {span} | {row.tokens:,} | {row.nats_per_token:.4f} |")
            lines.append("")
    return "\n".join(lines).rstrip()
