"""Export of a model with torch.export and to ONNX, for any batch size and length.

    run = export_program(model, "forward").module()
    logits = run(tokens)                                  # [b, t] -> [b, t, vocab_size]
    step = export_program(model, "decode").module()
    state = model.init_state(batch_size).to_tensors()
    logits, state = step(tokens[:, :1], state)            # one token per row

There are three graphs:

    forward   tokens [b, t] -> logits [b, t, vocab_size]
    prefill   tokens [b, t], state -> logits [b, t, vocab_size], next state
    decode    tokens [b, 1], state -> logits [b, 1, vocab_size], next state

The state is a dict of tensors with the names of `ModelState.to_tensors`. Its size does not depend
on the length, and all zeros is the state before the first token. `prefill` and `decode` compute the
same function; `decode` is faster for a single token.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from transformer_vq.device import evaluating
from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import atomic_folder
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.progress import progress_bar

Graph = Literal["forward", "prefill", "decode"]
OPSET = 20  # version of the ONNX operators


class Segment(nn.Module):
    """The next segment of each sequence, with the state as a dict of tensors, or without it."""

    def __init__(self, model: TransformerVQ) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, state: dict[str, Tensor] | None = None) -> Any:
        """tokens: [b, t] -> logits: [b, t, vocab_size], and the next state if one is given."""
        if state is None:
            return self.model(tokens).logits
        output = self.model(tokens, ModelState.from_tensors(state))
        return output.logits, output.state.to_tensors()


def export_program(model: TransformerVQ, graph: Graph) -> ExportedProgram:
    """Return a graph of the model, captured by torch.export with dynamic batch size and length.

    Without dropout and gradients. Raise UserError for the state of full attention, which grows.
    """
    if graph not in get_args(Graph):
        raise UserError(f"graph={graph!r}: choose one of {get_args(Graph)}")
    if graph != "forward" and model.config.attention == "full":
        raise UserError(f"graph={graph!r}: the state of full attention grows; use attention='vq'")
    device = next(model.parameters()).device
    # Sizes of 2 and more: torch.export makes those of 0 and 1 constants.
    tokens = torch.zeros(2, 1 if graph == "decode" else 3, dtype=torch.int64, device=device)
    state = () if graph == "forward" else (model.init_state(2, device).to_tensors(),)
    shapes = _dynamic_shapes(model, graph)
    with evaluating(model):
        return torch.export.export(Segment(model), (tokens, *state), dynamic_shapes=shapes)


def _dynamic_shapes(model: TransformerVQ, graph: Graph) -> dict[str, Any]:
    batch, length = Dim("batch", min=1), Dim("length", min=1)
    if graph == "forward":
        return {"tokens": {0: batch, 1: length}}
    state = {name: {0: batch} for name in model.init_state(1).to_tensors()}
    return {"tokens": {0: batch} if graph == "decode" else {0: batch, 1: length}, "state": state}


def export_onnx(
    model: TransformerVQ,
    folder: Path | str,
    graphs: Sequence[Graph] = ("forward", "prefill", "decode"),
) -> None:
    """Write `<graph>.onnx` for each graph to a new folder, atomically; weights are next to them.

    Inputs are `tokens` and `state.layers.0.k`, ...; outputs are `logits` and
    `next_state.layers.0.k`, ... in the same order. The axes `batch` and `length` are dynamic.

        export_onnx(model, "onnx")
        session = onnxruntime.InferenceSession("onnx/forward.onnx")
        (logits,) = session.run(None, {"tokens": tokens})  # [b, t] of int64
    """
    try:
        import onnxscript  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise missing_extra("ONNX export", "onnxscript>=0.5") from error
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; choose another folder")
    total = len(graphs)
    with atomic_folder(folder) as partial, progress_bar("ONNX", total, "graphs") as advance:
        for graph in graphs:
            _write_onnx(model, graph, partial / f"{graph}.onnx")
            advance(1, graph)


def _write_onnx(model: TransformerVQ, graph: Graph, path: Path) -> None:
    program = export_program(model, graph)
    state = {} if graph == "forward" else model.init_state(1).to_tensors()
    names = [name.replace("/", ".") for name in state]
    with _quiet():
        onnx_program: Any = torch.onnx.export(
            program,
            input_names=["tokens", *names],
            output_names=["logits", *(f"next_{name}" for name in names)],
            dynamic_shapes=_dynamic_shapes(model, graph),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
        onnx_program.save(path, external_data=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings of the ONNX exporter about its own internals and absent packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
