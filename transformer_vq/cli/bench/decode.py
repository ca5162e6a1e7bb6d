"""tvq bench decode: tokens per second, state size and memory of decoding by context length."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformer_vq.bench.decode_records import DecodeKind
from transformer_vq.cli.arguments import MAX_ROWS, UsageError, check_range, find_preset
from transformer_vq.cli.bench.common import MAX_TOKENS, Out, parse_with_output, print_result
from transformer_vq.cli.options import Device, Json, Overwrite
from transformer_vq.config import Precision


@dataclass(frozen=True)
class Decode:
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
    state_precisions: tuple[Precision, ...] = ("fp32",)
    """Precisions of the values in the state of vq: fp32, bf16 or both."""
    memory_gb: float = 16.0
    """Memory limit of a measurement."""
    time_limit: float = 1200.0
    """Seconds per measurement, including the prefill; a longer one is stopped and reported as
    failed."""
    device: Device = "auto"
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Measure decoding; print tables."""
    options = parse_with_output(Decode, arguments, "decode")
    for name in ("contexts", "batches", "prefills"):
        numbers: tuple[int, ...] = getattr(options, name)
        if min(numbers, default=1) < 1 or (not numbers and name != "prefills"):
            raise UsageError(f"--{name}: give numbers of at least 1")
        for number in numbers:
            check_range(f"--{name}", number, 1, MAX_ROWS if name == "batches" else MAX_TOKENS)
    sizes = {name: getattr(options, name) for name in ("d_k", "n_code", "block_len")}
    model = replace(
        find_preset(options.preset).model,
        **{name: size for name, size in sizes.items() if size is not None},
    )

    from transformer_vq.bench.decode import run as measure
    from transformer_vq.bench.decode import table
    from transformer_vq.device import find_device

    record = measure(
        model,
        contexts=options.contexts,
        batches=options.batches,
        kinds=options.kinds,
        prefills=options.prefills,
        compiled=options.compile,
        state_precisions=options.state_precisions,
        memory_gb=options.memory_gb,
        time_limit=options.time_limit,
        device=find_device(options.device),
    )
    print_result(record, table(record), options.out, options.json)
