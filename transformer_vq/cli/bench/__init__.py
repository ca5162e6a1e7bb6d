"""tvq bench: one file per benchmark; prints a table, and JSON on request."""

from __future__ import annotations

from importlib import import_module

from transformer_vq.cli.arguments import HELP, UsageError, first_word, nearest
from transformer_vq.cli.bench.ablate import Ablate
from transformer_vq.cli.bench.compare import Compare
from transformer_vq.cli.bench.compress import Compress
from transformer_vq.cli.bench.context import Context
from transformer_vq.cli.bench.decode import Decode
from transformer_vq.cli.bench.demo import Demo
from transformer_vq.cli.bench.documents import Documents
from transformer_vq.cli.bench.first_token import FirstToken
from transformer_vq.cli.bench.kernels import Kernels
from transformer_vq.cli.bench.profile import Profile
from transformer_vq.cli.bench.recall import Recall
from transformer_vq.cli.bench.scaling import Scaling
from transformer_vq.cli.bench.serve import Serve
from transformer_vq.cli.bench.tokenize import Tokenize
from transformer_vq.cli.bench.train import Train
from transformer_vq.cli.bench.variants import Variants

__all__ = [
    "BENCHES",
    "Ablate",
    "Compare",
    "Compress",
    "Context",
    "Decode",
    "Demo",
    "Documents",
    "FirstToken",
    "Kernels",
    "Profile",
    "Recall",
    "Scaling",
    "Serve",
    "Tokenize",
    "Train",
    "Variants",
    "module_of",
    "run",
]

# Name of the benchmark -> summary. `module_of` names the module with its `run` function.
BENCHES: dict[str, str] = {
    "train": "training throughput and memory by sequence length: Tables 6-9",
    "ablate": "loss and step time by codebook size: Tables 1 and 2",
    "variants": "bits per byte of variants, such as VQ and full attention",
    "scaling": "bits per byte by codebook size and model size: power laws",
    "recall": "accuracy of recall by context length, next to Mamba",
    "profile": "time of a training step by part",
    "documents": "cost of packed documents in training",
    "decode": "speed, state size and memory of decoding by context length",
    "serve": "a server under load: errors, memory, tokens/s",
    "first-token": "time to the first token of long documents, through a server",
    "context": "context parallelism: bytes sent, and lengths that fit in memory",
    "kernels": "registers, shared memory and spills of the Triton kernels",
    "tokenize": "throughput and memory of preparing text",
    "compare": "curves and test results of several runs in one record",
    "compress": "bits per byte of runs, n-grams and compressors on the same files",
    "demo": "train `tiny` in minutes, compare it with n-grams, generate text",
}


def run(arguments: list[str]) -> int | None:
    """Run a benchmark; return its exit status."""
    if HELP & set(arguments[:1]):
        print(_overview())
        return None
    names = ", ".join(BENCHES)
    name, rest = first_word(arguments, "bench", "WHAT", f"WHAT is one of {names}")
    if name not in BENCHES:
        raise UsageError(
            f"unknown benchmark {name!r}{nearest(name, BENCHES)}; choose one of {names}"
        )
    status: int | None = import_module(module_of(name)).run(rest)
    return status


def module_of(name: str) -> str:
    """Return the module of a benchmark."""
    return f"{__name__}.{name.replace('-', '_')}"


def _overview() -> str:
    lines = [f"  {name:<11} {summary}" for name, summary in BENCHES.items()]
    return "\n".join(
        [
            "usage: tvq bench WHAT [options]",
            "",
            *lines,
            "",
            "Options of a benchmark: tvq bench WHAT --help",
        ]
    )
