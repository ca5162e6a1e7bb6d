"""Speed: tiny measurements in this process, and failures as rows."""

from dataclasses import replace

import pytest
import torch

from transformer_vq.bench.records import Failure
from transformer_vq.config import ModelConfig
from transformer_vq.doctor import speed

CPU = torch.device("cpu")
SMALL = {"d_model": 8, "n_layer": 1, "d_k": 4, "n_code": 4, "block_len": 4}


def here(measure, *arguments, **limits):
    return measure(*arguments)


@pytest.fixture
def cell():
    cells = speed.plan(CPU).cells
    return replace(cells[0], seq_len=16, batch_size=2, device="cpu", steps=1, **SMALL)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_compares_vq_with_sdpa_at_several_lengths(device):
    plan = speed.plan(torch.device(device))
    kinds = {(cell.kind, cell.seq_len) for cell in plan.cells}
    assert {kind for kind, _ in kinds} == {"auto", "sdpa"}
    assert len({n for _, n in kinds}) >= 2
    assert len({cell.seq_len * cell.batch_size for cell in plan.cells}) == 1
    assert all(cell.flops > 0 and cell.precision == plan.precision for cell in plan.cells)


def test_training_speed_is_a_share_of_the_rate(monkeypatch, cell):
    monkeypatch.setattr(speed, "in_subprocess", here)
    found = speed.training_speed(cell, 1e9)
    assert found.tokens_per_second > 0
    assert found.peak_gb > 0
    assert found.share == pytest.approx(found.tokens_per_second * cell.flops_per_token / 1e9)
    assert speed.training_speed(cell, None).share is None


def test_decoding_speed_is_measured(monkeypatch):
    monkeypatch.setattr(speed, "in_subprocess", here)
    monkeypatch.setattr(speed, "CONTEXT", 8)
    monkeypatch.setattr(speed.decode, "ROUNDS", 1)
    monkeypatch.setattr(speed.decode, "MAX_STEPS", 1)
    monkeypatch.setattr(speed.decode, "bandwidth_probe", lambda _: lambda: 1e9)
    found = speed.decoding_speed(ModelConfig(17, **SMALL), 2, CPU)
    assert found.tokens_per_second > 0
    assert found.share > 0


def test_out_of_memory_is_a_row(monkeypatch, cell):
    monkeypatch.setattr(speed, "in_subprocess", lambda *_, **__: Failure(failed="out of memory"))
    assert speed.training_speed(cell, 1e9).failed == "out of memory"
    assert speed.decoding_speed(ModelConfig(17, **SMALL), 1, CPU).failed == "out of memory"
    assert speed.matmul_rate(speed.plan(CPU), CPU) is None


def test_crash_is_a_row(monkeypatch, cell):
    def crash(*_, **__):
        raise OSError("no such device")

    monkeypatch.setattr(speed, "in_subprocess", crash)
    assert "no such device" in speed.training_speed(cell, 1e9).failed
