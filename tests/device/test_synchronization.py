"""The host never waits for the GPU in training, evaluation, prefill and decoding.

No GPU is needed. Each scenario runs in a forked child on a fake device (`fake_device.py`), which
records what would make the host wait: reading a value, and copies that are not queued. It also
fails where tensors of two devices meet, or a shape depends on values. The device cannot show waits
inside CUDA libraries, races between copies and kernels, or anything about speed; nor does it cover
several processes and the adapters for transformers.
"""

import sys

import numpy as np
import pytest
import torch._dynamo  # noqa: F401  takes every child seconds otherwise
from forked import run_forked

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
from transformer_vq.training.step import Trainer

MODEL = {"vocab_size": 32, "d_model": 16, "n_layer": 1, "d_k": 8, "n_code": 8, "block_len": 8}
DROPOUT = {"p_dropsin": 0.1, "p_dropres": 0.1, "p_droplyr": 0.1}
FULL = {"attention": "full"}


def text(*documents, n=56):
    """Return a split of n tokens with documents that start at these places."""
    tokens = np.arange(n, dtype=np.uint8) % MODEL["vocab_size"]
    return Split(tokens, np.array([0, *documents]), 0, SplitSize(n, len(documents) + 1, n, n))


def new_model(device, **changes):
    with device:
        return TransformerVQ(ModelConfig(**MODEL | changes))


def training(device, model=None, optim=None, train=None, documents=(), n_steps=1):
    """Take steps: the first span of some sequences, and the second with carried states.

    The second of two sequences is incomplete.
    """
    model = DROPOUT | (model or {})
    options = {"batch_size": 4, "seq_len": 32, "backprop_len": 16, "steps": 2} | (train or {})
    config = RunConfig(
        ModelConfig(**MODEL | model),
        DataConfig(),
        OptimConfig(**optim or {}),
        TrainConfig(**options),
    )
    batches = TrainingBatches(text(*documents), 4, 32, 16)
    trainer = Trainer(new_model(device, **model), config, device)
    for step in range(n_steps):
        result = trainer.step(batches[step], step, batches.starts_sequences(step))
    return trainer, result


def logging(device):
    """Read what a logged step reads."""
    trainer, result = training(device)
    health = loop._health(result)
    trainer.check_finite()
    loop._mean_health(health)


def evaluation(device, split, protocol="windowed"):
    score(new_model(device), split, protocol, seq_len=32, span=16, batch_size=2)


def decoding(device, rules=None, **model):
    """Run prompts of different lengths, and decode more tokens than one chunk of random numbers."""
    built = new_model(device, **model)
    context = prefill(built, [[1] * 12, [2] * 7])
    sys.modules["transformer_vq.generation.decode"].CHUNK = 2
    list(stream(built, context, 3, rules or Sampling(temperature=0), seed=0, stop_tokens=[5]))


def serving(device):
    """Generate two texts with different rules; the second one joins later."""
    model = new_model(device, vocab_size=256)
    engine = Engine(model, ByteTokenizer(), PrefixStore(10**6), n_slots=3)
    rules = (Sampling(temperature=0.9), Sampling(temperature=0.7, top_p=0.9, top_k=4))
    for rule in rules:
        engine.submit(Request([0, 1, 2], max_new_tokens=3, sampling=rule), lambda _: None)
        engine.run_once()
    while engine.run_once():
        pass
    assert engine.metrics.total("generated_tokens") == 6


def reading_layer(device):
    """Train with a layer that reads a value."""
    norm = layers.rms_norm
    attention = sys.modules["transformer_vq.nn.attention"]
    attention.rms_norm = lambda x: norm(x) * (1.0 + 0.0 * x.mean().item())
    training(device)


# Allowed waits, each with its reason. Training steps have none.
LOGGING = {
    "training/step.py:check_finite, read",  # a logged step reads the losses since the last one
    "device.py:tolist, event",  # codebook health, queued before the losses: no second wait
}
EVALUATION = {"evaluation.py:score, read"}  # the totals, once at the end
DECODING = {"device.py:tolist, event"}  # the tokens of a step; the next step is running already
# Once at the start: contexts name their model.
SERVING = DECODING | {"files.py:tensors_digest, copy to the host"}
OTHER_TRAINING = {
    "model": {"head_type": "mqa", "absolute_positions": True, "tie_embeddings": True},
    "optim": {"optimizer": "adafactor"},
    "train": {"accumulate": 2, "weight_average": 0.9, "checkpoint_activations": True},
}
SCENARIOS = {
    "train with AdamW, padding": (lambda x: training(x, n_steps=2), set()),
    "train with Adafactor, documents, accumulation, checkpointing, MQA": (
        lambda x: training(x, **OTHER_TRAINING, documents=(10, 41)),
        set(),
    ),
    "train full attention, documents": (lambda x: training(x, FULL, documents=(10, 41)), set()),
    "log a step": (logging, LOGGING),
    "evaluate windows": (lambda x: evaluation(x, text(10, 41)), EVALUATION),
    "evaluate streams": (lambda x: evaluation(x, text(24, n=40), "streaming"), EVALUATION),
    "decode": (decoding, DECODING),
    "decode full attention": (lambda x: decoding(x, **FULL), DECODING),
    "sample": (lambda x: decoding(x, Sampling(temperature=0.9, top_p=0.9, top_k=4)), DECODING),
    "serve": (serving, SERVING),
}


def check_waits(scenario, check):
    """Run a scenario on the fake device, in a child; `check` takes the number of each wait."""

    def child():
        from fake_device import DEVICE, FakeDevice

        TransformerVQ.to = lambda self, *args, **kwargs: self  # fake parameters cannot be moved
        with FakeDevice() as device:
            scenario(DEVICE)
        assert check(device.waits), device.waits

    ended = run_forked(child)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_host_waits_only_where_it_is_allowed_to(name):
    scenario, allowed = SCENARIOS[name]
    check_waits(scenario, lambda waits: set(waits) <= allowed)


def test_a_wait_per_decoded_token_is_the_only_one():
    check_waits(decoding, lambda waits: waits == {"device.py:tolist, event": 3})


def test_reading_a_value_in_a_layer_is_detected():
    check_waits(reading_layer, lambda waits: waits["nn/attention.py:norm, read"] > 0)
