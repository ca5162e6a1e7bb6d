"""torch.compile for training, in a single process and on every mesh.

Each residual branch is compiled by itself. All branches of one shape share a graph, so the start
takes as long for 48 branches as for one. DDP and FSDP work between branches, in eager mode: they
average gradients while earlier branches are still in their backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from transformer_vq.config import ParallelConfig, RunConfig
from transformer_vq.device import compiles_training
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import info

BACKEND = "inductor"


def can_compile(config: RunConfig, mesh: ParallelConfig) -> bool:
    """Return whether a run can be compiled on a mesh.

    Context and tensor parallelism communicate within a branch, which interrupts its graph. The
    compiler would leave a checkpointed function with an interruption uncompiled.
    """
    return not (config.train.checkpoint_activations and mesh.cp * mesh.tp > 1)


def compiles(config: RunConfig, mesh: ParallelConfig, device: torch.device) -> bool:
    """Return whether the training passes of a run are compiled."""
    return compiles_training(config.train.compile, device) and can_compile(config, mesh)


def compile_branches(model: TransformerVQ, fullgraph: bool = True) -> None:
    """Compile the forward and backward pass of every branch in place, for training only.

    Names of parameters and hooks of the branches stay as they are: hooks run in eager mode, before
    and after a compiled branch. Evaluation mode stays eager, because its lengths vary.
    fullgraph: False if a branch communicates with other ranks, which interrupts the graph.
    """
    # DDP's own way to split a graph is not needed, and it rejects activation checkpointing.
    torch._dynamo.config.optimize_ddp = False
    for branch in model.branches:
        compiled = torch.compile(branch.forward, fullgraph=fullgraph, backend=BACKEND)
        branch.forward = _in_training(branch, compiled, branch.forward)
    info(
        "torch.compile is on: the first steps compile the layers, which may take minutes; "
        "--train.no-compile turns it off"
    )


def _in_training(
    branch: nn.Module, compiled: Callable[..., Any], eager: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward function that is compiled in training mode and eager otherwise."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if branch.training else eager)(*args, **kwargs)

    return forward
