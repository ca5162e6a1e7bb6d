"""RNG streams of the ranks, determined by the seed, the step and the mesh.

There are three streams, because ranks must agree on some dropout masks but not on others:

- `sinusoids`: dropout on the sinusoids, the same on all ranks; a checkpoint stores one mask.
- `rows`: LayerDrop, drawn per sequence; the same on ranks that share a sequence.
- `tokens`: residual dropout, drawn per token; different on every rank but those along tp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.world import World


class RNGStreams:
    """Switches the RNG state between streams during the forward pass, by hooks on the branches.

    The model draws LayerDrop masks before the first branch, sinusoid masks in a branch and residual
    dropout after it.
    """

    def __init__(self, model: TransformerVQ, world: World, seed: int) -> None:
        self.device = world.device
        self.seed = seed
        self.stream_keys = {
            "sinusoids": (0, 0, 0),
            "rows": (1, world.rank("rows"), 0),
            "tokens": (2, world.rank("rows"), world.rank("cp")),
        }
        self.states: dict[str, Tensor] = {}
        self.current = "rows"
        for branch in model.branches:
            branch.register_forward_pre_hook(self._enter_branch)
            branch.register_forward_hook(self._leave_branch)

    def start(self, step: int, part: int) -> None:
        """Seed all streams for the forward pass of one micro-batch of a step."""
        for name, key in self.stream_keys.items():
            sequence = np.random.SeedSequence([self.seed, step, part, *key])
            generator = torch.Generator(self.device)
            generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
            self.states[name] = generator.get_state()
        self.current = "rows"
        self._set(self.states["rows"])

    def _enter_branch(self, *_: Any) -> None:
        if self.states:
            self._switch("sinusoids")

    def _leave_branch(self, *_: Any) -> None:
        if self.states:
            self._switch("tokens")

    def _switch(self, name: str) -> None:
        self.states[self.current] = self._get()
        self.current = name
        self._set(self.states[name])

    def _get(self) -> Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
