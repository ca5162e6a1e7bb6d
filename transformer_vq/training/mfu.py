"""Model FLOP utilization (MFU): the rate of model FLOPs over the peak rate of the devices.

FLOPs are those of `flops_per_token`: three forward passes, without recomputation. Peak rates are
the figures of the vendors' data sheets for dense matrix products with float32 accumulation; real
products reach less. The MFU of other devices is unknown.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from transformer_vq.config import Precision, RunConfig
from transformer_vq.parallel.world import World
from transformer_vq.training.sizes import flops_per_token


class Peak(NamedTuple):
    """Peak rates in TFLOP/s; None if the GPU does not have the format."""

    bf16: float | None
    tf32: float | None
    fp32: float


# By the complete name of the GPU, as PyTorch reports it, without the vendor. Other names, such as
# those of laptop GPUs and of parts of a GPU (MIG), are unknown.
PEAKS = {
    r"A100([ -].*GB.*)?": Peak(312, 156, 19.5),
    r"H100( .*HBM.*)?": Peak(989, 495, 67),
    r"H100 PCIe": Peak(756, 378, 51),
    r"H100 NVL": Peak(835, 418, 60),
    r"H200": Peak(989, 495, 67),
    r"H200 NVL": Peak(835, 418, 60),
    r"B200": Peak(2250, 1125, 75),
    r"L4": Peak(121, 60, 30.3),
    r"L40S": Peak(362, 183, 91.6),
    r"A10": Peak(125, 62.5, 31.2),
    r"GeForce RTX 3090": Peak(71, 35.6, 35.6),
    r"GeForce RTX 4090": Peak(165, 82.6, 82.6),
    r"GeForce RTX 5090": Peak(210, 105, 105),
    r"Instinct MI300X( .*)?": Peak(1307, 654, 163),
    r"V100-SXM2-.*GB": Peak(None, None, 15.7),
    r"V100-PCIE-.*GB": Peak(None, None, 14),
    r"T4": Peak(None, None, 8.1),
}


def peak_rate(name: str, precision: Precision, tf32: bool = False) -> float | None:
    """Return the peak FLOPs per second of a GPU, or None if it is not known.

    name: as `torch.cuda.get_device_name` returns it. tf32: whether fp32 products use TF32.
    """
    name = re.sub(r"^(NVIDIA|AMD|Tesla) ", "", name)
    if " MIG " in name:
        return None
    for pattern, peak in PEAKS.items():
        if re.fullmatch(pattern, name):
            rate = peak.bf16
            if precision == "fp32":
                rate = peak.tf32 if tf32 and peak.tf32 is not None else peak.fp32
            return None if rate is None else 1e12 * rate
    return None


class Utilization:
    """Computes the MFU of a run from its speed; it is known for GPUs of the table only."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.flops_per_token = 3 * flops_per_token(config.model, config.train.seq_len)
        peak = None
        if world.device.type == "cuda":
            tf32 = torch.get_float32_matmul_precision() != "highest"
            name = torch.cuda.get_device_name(world.device)
            peak = peak_rate(name, config.train.precision, tf32)
        self.peak = None if peak is None else peak * world.mesh.n_processes
        """FLOPs per second of all devices of the run; None if unknown."""

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak rate that the model uses, or None if it is not known."""
        if self.peak is None:
            return None
        return tokens_per_second * self.flops_per_token / self.peak
