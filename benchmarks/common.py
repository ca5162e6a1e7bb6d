"""What the benchmarks share: options, records and figures. Timing is in `measure.py`.

Every script has a function `run` or `measure` that returns a record of plain values, `table`, which
formats it, and for most a function that plots it. The keys of records are never renamed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import tyro

from transformer_vq import plots
from transformer_vq.config import RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.prepare import prepare
from transformer_vq.device import find_device, keep_freed_memory
from transformer_vq.errors import UserError
from transformer_vq.files import check_can_write, write_json
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.world import World
from transformer_vq.plots import thousands
from transformer_vq.presets import PRESETS
from transformer_vq.progress import TerminalReporter, reporting
from transformer_vq.sizes import choose_accumulation
from transformer_vq.training.run import training_batches
from transformer_vq.training.step import Trainer

Record = dict[str, Any]
"""Plain values that are written as JSON."""

Device = Annotated[str, tyro.conf.arg(help="cpu, cuda, cuda:1, ...; auto uses a GPU if available.")]
Flat = Annotated[RunConfig, tyro.conf.arg(name="")]
"""A run config whose options have no prefix: --model.n-code, not --run.model.n-code."""

END_LABEL = "end label"  # mark of the labels at line ends, which are moved apart
LONG = 10.0  # seconds; what takes longer is measured once


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a benchmark; `record` has the measurements so far."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options of every benchmark."""

    out: Path | None = None
    """JSON file for the record; its figure is written next to it."""
    overwrite: bool = False
    """Replace an existing record."""
    json: bool = False
    """Print the record as the last line of stdout."""


def main(
    kind: Callable[..., Any],
    measure: Callable[[Any], Record],
    table: Callable[[Record], str],
    plot: Callable[[Record, Path], None] | None = None,
    base: RunConfig | None = None,
) -> None:
    """Run a benchmark with the options of the command line, and exit; errors are one line.

    kind: dataclass of the options, with the fields of `Output`. measure: returns the record, or
    raises Interrupted with a part of it. base: if given, the options have all settings of a run as
    field `run`; their defaults are those of the preset that the first argument may name, or base.
    """
    arguments = sys.argv[1:]
    default: dict[str, Any] = {}
    if base is not None:
        if arguments and not arguments[0].startswith("-"):
            base = _preset(arguments.pop(0))
        default = {"default": kind(run=base)}
    keep_freed_memory()
    options, status = tyro.cli(kind, args=arguments, **default), 0
    try:
        check_can_write("--out", options.out, options.overwrite)
        with reporting(TerminalReporter()):
            try:
                record = measure(options)
            except Interrupted as error:
                record, status = error.record, 130
        if options.out is not None:
            write_json(options.out, record)
            if plot is not None and find_spec("matplotlib") is not None and not status:
                plot(record, options.out.with_suffix(".png"))
        print(table(record))
        if options.json:
            print(json.dumps(record))
    except (UserError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _preset(name: str) -> RunConfig:
    if name not in PRESETS:
        sys.exit(f"{name} is not a preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def check_positive(**options: float | tuple[float, ...] | None) -> None:
    """Raise UserError unless all options, named as in Python, are finite and above 0."""
    for name, values in options.items():
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and not 0 < value < math.inf:
                option = name.replace("_", "-")
                raise UserError(f"--{option} {value:g}: must be a finite number above 0")


def median_seconds(timed: Callable[[], float]) -> float:
    """Return the median time of three calls; one that takes long is not repeated.

    timed: does the work and returns the seconds that it took.
    """
    first = timed()
    if first > LONG:
        return first
    return median([first, *(timed() for _ in range(2))])


def config_record(config: RunConfig) -> Record:
    """Return the config of a run for a record that may be published."""
    values = config.to_dict()
    return {
        "model": values["model"],
        "data": {"dataset": config.data.dataset},  # local paths stay private
        "optim": values["optim"],
        "train": values["train"],
        "parallel": values["parallel"],
    }


def trainer_and_batches(config: RunConfig) -> tuple[Trainer, TrainingBatches]:
    """Return what the training steps of a run need, without creating a run folder."""
    device = find_device(config.train.device)
    config = choose_accumulation(config, World(device=str(device)))
    torch.manual_seed(config.train.seed)
    corpus = prepare(config.data, config.model.vocab_size)
    # As `tvq train` does: the data of 257 tokens also fits a model that was given 256.
    config = replace(config, model=replace(config.model, vocab_size=corpus.vocab_size))
    return Trainer(TransformerVQ(config.model), config, device), training_batches(config, corpus)


def log_lengths(axes: Any, lengths: Sequence[int], label: str) -> None:
    """Use a logarithmic x axis with a tick at every length that was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [thousands(n) for n in lengths])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(label)


def log_values(axes: Any) -> None:
    """Use a logarithmic y axis with plain numbers; a wide range has fewer ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if 0 < high < 2 * low:  # a narrow axis would exaggerate small differences
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(2), middle * math.sqrt(2)
        axes.set_ylim(low, high)
    if high / low > 300:
        digits: tuple[float, ...] = (1.0,)
    else:
        digits = (1.0, 2.0, 5.0) if high / low > 12 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axes.yaxis.set_major_locator(LogLocator(subs=digits))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(thousands)


@contextmanager
def new_figure(
    path: Path, rows: int = 1, columns: int = 1, height: float = 3.4
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure and its axes, then move labels at line ends apart and write it to a file."""
    with plots.new_figure(path, rows, columns, height) as (figure, axes):
        yield figure, axes
        figure.draw_without_rendering()  # the layout, which label positions depend on
        for panel in axes:
            _spread_labels(figure, panel)


def label_end(
    axes: Any, line: tuple[Sequence[float], Sequence[float]], text: str, color: str
) -> None:
    """Write the name of a line to the right of its last point; nearby labels are moved apart."""
    xs, ys = line
    if math.isfinite(ys[-1]):
        style = {"va": "center", "color": color, "linespacing": 1.25, "annotation_clip": False}
        offset = {"xytext": (10, 0), "textcoords": "offset points"}
        axes.annotate(text, (xs[-1], ys[-1]), gid=END_LABEL, **offset, **style)


def _spread_labels(figure: Any, axes: Any) -> None:
    """Move end labels apart vertically where they overlap, and below the top of the axes."""
    labels = [text for text in axes.texts if text.get_gid() == END_LABEL]
    labels.sort(key=lambda label: label.get_window_extent().y0)
    boxes = [label.get_window_extent() for label in labels]
    frame = axes.get_window_extent()
    bottoms, free = [], frame.y0
    for box in boxes:
        bottoms.append(max(box.y0, free))
        free = bottoms[-1] + box.height
    free = frame.y1
    for i in reversed(range(len(labels))):
        bottoms[i] = min(bottoms[i], free - boxes[i].height)
        free = bottoms[i]
        x, y = labels[i].get_position()
        labels[i].set_position((x, y + (bottoms[i] - boxes[i].y0) * 72 / figure.dpi))
