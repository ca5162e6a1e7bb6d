"""Codebooks follow any optimizer of the model's parameters, once per optimizer step."""

import copy
import pickle
from unittest.mock import patch

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.hf import CodebookCallback, TransformerVQForCausalLM
from transformer_vq.nn.quantizer import VectorQuantizer

TOKENS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))


def new_model(**overrides) -> TransformerVQForCausalLM:
    core = TransformerVQ(tiny_config(vocab_size=256, **overrides))
    return TransformerVQForCausalLM.from_core(core).train()


def accumulate(model, batch=TOKENS) -> None:
    model(input_ids=batch, labels=batch).loss.backward()


def sums(model) -> list[torch.Tensor]:
    return [m.c_sum.clone() for m in model.modules() if isinstance(m, VectorQuantizer)]


def moved(model, before) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(sums(model), before, strict=True)]


def sgd(parameters, lr=0.1) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr)


@pytest.fixture
def updates():
    """Count the updates of codebooks."""
    update = VectorQuantizer.update_codebook
    with patch.object(VectorQuantizer, "update_codebook", autospec=True, side_effect=update) as x:
        yield x


def test_optimizer_step_updates_each_codebook_once(updates):
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    n_codebooks = len(sums(model))
    for step in range(3):
        accumulate(model)
        accumulate(model)
        assert updates.call_count == step * n_codebooks
        optimizer.step()
        assert updates.call_count == (step + 1) * n_codebooks
        assert model.code_usage is None
    optimizer.step()  # without a training pass
    model.update_codebooks()
    CodebookCallback().on_optimizer_step(None, None, None, model=model, optimizer=optimizer)
    assert updates.call_count == 3 * n_codebooks


def test_code_usage_is_collected_in_training_only():
    model = new_model()
    with torch.no_grad():
        model(TOKENS)
    model.eval()(TOKENS)
    assert model.code_usage is None
    model.train()(TOKENS)
    assert float(model.code_usage[0].count.sum()) == TOKENS.numel()


def test_skipped_step_of_a_gradient_scaler_is_dropped_by_the_callback():
    model = new_model()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    before = sums(model)
    for is_finite in (False, True):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        scaler.scale(loss if is_finite else loss * torch.inf).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.step_was_skipped = scaler.get_scale() < scale  # set by accelerate
        CodebookCallback().on_optimizer_step(None, None, None, model=model, optimizer=optimizer)
        assert moved(model, before) == [is_finite] * len(before)
        assert model.code_usage is None


def test_codebooks_of_frozen_layers_do_not_move():
    model = new_model()
    model.model.branches[:2].requires_grad_(False)
    before = sums(model)
    accumulate(model)
    sgd(model.parameters()).step()
    assert moved(model, before) == [False, False, True, True]


def test_freeze_codebooks_leaves_them_unchanged_without_a_warning(monkeypatch):
    monkeypatch.setattr("transformer_vq.nn.quantizer.MAX_UNUSED", 2)
    model = new_model()
    optimizer = sgd(model.parameters())
    before = sums(model)
    model.freeze_codebooks()
    for _ in range(4):
        accumulate(model)
        optimizer.step()
    assert not any(moved(model, before))
    model.freeze_codebooks(False)
    accumulate(model)
    optimizer.step()
    assert all(moved(model, before))


def test_partly_trained_layers_warn_once_that_codebooks_are_frozen():
    model = new_model()
    for name, p in model.named_parameters():
        p.requires_grad = name.endswith("q_proj.weight")
    with pytest.warns(UserWarning, match="modules_to_save"):
        accumulate(model)
    accumulate(model)
    assert model.code_usage is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_do_not_take_over_code_usage(copied):
    model = new_model()
    accumulate(model)
    other = copied(model)
    assert other.code_usage is None
    assert model.code_usage is not None
    before = sums(model)
    accumulate(other)
    sgd(other.parameters()).step()
    assert all(moved(other, before))
    assert not any(moved(model, before))
    sgd(model.parameters()).step()
    assert all(moved(model, before))
    assert all(torch.equal(a, b) for a, b in zip(sums(model), sums(other), strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_model_and_step_update_codebooks():
    torch._dynamo.reset()
    model = new_model(n_layer=1)
    optimizer, before = sgd(model.parameters()), sums(model)
    compiled = torch.compile(model, backend="eager")
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        compiled(input_ids=TOKENS, labels=TOKENS).loss.backward()
        step()
        assert all(moved(model, before))
        assert model.code_usage is None
        before = sums(model)
