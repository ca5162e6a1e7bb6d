"""How attention is executed changes neither results nor gradients."""

import pytest
import torch
from helpers import assert_close, tiny_config

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


def results(**overrides):
    """Return all outputs and gradients of two segments of documents, in float64."""
    torch.manual_seed(0)
    config = tiny_config(n_layer=1, p_dropsin=0.0, **overrides)
    model = TransformerVQ(config).double()
    tokens, ids = torch.randint(config.vocab_size, (2, 2, 23)), torch.zeros(2, 23).long()
    ids[:, 9:] = 1
    first = model(tokens[0], document_ids=ids)
    second = model(tokens[1], first.state, document_ids=ids + 1)
    loss = sum(x.logits.square().mean() + x.commit_loss for x in (first, second))
    loss.backward()
    found = {"logits": second.logits, "commit loss": second.commit_loss}
    found |= {f"usage {i}": usage.sum for i, usage in enumerate(second.code_usage)}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("head_type", ["shga", "mqa"])
def test_every_execution_has_the_same_results_and_gradients(head_type, monkeypatch):
    want = results(head_type=head_type)
    for execution in TABLE:
        monkeypatch.setitem(EXECUTIONS, "cpu", execution)
        got = results(head_type=head_type)
        for name, x in want.items():
            assert_close(f"{execution}: {name}", got[name], x)


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_set_execution_rejects_an_unknown_reduction(attention):
    model = TransformerVQ(tiny_config(attention=attention))
    with pytest.raises(UserError, match=r"'typo'.*serial"):
        model.set_execution(reduction="typo")
