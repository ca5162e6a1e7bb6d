"""tvq sample: generate text or images with a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from transformer_vq.checks import Range
from transformer_vq.cli.arguments import Checkpoint, Device, Json, Matmul, Overwrite, Run, parse
from transformer_vq.cli.output import computing, print_json
from transformer_vq.config import Rows, Seed
from transformer_vq.errors import UserError
from transformer_vq.generation import NEW_TOKENS

if TYPE_CHECKING:
    from transformer_vq.data.tokenizers import Tokenizer
    from transformer_vq.generation.sampling import Sampling
    from transformer_vq.nn.model import TransformerVQ

# Options that apply to only one kind of run.
TEXT_ONLY = ("prompt", "prompt_file", "tokens", "stop", "stop_at_end", "save_state", "load_state")
IMAGES_ONLY = ("images", "keep", "out")


@dataclass(frozen=True)
class SampleOptions:
    """Generate text, printed as it is decoded, or images, written to a PNG file."""

    run: Run
    """Run folder, or books, the model in the package."""
    prompt: str | None = None
    """Text to continue; if omitted, a new document is started."""
    prompt_file: Path | None = None
    """File with the text to continue; - reads standard input. It may have any length: memory use is
    constant."""
    tokens: Annotated[int, Range(0, 2**40)] = NEW_TOKENS
    """Maximum number of tokens to generate."""
    temperature: float | None = None
    """Softmax temperature; below 1 favors likely tokens, 0 always chooses the most likely one. None
    uses that of a converted model, else 1."""
    top_p: float | None = None
    """Nucleus sampling: keep the most likely tokens that together reach this probability. None uses
    that of a converted model, else 0.95."""
    top_k: int | None = None
    """Sample from the k most likely tokens only. None uses that of a converted model, else all."""
    seed: Seed | None = None
    """Random seed; the same seed gives the same samples."""
    batch: Rows = 1
    """Number of samples."""
    stop: tuple[str, ...] = ()
    """End a sample where one of these strings occurs."""
    stop_at_end: bool = True
    """End a sample where the model ends the document."""
    save_state: Path | None = None
    """Save the state after the prompt to this file."""
    load_state: Path | None = None
    """Continue from a file written by --save-state; a prompt is appended to it."""
    images: tuple[Path, ...] = ()
    """Image runs: complete the lower part of these images."""
    keep: float = 0.5
    """Image runs: fraction of the given images to keep, from the top."""
    out: Path | None = None
    """Image runs: PNG file to write. None writes RUN/samples.png and replaces an older one."""
    overwrite: Overwrite = False
    checkpoint: Checkpoint = "best"
    compile: bool = False
    """Compile the decoder: takes about 30 seconds and needs a C++ compiler; then faster."""
    precision: Matmul = "fp32"
    device: Device = "auto"
    json: Json = False


def run(arguments: list[str]) -> None:
    """Generate text or images, depending on the data of the run."""
    options = parse(SampleOptions, arguments, "sample")
    if options.prompt is not None and options.prompt_file is not None:
        raise UserError("give --prompt or --prompt-file, not both")

    from transformer_vq.device import find_device, matmul_precision
    from transformer_vq.files import check_can_write
    from transformer_vq.training.checkpoint import load_model, read_config, read_tokenizer
    from transformer_vq.training.loading import read_sampling
    from transformer_vq.training.packaged import find_run

    check_can_write("--out", options.out, options.overwrite)
    check_can_write("--save-state", options.save_state, options.overwrite)
    folder = find_run(options.run)
    sampling = read_sampling(folder).override(options.temperature, options.top_p, options.top_k)
    has_images = read_config(folder).data.has_images
    for name in TEXT_ONLY if has_images else IMAGES_ONLY:
        if getattr(options, name) != getattr(SampleOptions, name):
            kind = "image" if has_images else "text"
            raise UserError(f"--{name.replace('_', '-')} does not apply to {kind} runs")
    device = find_device(options.device)
    with computing("reduce --batch"), matmul_precision(device, options.precision):
        model, _ = load_model(folder, options.checkpoint)
        model.to(device)
        tokenizer = read_tokenizer(folder)
        if has_images:
            record = _sample_images(options, folder, model, tokenizer.bos, sampling)
        else:
            record = _sample_text(options, model, tokenizer, sampling)
    print_json({"run": options.run, **record}, options.json)


def _sample_images(
    options: SampleOptions, folder: Path, model: TransformerVQ, bos: int, sampling: Sampling
) -> dict[str, Any]:
    """Write a PNG file with the samples."""
    from transformer_vq.generation.text import sample_images, save_grid

    out = folder / "samples.png" if options.out is None else options.out
    images = sample_images(
        model,
        bos,
        sampling,
        n=options.batch,
        images=options.images,
        keep=options.keep,
        seed=options.seed,
        compiled=options.compile,
    )
    save_grid(images, out)
    print(out)
    return {"image": str(out)}


def _sample_text(
    options: SampleOptions, model: TransformerVQ, tokenizer: Tokenizer, sampling: Sampling
) -> dict[str, Any]:
    """Prefill the prompt and generate; a single sample is printed while it is decoded."""
    from transformer_vq.generation.snapshot import load_context, save_context
    from transformer_vq.generation.text import prefill_text, sample_text

    prompt = shown = options.prompt or ""
    if options.prompt_file is not None:
        is_stdin = str(options.prompt_file) == "-"
        with open(0 if is_stdin else options.prompt_file, "rb") as file:
            prompt = file.read().decode(errors="surrogateescape")
    context = None if options.load_state is None else load_context(options.load_state, model)
    context = prefill_text(model, tokenizer, prompt, context)
    if options.save_state is not None:
        save_context(options.save_state, model, context)
    is_single = options.batch == 1
    write: Any = partial(print, end="", flush=True) if is_single else lambda text: None
    write(shown)
    samples = sample_text(
        model,
        tokenizer,
        context.repeat(options.batch),
        options.tokens,
        sampling,
        seed=options.seed,
        stop=options.stop,
        stop_at_end=options.stop_at_end,
        compiled=options.compile,
        write=write,
    )
    if is_single:
        print()
    else:
        for number, sample in enumerate(samples, start=1):
            print(f"--- {number} ---\n{shown}{sample.text}")
    return {"texts": [x.text for x in samples], "ended": [x.ended for x in samples]}
