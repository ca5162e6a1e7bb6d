"""torch.compile compiles one graph without breaks, in training and in decoding.

The backend "aot_eager" traces forward and backward as the default one does, without a C++ compiler.
"""

import pytest
import torch
from helpers import assert_close, tiny_config, tiny_model

from transformer_vq import TransformerVQ
from transformer_vq.generation.decoder import Decoder


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: TransformerVQ) -> TransformerVQ:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "recomputes"),
    [
        ({"head_type": "shga", "reduction": "auto"}, False),
        ({"head_type": "shga", "reduction": "auto"}, True),
        ({"head_type": "mha", "attention": "full"}, False),
        ({"head_type": "mqa", "reduction": "serial"}, False),
        ({"head_type": "gqa", "reduction": "associative"}, False),
        ({"head_type": "mha", "reduction": "matmul"}, False),
        ({"head_type": "mqa", "reduction": "input_scan"}, False),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_training_compiles_without_graph_breaks_and_computes_the_same(overrides, recomputes):
    model = tiny_model(n_layer=1, checkpoint_activations=recomputes, **overrides)
    x = torch.randint(model.config.vocab_size, (2, 7))  # a block and a part of one
    state = model(x).state.detach()
    results = []
    for run in (model, compiled(model)):
        model.zero_grad()
        output = run(x, state)
        (output.logits.square().mean() + output.commit_loss).backward()
        results.append((output, [p.grad.clone() for p in model.parameters()]))
    (eager, eager_grads), (graph, graph_grads) = results
    assert_close("logits", graph.logits, eager.logits)
    for got, want in zip(graph_grads, eager_grads, strict=True):
        assert_close("gradient", got, want)
    for got, want in zip(graph.code_usage, eager.code_usage, strict=True):
        assert_close("usage", got.sum, want.sum)


@pytest.mark.slow
def test_training_with_every_dropout_compiles_without_graph_breaks():
    dropout = {"p_dropsin": 0.2, "p_dropres": 0.2, "p_droplyr": 0.2}
    model = TransformerVQ(tiny_config(n_layer=1, head_type="mqa", **dropout))
    x = torch.randint(model.config.vocab_size, (2, 7))
    output = compiled(model)(x, model(x).state.detach())
    output.logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("head_type", ["shga", "mha"])
def test_decoding_compiles_once_and_computes_the_same(head_type):
    model = TransformerVQ(tiny_config(n_layer=1, head_type=head_type)).eval()
    x = torch.randint(model.config.vocab_size, (2, 20))
    run = compiled(model)
    with torch.no_grad():
        want = model(x).logits
        state = model(x[:, :8]).state
        for t in range(8, 10):
            state = run(x[:, t : t + 1], state).state
        with torch.compiler.set_stance("fail_on_recompile"):
            for t in range(10, 20):
                output = run(x[:, t : t + 1], state)
                state = output.state
                assert_close("logits", output.logits[:, 0], want[:, t])


@pytest.mark.parametrize("head_type", ["shga", pytest.param("mha", marks=pytest.mark.slow)])
def test_decoding_in_place_compiles_once_and_computes_the_same(head_type):
    model = TransformerVQ(tiny_config(n_layer=1, head_type=head_type)).eval()
    x = torch.randint(model.config.vocab_size, (2, 20))
    decoder = Decoder(model, model(x[:, :8]).state)
    step = torch.compile(decoder.step, fullgraph=True, backend="aot_eager")
    got = [step(x[:, t]) for t in range(8, 10)]
    with torch.compiler.set_stance("fail_on_recompile"):
        got += [step(x[:, t]) for t in range(10, 20)]
    assert_close("logits", torch.stack(got, 1), model(x).logits[:, 8:])


@pytest.mark.slow
def test_ragged_batches_compile_once_for_all_packings():
    """Where documents begin and what is padding are values, not shapes."""
    model = TransformerVQ(tiny_config(n_layer=1, head_type="mha"))
    x = torch.randint(model.config.vocab_size, (2, 7))
    run = compiled(model)
    state = model(x, document_ids=torch.zeros_like(x), valid=x >= 0).state.detach()

    def check(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = (torch.rand(2, 7, generator=generator) < 0.3).cumsum(1)
        valid = torch.rand(2, 7, generator=generator) < 0.8
        model.zero_grad()
        output = run(x, state, valid, ids)
        output.logits[valid].sum().backward()
        assert_close("logits", output.logits, model(x, state, valid, ids).logits)

    check(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(1, 6):
            check(seed)
