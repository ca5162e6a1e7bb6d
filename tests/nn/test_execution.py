"""How attention is executed changes neither results nor gradients."""

import pytest
from helpers import assert_close, tiny_config, training_results

from transformer_vq import TransformerVQ, UserError
from transformer_vq.ops.runtime import EXECUTIONS, OTHER, Execution

# One, two and three blocks per segment at batch size 2, and tiles of several sizes.
SCORES = 2 * 4 * (7 + 2 * 4)
TABLE = [
    *EXECUTIONS.values(),
    OTHER,
    Execution(1, 1, compile=False),
    Execution(2 * SCORES, 3, compile=True),
    Execution(3 * SCORES, None, compile=False),
]


@pytest.mark.parametrize("head_type", ["shga", "mqa"])
def test_every_execution_has_the_same_results_and_gradients(head_type, monkeypatch):
    want = training_results(head_type=head_type, reduction="serial")
    for execution in TABLE:
        monkeypatch.setitem(EXECUTIONS, "cpu", execution)
        got = training_results(head_type=head_type)
        for name, x in want.items():
            assert_close(f"{execution}: {name}", got[name], x)


@pytest.mark.parametrize("reduction", ["auto", "matmul", "associative", "input_scan"])
def test_every_reduction_has_the_same_results_and_gradients(reduction):
    got = training_results(head_type="mha", reduction=reduction)
    for name, want in training_results(head_type="mha", reduction="serial").items():
        assert_close(name, got[name], want)


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_set_execution_rejects_an_unknown_reduction(attention):
    model = TransformerVQ(tiny_config(attention=attention))
    with pytest.raises(UserError, match=r"'typo'.*serial"):
        model.set_execution(reduction="typo")
