"""Random numbers of many processes: they follow from the seed, the update and the layout alone.

Three streams, because masks differ in who must agree on them. Dropout on the sinusoids is the same
for all processes, so that a checkpoint holds it once; LayerDrop is drawn per sequence, so alike on
processes that share a sequence; residual dropout is fresh for every token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.world import World


class RNGStreams:
    """Changes between the streams as the model goes from LayerDrop to branches and dropout."""

    def __init__(self, model: TransformerVQ, world: World, seed: int) -> None:
        self.device = world.device
        self.seed = seed
        self.own = {
            "sinusoids": (0, 0, 0),
            "rows": (1, world.rank("rows"), 0),
            "tokens": (2, world.rank("rows"), world.rank("cp")),
        }
        self.states: dict[str, Tensor] = {}
        self.current = "rows"
        for branch in model.branches:
            branch.register_forward_pre_hook(self._enter_branch)
            branch.register_forward_hook(self._leave_branch)

    def begin(self, update: int, part: int) -> None:
        """Before the forward pass of one part of an update."""
        for name, place in self.own.items():
            sequence = np.random.SeedSequence([self.seed, update, part, *place])
            generator = torch.Generator(self.device)
            generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
            self.states[name] = generator.get_state()
        self.current = "rows"
        self._set(self.states["rows"])

    def _enter_branch(self, *_: Any) -> None:
        if self.states:
            self._change("sinusoids")

    def _leave_branch(self, *_: Any) -> None:
        if self.states:
            self._change("tokens")

    def _change(self, name: str) -> None:
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
