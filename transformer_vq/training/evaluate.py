"""Evaluate a model of a run, on its own data or on other data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from transformer_vq.config import DataConfig, ParallelConfig
from transformer_vq.data.paths import SPLITS
from transformer_vq.data.prepare import prepare
from transformer_vq.data.tokenizers import TOKENIZER_FILES
from transformer_vq.errors import UserError
from transformer_vq.evaluation import Evaluation, Protocol, score
from transformer_vq.parallel.world import join_world
from transformer_vq.progress import Reporter, progress_bar, reporting
from transformer_vq.training.checkpoint import load_model, read_config, read_tokenizer
from transformer_vq.training.packaged import find_run, has_no_data
from transformer_vq.training.run_list import model_step


@dataclass(frozen=True)
class RunEvaluation:
    """What was evaluated, and the results by protocol."""

    run: str
    checkpoint: str
    step: int | None
    """Step of the checkpoint; None if it is unknown."""
    dataset: str
    split: str
    seq_len: int
    attention: str
    protocols: dict[Protocol, Evaluation]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        results = {name: result.to_dict() for name, result in self.protocols.items()}
        return vars(self) | {"protocols": results}


def evaluate(
    run: str | os.PathLike[str],
    *,
    data: DataConfig | None = None,
    split: str | None = None,
    protocols: Sequence[Protocol] | None = None,
    checkpoint: str = "best",
    seq_len: int | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    reporter: Reporter | None = None,
) -> RunEvaluation:
    """Evaluate a model of a run folder, or a packaged model by its name.

    data: other data than the run was trained on; they are tokenized with the vocabulary of the run.
    split: train, validation, test, or all documents of the data together. None is test, and all for
    a packaged model, which has no data of its own.
    protocols: "windowed" and "streaming" by default; only "windowed" for full attention, whose cost
    grows with the length. checkpoint: best, last or a step. seq_len, batch_size: those of the run
    by default. max_tokens: score only the start of the split. Under `torchrun` all processes call
    this function: each scores its share of the sequences, `batch_size` at a time.
    """
    name, run = str(run), find_run(run)
    config = read_config(run)
    train = config.train
    if has_no_data(run) and (data is None or data == config.data):
        raise UserError(f"{name} does not contain its training data; give --data.path YOUR-TEXTS")
    split = split or default_split(run)
    model, which = load_model(run, checkpoint, config)
    with reporting(reporter), join_world(ParallelConfig(), str(device)) as world:
        model.to(world.device)
        with world.local_rank_zero_first():
            corpus = prepare(_data_for(run, config.data, data, split), config.model.vocab_size)
        if read_tokenizer(run, config).sha256 != corpus.tokenizer().sha256:
            raise UserError(
                f"these data do not have the vocabulary of {name}; use --data.tokenizer {run}"
            )
        tokens = corpus.split("train" if split == "all" else split)
        if protocols is None:
            both: tuple[Protocol, ...] = ("windowed", "streaming")
            protocols = both[:1] if config.model.attention == "full" else both
        seq_len = train.seq_len if seq_len is None else seq_len
        if batch_size is None:
            batch_size = train.batch_size // max(train.accumulate, 1)
        total = len(tokens) if max_tokens is None else min(len(tokens), max_tokens)
        n_ranks = world.size("data")
        results: dict[Protocol, Evaluation] = {}
        for protocol in protocols:
            with progress_bar(f"{split}, {protocol}", total // n_ranks, "tokens") as advance:
                result = score(
                    model,
                    tokens,
                    protocol,
                    seq_len=seq_len,
                    span=min(train.backprop_len, 2048),
                    batch_size=batch_size * n_ranks,
                    precision=precision,
                    max_tokens=max_tokens,
                    advance=advance,
                    share=(world.rank("data"), n_ranks),
                    total=lambda x: world.sum(x, "data"),
                )
            assert result is not None, "without `stopped` it always finishes"
            results[protocol] = result
    attention = config.model.attention
    step = model_step(run, which)
    return RunEvaluation(name, which, step, corpus.dataset, split, seq_len, attention, results)


def default_split(run: Path) -> str:
    """Return the split to evaluate by default: all files for a model without data, else test."""
    return "all" if has_no_data(run) else "test"


def _data_for(run: Path, own: DataConfig, other: DataConfig | None, split: str) -> DataConfig:
    """Return the data to evaluate on; other data are tokenized as those of the run.

    Fields of `other` that are those of the run count as not given.
    """
    data = own if other is None else other
    if data == own and split != "all":
        return own
    if data.tokenizer in (None, own.tokenizer) and not data.has_images:
        has_file = any((run / name).is_file() for name in TOKENIZER_FILES)
        data = replace(data, tokenizer=str(run) if has_file else "bytes")
    if data.path != own.path:  # the other files of the run do not belong to them
        if data.validation_path == own.validation_path:
            data = replace(data, validation_path=())
        if data.test_path == own.test_path:
            data = replace(data, test_path=())
    data = replace(data, end_of_document=own.end_of_document)
    if split != "all":
        return data
    if data.has_images:
        raise UserError("--split all is for text; choose train, validation or test")
    paths = data.path
    if data.dataset == "pg19" and len(paths) == 1 and Path(paths[0]).is_dir():
        paths = tuple(str(Path(paths[0], name, "*.txt")) for name in SPLITS)
    return replace(
        data,
        dataset="text",
        path=(*paths, *data.validation_path, *data.test_path),
        validation_path=(),
        test_path=(),
        validation_share=0.0,
        test_share=0.0,
    )
