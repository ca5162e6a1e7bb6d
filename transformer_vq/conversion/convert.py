"""Write a pretrained model as a run folder, with full attention or with calibrated codebooks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from transformer_vq.config import (
    AttentionType,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from transformer_vq.conversion.calibrate import calibrate
from transformer_vq.conversion.sources import Source, model_config, open_source
from transformer_vq.conversion.tokenizer import generation_settings, source_tokenizer
from transformer_vq.data.tokenizers import ByteTokenizer, Tokenizer
from transformer_vq.errors import UserError
from transformer_vq.files import atomic_folder, write_json
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import Reporter, progress_bar, reporting, warn
from transformer_vq.training.checkpoint import write_config
from transformer_vq.training.loading import GENERATION
from transformer_vq.training.packaged import ABOUT
from transformer_vq.training.run_list import BEST, MODEL

MAX_SEQ_LEN = 8192  # of the run, for evaluation and fine-tuning


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    attention: AttentionType = "vq",
    *,
    block_len: int = 1024,
    far_position: int | None = None,
    n_code: int = 1024,
    n_sink: int = 8,
    n_exact: int = 256,
    texts: str | os.PathLike[str] | tuple[str, ...] = (),
    n_tokens: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    reporter: Reporter | None = None,
) -> Path:
    """Convert a model of a Llama family to a run folder, which is written atomically; return it.

    source: a folder of Hugging Face, a GGUF file, `smollm2`, or the name of a model on the Hub.
    attention: "full" computes the same function; "vq" quantizes keys more than block_len tokens
    ago, with codebooks that are calibrated on `texts`. The sizes are those of `ModelConfig`.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder")
    sizes: dict[str, Any] = {}
    if attention == "vq":
        sizes = {"block_len": block_len, "far_position": far_position, "n_code": n_code}
        sizes |= {"n_sink": n_sink, "n_exact": n_exact}
    with reporting(reporter):
        opened = open_source(source)
        config = model_config(opened, attention=attention, **sizes)
        settings = generation_settings(opened)
        tokenizer = source_tokenizer(opened, settings["eos_token_id"]) or _bytes(opened, attention)
        model = load_model(opened, config).to(device).eval()
        about: dict[str, Any] = {
            "source": opened.name,
            "license": opened.license,
            "attention": attention,
        }
        if attention == "vq":
            paths = (os.fspath(texts),) if isinstance(texts, str | os.PathLike) else tuple(texts)
            found = calibrate(model, tokenizer, paths, n_tokens=n_tokens, seed=seed)
            names = [Path(x).name for x in found["texts"]]  # folders can contain private names
            about["calibration"] = found | {"texts": names}
        with atomic_folder(folder) as partial:
            (partial / BEST).mkdir()
            model.save(partial / BEST / MODEL)
            write_json(partial / GENERATION, settings)
            write_json(partial / ABOUT, about)
            for path in opened.legal_files:
                shutil.copyfile(path, partial / path.name)
            write_config(partial, _run_config(opened, config, tokenizer, folder), tokenizer)
    return folder


def load_model(source: Source, config: ModelConfig) -> TransformerVQ:
    """Return a model with the weights of a source in float32; codebooks are not set."""
    model = TransformerVQ(config)
    parameters = dict(model.named_parameters())
    wanted = {name: tuple(x.shape) for name, x in parameters.items()}
    with progress_bar("weights", len(wanted), "tensors") as advance, torch.no_grad():
        for name, x in source.tensors(wanted):
            parameters[name].copy_(x)
            advance(1)
    return model


def _bytes(source: Source, attention: AttentionType) -> Tokenizer:
    """Return the tokenizer of a source that has no vocabulary file."""
    size = source.config["vocab_size"]
    if size not in (256, 257):
        problem = f"{source.name} has no tokenizer"
        if attention == "vq":
            raise UserError(f"{problem}, which calibration needs; copy its tokenizer.json as well")
        warn(f"{problem}; the run has weights only, in {BEST}/{MODEL}")
    return ByteTokenizer(size == 257)


def _run_config(
    source: Source, config: ModelConfig, tokenizer: Tokenizer, folder: Path
) -> RunConfig:
    """Return a config to evaluate the model and to fine-tune it."""
    length = min(source.config["max_position_embeddings"], MAX_SEQ_LEN)
    span = min(length, 2048)
    length -= length % span
    file = None
    if tokenizer.sha256 is not None:
        file = str(folder.absolute() / tokenizer.file_name)
    data = DataConfig(tokenizer=file, end_of_document=tokenizer.eod is not None)
    train = TrainConfig(steps=1000, batch_size=1, seq_len=length, backprop_len=span)
    return RunConfig(config, data, OptimConfig(lr=1e-5, warmup=100, grad_clip=1.0), train)
