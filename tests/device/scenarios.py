"""Run the package on the fake device, and print what made the host wait as one JSON object.

Each scenario gives {"waits": {"file:function, kind": count}} or {"error": message}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from fake_device import DEVICE, FakeDevice

from transformer_vq.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpus import Split, SplitSize
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.evaluation import score
from transformer_vq.generation.decode import stream
from transformer_vq.generation.prefill import prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.nn import layers
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.serve.engine import Engine
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.requests import Request
from transformer_vq.training import loop
from transformer_vq.training.step import StepResult, Trainer

MODEL = {"vocab_size": 32, "d_model": 16, "n_layer": 1, "d_k": 8, "n_code": 8, "block_len": 8}
DROPOUT = {"p_dropsin": 0.1, "p_dropres": 0.1, "p_droplyr": 0.1}


def text(documents: tuple[int, ...] = (0,), n: int = 64) -> Split:
    """Return a split of n tokens with documents that start at these places."""
    tokens = np.arange(n, dtype=np.uint8) % MODEL["vocab_size"]
    return Split(tokens, np.array(documents), 0, SplitSize(n, len(documents), n, n))


def new_model(**changes: Any) -> TransformerVQ:
    with DEVICE:
        return TransformerVQ(ModelConfig(**MODEL | changes))


def training(
    model: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    split: Split | None = None,
    n_steps: int = 2,
) -> tuple[Trainer, StepResult]:
    """Take steps: the first span of some sequences, and the second with carried states."""
    options = {"batch_size": 4, "seq_len": 32, "backprop_len": 16, "steps": 2} | (train or {})
    config = RunConfig(
        ModelConfig(**MODEL | DROPOUT | (model or {})),
        DataConfig(),
        OptimConfig(**optim or {}),
        TrainConfig(**options),
    )
    sizes = (config.train.batch_size, config.train.seq_len, config.train.backprop_len)
    batches = TrainingBatches(split or text(), *sizes)
    trainer = Trainer(new_model(**DROPOUT | (model or {})), config, DEVICE)
    for step in range(n_steps):
        result = trainer.step(batches[step], step, batches.starts_sequences(step))
    return trainer, result


def logging() -> None:
    """Read what a logged step reads."""
    trainer, result = training(n_steps=1)
    health = loop._health(result)
    trainer.check_finite()
    loop._mean_health(health)


def evaluation(split: Split, protocol: Any = "windowed", **model: Any) -> None:
    score(new_model(**model), split, protocol, seq_len=32, span=16, batch_size=2)


def decoding(rules: Sampling | None = None, **model: Any) -> None:
    """Run prompts of different lengths, and decode more tokens than one chunk of random numbers."""
    built = new_model(**model)
    context = prefill(built, [[1] * 12, [2] * 7])
    with replaced(sys.modules["transformer_vq.generation.decode"], "CHUNK", 2):
        list(stream(built, context, 3, rules or Sampling(temperature=0), seed=0, stop_tokens=[5]))


def serving() -> None:
    """Generate two texts with different rules; the second one joins later."""
    model = new_model(vocab_size=256)
    engine = Engine(model, ByteTokenizer(), PrefixStore(10**6), n_slots=3)
    rules = (Sampling(temperature=0.9), Sampling(temperature=0.7, top_p=0.9, top_k=4))
    for rule in rules:
        engine.submit(Request([0, 1, 2], max_new_tokens=3, sampling=rule), lambda _: None)
        engine.run_once()
    while engine.run_once():
        pass
    assert engine.metrics.total("generated_tokens") == 6


@contextmanager
def replaced(place: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, function)
    try:
        yield
    finally:
        setattr(place, name, before)


def reading_layer() -> Any:
    """Make a layer read a value."""
    norm = layers.rms_norm

    def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
        return norm(x, eps) * (1.0 + 0.0 * x.mean().item())

    return replaced(layers, "rms_norm", rms_norm)


PADDED = text(n=56)  # the second of two sequences is incomplete
DOCUMENTS = text((0, 10, 41), n=56)
FULL = {"attention": "full"}

SCENARIOS: dict[str, Callable[[], object]] = {
    "train with AdamW, padding": lambda: training(split=PADDED),
    "train with Adafactor, documents, accumulation, checkpointing, MQA": lambda: training(
        {"head_type": "mqa", "absolute_positions": True, "tie_embeddings": True},
        {"optimizer": "adafactor"},
        {"accumulate": 2, "weight_average": 0.9, "checkpoint_activations": True},
        DOCUMENTS,
        n_steps=1,
    ),
    "train full attention, documents": lambda: training(FULL, split=DOCUMENTS, n_steps=1),
    "log a step": logging,
    "evaluate windows": lambda: evaluation(DOCUMENTS),
    "evaluate streams": lambda: evaluation(text((0, 24), n=40), "streaming"),
    "decode": decoding,
    "decode full attention": lambda: decoding(**FULL),
    "sample": lambda: decoding(Sampling(temperature=0.9, top_p=0.9, top_k=4)),
    "serve": serving,
}


def outcome(scenario: Callable[[], object], sabotage: Any) -> dict[str, Any]:
    with FakeDevice() as device, sabotage:
        try:
            scenario()
        except Exception as error:
            message = str(error).partition("\n")[0]
            return {"error": f"{type(error).__name__}: {message}", "waits": {}}
    return {"waits": {f"{place}, {kind}": n for (place, kind), n in device.waits.items()}}


def main() -> None:
    TransformerVQ.to = lambda self, *args, **kwargs: self  # fake parameters cannot be moved
    results = {name: outcome(run, nullcontext()) for name, run in SCENARIOS.items()}
    results["item in a layer"] = outcome(lambda: training(n_steps=1), reading_layer())
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
