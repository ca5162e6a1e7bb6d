"""The host never waits for the GPU in training, evaluation, prefill and decoding.

No GPU is needed. `scenarios.py` runs the package on a fake device (`fake_device.py`), which records
what would make the host wait: reading a value, and copies that are not queued. It also fails where
tensors of two devices meet, or a shape depends on values. The device cannot show waits
inside CUDA libraries, races between copies and kernels, or anything about speed; nor does it cover
several processes and the adapters for transformers.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).with_name("scenarios.py")
TRAINING = (
    "train with AdamW, padding",
    "train with Adafactor, documents, accumulation, checkpointing, MQA",
    "train full attention, documents",
)
EVALUATION = ("evaluate windows", "evaluate streams")
DECODING = ("decode", "decode full attention", "sample")
# Each allowed wait with its reason. Training steps have none.
LOGGING_WAITS = {
    "training/step.py:check_finite, read": "a logged step reads the losses since the last one",
    "device.py:tolist, event": "codebook health, queued before the losses: no second wait",
}
EVALUATION_WAITS = {"evaluation.py:score, read": "the totals, once at the end"}
DECODING_WAITS = {
    "device.py:tolist, event": "the tokens of a step; the next step is running already",
}
SERVING_WAITS = DECODING_WAITS | {
    "files.py:tensors_digest, copy to the host": "once at the start: contexts name their model",
}


@pytest.fixture(scope="module")
def results():
    """The outcome of each scenario: the device changes PyTorch, so they run in a subprocess."""
    done = subprocess.run([sys.executable, SCENARIOS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("scenario", "allowed"),
    [
        *((scenario, {}) for scenario in TRAINING),
        ("log a step", LOGGING_WAITS),
        *((scenario, EVALUATION_WAITS) for scenario in EVALUATION),
        *((scenario, DECODING_WAITS) for scenario in DECODING),
        ("serve", SERVING_WAITS),
    ],
)
def test_the_host_waits_only_where_it_is_allowed_to(results, scenario, allowed):
    assert "error" not in results[scenario], results[scenario]["error"]
    assert set(results[scenario]["waits"]) <= set(allowed)


def test_a_wait_per_decoded_token_is_the_only_one(results):
    assert results["decode"]["waits"] == {"device.py:tolist, event": 3}


def test_reading_a_value_in_a_layer_is_detected(results):
    assert results["item in a layer"]["waits"]["nn/attention.py:norm, read"] > 0
