"""onnxruntime computes the logits of the model, and generates what `generate` does."""

import numpy as np
import onnxruntime
import pytest
import torch
from helpers import assert_close, tiny_model, tiny_run

from transformer_vq import TransformerVQ, UserError, generate
from transformer_vq.cli.main import main
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.generation.export import export_onnx
from transformer_vq.training.checkpoint import write_config

SHAPES = [(1, 1), (2, 3), (3, 4), (1, 5), (4, 8), (2, 11), (5, 29), (1, 200)]  # blocks of 4 tokens


@pytest.fixture(scope="module", params=["shga", "gqa"])
def exported(request, tmp_path_factory):
    """Return a model and a session for each of its graphs."""
    torch.manual_seed(0)
    model = tiny_model(n_layer=1, head_type=request.param).eval()
    folder = tmp_path_factory.mktemp("onnx") / "model"
    export_onnx(model, folder)
    graphs = {path.stem: path for path in folder.glob("*.onnx")}
    return model, {name: onnxruntime.InferenceSession(path) for name, path in graphs.items()}


def empty_state(session: onnxruntime.InferenceSession, batch_size: int) -> dict[str, np.ndarray]:
    """All zeros is the state before the first token."""
    dtypes = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    return {
        x.name: np.zeros([batch_size if n == "batch" else n for n in x.shape], dtypes[x.type])
        for x in session.get_inputs()
        if x.name != "tokens"
    }


def run(session, tokens, state):
    names = [x.name.removeprefix("next_") for x in session.get_outputs()]
    results = dict(zip(names, session.run(None, {"tokens": tokens, **state}), strict=True))
    return results.pop("logits"), results


def test_graphs_have_named_inputs_and_outputs(exported):
    _, sessions = exported
    assert sorted(sessions) == ["decode", "forward", "prefill"]
    (tokens,) = sessions["forward"].get_inputs()
    assert (tokens.name, tokens.shape) == ("tokens", ["batch", "length"])
    for name in ("prefill", "decode"):
        inputs = [x.name for x in sessions[name].get_inputs()]
        outputs = [x.name for x in sessions[name].get_outputs()]
        assert outputs == ["logits", *(f"next_{x}" for x in inputs[1:])]
        assert "state.layers.0.cache.mean" in inputs


def test_forward_computes_the_same_for_any_batch_size_and_length(exported):
    model, sessions = exported
    for b, t in SHAPES:
        tokens = torch.randint(17, (b, t))
        (logits,) = sessions["forward"].run(None, {"tokens": tokens.numpy()})
        assert_close(f"logits of {b} x {t}", torch.from_numpy(logits), model(tokens).logits)


def test_prefill_and_decode_continue_from_a_state(exported):
    model, sessions = exported
    tokens = torch.randint(17, (3, 60))
    state, start, parts = empty_state(sessions["prefill"], 3), 0, []
    for n in (5, 1, 4, 1, 1, 20, 1, 27):
        session = sessions["decode" if n == 1 else "prefill"]
        logits, state = run(session, tokens[:, start : start + n].numpy(), state)
        start += n
        parts.append(torch.from_numpy(logits))
    want = model(tokens)
    assert_close("logits", torch.cat(parts, dim=1), want.logits)
    for name, x in want.state.to_tensors().items():
        if not x.is_floating_point():
            assert np.array_equal(state[name.replace("/", ".")], x.numpy()), name


def test_greedy_decoding_gives_the_tokens_of_generate(exported):
    model, sessions = exported
    prompt, found = [3, 1, 4, 1, 5, 9, 2, 6, 5], []
    logits, state = run(
        sessions["prefill"], np.array([prompt]), empty_state(sessions["prefill"], 1)
    )
    for _ in range(20):
        found.append(int(logits[0, -1].argmax()))
        logits, state = run(sessions["decode"], np.array([[found[-1]]]), state)
    assert found == generate(model, prompt, 20, temperature=0)


def test_export_rejects_a_folder_with_files(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not empty"):
        export_onnx(tiny_model(), tmp_path)


def test_command_exports_a_run(tmp_path):
    config, run = tiny_run(tmp_path), tmp_path / "run"
    (run / "best").mkdir(parents=True)
    write_config(run, config, ByteTokenizer(True))
    model = TransformerVQ(config.model).eval()
    model.save(run / "best" / "model.safetensors")
    main(["export", str(run), str(tmp_path / "onnx"), "--format", "onnx"])
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "forward.onnx")
    tokens = torch.randint(256, (2, 9))
    (logits,) = session.run(None, {"tokens": tokens.numpy()})
    assert_close("logits", torch.from_numpy(logits), model(tokens).logits)
