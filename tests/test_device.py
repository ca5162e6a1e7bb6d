"""Device selection, evaluation mode, bf16 detection and compiling."""

import pytest
import torch
from torch import nn

from transformer_vq import device as devices
from transformer_vq.device import (
    compile_decoding,
    compiles_training,
    evaluating,
    find_device,
    has_fast_bf16,
)
from transformer_vq.errors import UserError


def pretend_gpus(monkeypatch, n):
    gpu = torch.device("cuda") if n else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: n)


def test_find_device_selects_a_gpu_if_available(monkeypatch):
    pretend_gpus(monkeypatch, 0)
    assert find_device() == find_device("cpu") == find_device("cpu:0") == torch.device("cpu")
    pretend_gpus(monkeypatch, 2)
    assert find_device() == torch.device("cuda")
    assert find_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    assert find_device("cuda:1") == torch.device("cuda:1")
    assert find_device("cuda") == torch.device("cuda")


@pytest.mark.parametrize("n_gpus", [0, 2])
@pytest.mark.parametrize(
    "name",
    ["", "meta", "cpu:5", "cuda:2", "cuda:-1", "CPU", "cp\nu", "\ud800"],
)
def test_find_device_rejects_unusable_devices(monkeypatch, n_gpus, name):
    pretend_gpus(monkeypatch, n_gpus)
    with pytest.raises(UserError) as raised:
        find_device(name)
    message = str(raised.value)
    assert message.splitlines() == [message]
    assert repr(name) in message
    assert "cpu" in message.split(";")[1]
    assert ("cuda:1" in message.split(";")[1]) == (n_gpus == 2)


def test_find_device_reports_why_a_gpu_does_not_work(monkeypatch):
    def fail(*shape, device):
        raise RuntimeError("no driver\nsecond line")

    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(UserError, match=r"^device 'cuda' .*\(no driver\); use cpu$"):
        find_device("cuda")


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_restores_the_mode_after_an_error(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train(training)

    def use() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not model(torch.ones(2)).requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert all(module.training == training for module in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("found", "fast"), [({"amx_bf16": True}, True), ({"bf16": True}, True), ({"avx2": True}, False)]
)
def test_has_fast_bf16_depends_on_the_cpu(monkeypatch, found, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert has_fast_bf16(torch.device("cpu")) == fast
    assert has_fast_bf16(torch.device("cuda"))


@pytest.mark.parametrize(
    ("triton", "capability", "expected"),
    [(True, (8, 0), True), (True, (7, 0), True), (True, (6, 1), False), (False, (9, 0), False)],
)
def test_training_compiles_by_default_on_gpus_that_support_it(
    monkeypatch, triton, capability, expected
):
    monkeypatch.setattr(devices, "find_spec", lambda name: triton or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compiles_training(None, torch.device("cuda")) == expected
    assert not compiles_training(None, torch.device("cpu"))
    for choice in (True, False):
        for name in ("cpu", "cuda"):
            assert compiles_training(choice, torch.device(name)) == choice


@pytest.mark.parametrize(("name", "mode"), [("cpu", None), ("cuda", "reduce-overhead")])
def test_compiled_decoding_uses_cuda_graphs_on_gpus_only(monkeypatch, name, mode):
    settings, steps = {}, []

    def fake_compile(step, **options):
        settings.update(options)
        return step

    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(name))
    state = torch.zeros(2)
    step = compile_decoding(lambda tokens: tokens + 1, torch.device(name), [state])
    assert step(torch.tensor([1])).item() == 2
    assert settings == {"fullgraph": True} | ({"mode": mode} if mode else {})
    assert len(steps) == int(name == "cuda")
    assert hasattr(state, "_dynamo_static_input_type") == (name == "cuda")
