"""One training step: accumulation, clipping, codebooks, carried states."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_run

from transformer_vq import TransformerVQ
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.prepare import prepare
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.training.optim import learning_rate, make_optimizer
from transformer_vq.training.step import Trainer

CPU = torch.device("cpu")
NO_DROPOUT = {"p_dropsin": 0.0, "p_dropres": 0.0, "p_droplyr": 0.0, "revive_below": 0.0}


def make(tmp_path, dtype=torch.float64, **changes):
    config = tiny_run(tmp_path, **changes)
    torch.manual_seed(1)
    model = TransformerVQ(config.model).to(dtype)
    corpus = prepare(config.data)
    train = config.train
    batches = TrainingBatches(
        corpus.split("train"), train.batch_size, train.seq_len, train.backprop_len
    )
    return Trainer(model, config, CPU), batches


def run(trainer, batches, steps):
    return [trainer.step(batches[i], i, batches.starts_sequences(i)) for i in steps]


def test_step_equals_a_step_written_by_hand(tmp_path):
    trainer, batches = make(tmp_path, model=NO_DROPOUT, optim={"grad_clip": 0.05, "warmup": 0})
    config = trainer.config
    torch.manual_seed(1)
    model = TransformerVQ(config.model).double()
    optimizer = make_optimizer(dict(model.named_parameters()), config.optim)
    batch = batches[0]
    output = model(batch.tokens, document_ids=batch.document_ids)
    nats = F.cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten())
    (nats + config.model.commit_coef * output.commit_loss).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm > config.optim.grad_clip
    for p in model.parameters():
        p.grad *= config.optim.grad_clip / (norm + 1e-6)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config.optim, 0, config.train.steps)
    optimizer.step()
    model.update_codebooks(output.code_usage)

    result = trainer.step(batch, 0, begins=True)
    assert result.nats_per_token == pytest.approx(float(nats.detach()), rel=1e-12)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-12)
    for (name, got), want in zip(
        trainer.model.state_dict().items(), model.state_dict().values(), strict=True
    ):
        if got.is_floating_point():
            assert_close(name, got, want, 1e-12)


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_micro_batches_equal_the_full_batch(tmp_path, attention):
    changed = NO_DROPOUT | {"attention": attention}
    full, batches = make(tmp_path, model=changed)
    parts, _ = make(tmp_path, model=changed, train={"accumulate": 4})
    for a, b in zip(run(full, batches, range(5)), run(parts, batches, range(5)), strict=True):
        assert a.nats_per_token == pytest.approx(b.nats_per_token, rel=1e-12)
        assert a.commit_loss == pytest.approx(b.commit_loss, rel=1e-12)
        assert a.tokens == b.tokens
    for name, x in full.model.state_dict().items():
        if x.is_floating_point():
            assert_close(name, parts.model.state_dict()[name], x, 1e-12)


def test_micro_batches_are_weighted_by_their_valid_targets(tmp_path):
    full, batches = make(tmp_path, model=NO_DROPOUT)
    parts, _ = make(tmp_path, model=NO_DROPOUT, train={"accumulate": 2})
    batch = batches[0]
    valid = torch.ones_like(batch.tokens, dtype=torch.bool)
    valid[0, 3:] = False
    valid[3, 1:] = False
    batch = replace(batch, valid=valid)
    a, b = full.step(batch, 0, begins=True), parts.step(batch, 0, begins=True)
    assert a.tokens == b.tokens == int(valid.sum())
    assert a.nats_per_token == pytest.approx(b.nats_per_token, rel=1e-12)
    assert a.commit_loss == pytest.approx(b.commit_loss, rel=1e-12)
    for (name, p), q in zip(full.model.named_parameters(), parts.model.parameters(), strict=True):
        assert_close(name, q.grad, p.grad, 1e-12)


def test_states_are_carried_within_a_sequence_and_reset_at_its_start(tmp_path):
    trainer, batches = make(tmp_path, model=NO_DROPOUT, train={"accumulate": 2})
    positions = []
    for i in range(4):
        begins, ends = batches.starts_sequences(i), batches.starts_sequences(i + 1)
        trainer.step(batches[i], i, begins, ends)
        positions.append([int(states.position.max()) for states in trainer.carried])
        assert any(name.startswith("state") for name in trainer.tensors()) == (not ends)
        layers = [layer for states in trainer.carried for layer in states.layers]
        assert not any(layer.v.requires_grad for layer in layers)
    assert positions[0] == positions[3] == [16, 16]
    assert max(positions[1]) > 16
    assert positions[2] == []  # dropped at the end of the sequences


def test_activation_checkpointing_does_not_change_losses(tmp_path):
    plain, batches = make(tmp_path, torch.float32)
    checkpointed, _ = make(tmp_path, torch.float32, train={"checkpoint_activations": True})
    torch.manual_seed(5)
    a = run(plain, batches, range(4))
    torch.manual_seed(5)
    b = run(checkpointed, batches, range(4))
    assert [r.nats_per_token for r in a] == [r.nats_per_token for r in b]


def test_bf16_losses_stay_close_to_fp32(tmp_path):
    fp32, batches = make(tmp_path, torch.float32, model=NO_DROPOUT)
    bf16, _ = make(tmp_path, torch.float32, model=NO_DROPOUT, train={"precision": "bf16"})
    for a, b in zip(run(fp32, batches, range(4)), run(bf16, batches, range(4)), strict=True):
        assert a.nats_per_token == pytest.approx(b.nats_per_token, rel=2e-2)
        assert a.nats_per_token != b.nats_per_token
    assert all(p.dtype == torch.float32 for p in bf16.model.parameters())


def test_step_with_a_loss_that_is_not_finite_changes_no_weights(tmp_path):
    trainer, batches = make(tmp_path, torch.float32)
    with torch.no_grad():
        trainer.model.head.bias[0] = float("nan")
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    with pytest.raises(NotFiniteError):
        trainer.step(batches[0], 0, begins=True)
    for name, x in trainer.model.state_dict().items():
        assert torch.equal(x.nan_to_num(7.0), before[name].nan_to_num(7.0)), name
