"""tvq report: write an HTML page about a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.arguments import RUN_HINT, check_range, first_word, parse
from transformer_vq.cli.options import Overwrite
from transformer_vq.cli.output import out_of_memory_advice

MAX_SAMPLES = 20


@dataclass(frozen=True)
class ReportOptions:
    """Write one self-contained HTML page about a run: curves, evaluations, samples, config."""

    out: Path | None = None
    """HTML file to write. None writes RUN/report.html and replaces an older one; for a model
    in the package, NAME-report.html in the working directory."""
    samples: int = 3
    """Number of texts to generate; 0 generates none. Image runs show RUN/samples.png."""
    prompt: str = ""
    """Text that the samples continue; if omitted, each starts a new document."""
    seed: int = 0
    """Random seed of the samples."""
    overwrite: Overwrite = False


def run(arguments: list[str]) -> None:
    """Write a report and print its path."""
    name, rest = first_word(arguments, "report", "RUN", RUN_HINT, ReportOptions)
    options = parse(ReportOptions, rest, f"report {name}")
    check_range("--samples", options.samples, 0, MAX_SAMPLES)
    check_range("--seed", options.seed, 0, 2**63 - 1)

    from transformer_vq.files import check_can_write
    from transformer_vq.training.packaged import find_run, is_packaged
    from transformer_vq.training.report import write_report

    folder, out = find_run(name), options.out
    if is_packaged(folder) and out is None:
        out = Path(f"{name}-report.html")
    check_can_write("--out", out, options.overwrite)
    with out_of_memory_advice("use --samples 0"):
        path = write_report(
            folder,
            out,
            n_samples=options.samples,
            prompt=options.prompt,
            seed=options.seed,
        )
    print(path)
