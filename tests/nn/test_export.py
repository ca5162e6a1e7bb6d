"""torch.export captures the forward pass for any batch size and length, and one decoding step."""

import io
from functools import partial

import pytest
import torch
from helpers import assert_close, tiny_model
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

from transformer_vq import UserError, VQAttention, generate
from transformer_vq.generation.export import export_program
from transformer_vq.nn.model import ModelState

SHAPES = [(1, 1), (2, 3), (3, 4), (1, 5), (4, 8), (2, 11), (5, 29), (1, 64)]  # blocks of 4 tokens
BATCH, LENGTH = Dim("batch", min=1), Dim("length", min=1)


slow = partial(pytest.param, marks=pytest.mark.slow)


def random_tokens(b: int, t: int) -> Tensor:
    return torch.randint(17, (b, t), generator=torch.Generator().manual_seed(t))


@pytest.mark.parametrize(
    ("head_type", "options"),
    [
        ("mha", {"attention": "full"}),
        slow("shga", {}),
        slow("gqa", {"reduction": "associative"}),
        slow("mha", {"reduction": "matmul"}),
        slow("mqa", {"reduction": "input_scan", "absolute_positions": True}),
        slow("mqa", {"reduction": "serial", "compressive_cache": False}),
    ],
)
def test_exported_forward_computes_the_same_for_any_batch_size_and_length(head_type, options):
    model = tiny_model(n_layer=1, head_type=head_type, **options).double().eval()
    run = export_program(model, "forward").module()
    for b, t in SHAPES:
        tokens = random_tokens(b, t)
        assert_close(f"logits of {b} x {t}", run(tokens), model(tokens).logits)


@pytest.mark.slow
def test_exported_prefill_continues_from_a_state_at_any_cut():
    model = tiny_model(n_layer=1, head_type="shga").double().eval()
    run = export_program(model, "prefill").module()
    tokens = random_tokens(2, 60)
    want = model(tokens)
    state, start, parts = model.init_state(2).to_tensors(), 0, []
    for n in (1, 3, 4, 2, 7, 8, 13, 22):
        logits, state = run(tokens[:, start : start + n], state)
        start += n
        parts.append(logits)
    assert_close("logits", torch.cat(parts, dim=1), want.logits)
    assert_same_state(ModelState.from_tensors(state), want.state)


@pytest.mark.slow
@pytest.mark.parametrize("head_type", ["shga", "gqa"])
def test_exported_step_decodes_as_generate_does(head_type):
    model = tiny_model(n_layer=1, head_type=head_type).eval()
    step = export_program(model, "decode").module()
    prompt, state, found = [3, 1, 4, 1, 5], model.init_state(1).to_tensors(), []
    for token in prompt:
        logits, state = step(torch.tensor([[token]]), state)
    for _ in range(20):
        found.append(int(logits[0, -1].argmax()))
        logits, state = step(torch.tensor([[found[-1]]]), state)
    assert found == generate(model, prompt, 20, temperature=0)


@pytest.mark.slow
def test_exported_step_accepts_another_batch_size_after_saving():
    model = tiny_model(n_layer=1, head_type="mha").double().eval()
    file = io.BytesIO()
    torch.export.save(export_program(model, "decode"), file)
    file.seek(0)
    step = torch.export.load(file).module()
    tokens = random_tokens(3, 9)
    state = model(tokens[:, :8]).state
    logits, _ = step(tokens[:, 8:], state.to_tensors())
    assert_close("logits", logits, model(tokens).logits[:, 8:])


@pytest.mark.slow
def test_model_exports_with_its_own_state_classes():
    model = tiny_model(n_layer=1, head_type="mqa").double().eval()
    tokens = random_tokens(3, 9)
    state = model(tokens[:, :8]).state.detach()
    shapes = ShapesCollection()
    for x in (tokens, *state.to_tensors().values()):
        shapes[x] = {0: BATCH}
    run = torch.export.export(model, (tokens, state), dynamic_shapes=shapes).module()
    tokens = random_tokens(2, 17)
    output = run(tokens[:, 8:], model(tokens[:, :8]).state)
    assert_close("logits", output.logits, model(tokens).logits[:, 8:])
    assert isinstance(output.state, ModelState)
    assert_same_state(output.state, model(tokens).state)


@pytest.mark.slow
def test_attention_layer_exports_with_padding_and_documents():
    layer = VQAttention(16, head_type="mha", d_k=8, n_code=7, block_len=4).double().eval()

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, valid: Tensor, document_ids: Tensor) -> Tensor:
            return self.layer(x, None, valid, document_ids).y

    def inputs(b: int, t: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(b, t, 16, generator=generator, dtype=torch.float64)
        starts, valid = (torch.rand(b, t, generator=generator) < p for p in (0.2, 0.8))
        return x, valid, starts.cumsum(1)

    axes = {0: BATCH, 1: LENGTH}
    shapes = {"x": axes, "valid": axes, "document_ids": axes}
    run = torch.export.export(Branch(), inputs(2, 11), dynamic_shapes=shapes).module()
    for b, t in SHAPES:
        x, valid, ids = inputs(b, t)
        assert_close(f"{b} x {t}", run(x, valid, ids), layer(x, None, valid, ids).y)


@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_graphs_with_a_state_reject_full_attention(graph):
    with pytest.raises(UserError, match="attention='vq'"):
        export_program(tiny_model(attention="full"), graph)


def assert_same_state(got: ModelState, want: ModelState) -> None:
    got, want = got.to_tensors(), want.to_tensors()
    assert got.keys() == want.keys()
    for name, x in want.items():
        if not x.is_floating_point():
            assert torch.equal(got[name], x), name
        elif name.endswith("mean"):  # arbitrary for unused codes
            used = (want[name.replace("mean", "count")] > 0).unsqueeze(-1)
            assert_close(name, got[name] * used, x * used)
        else:
            assert_close(name, got[name], x)
