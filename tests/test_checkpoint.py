"""States and files: whole or not at all."""

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.checkpoint import (
    CheckpointError,
    read_config,
    state_from_tensors,
    state_to_tensors,
)
from transformer_vq.files import write_text


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize("compressive_cache", [True, False])
def test_a_state_survives_the_way_through_tensors(attention, compressive_cache):
    config = tiny_config(
        attention=attention, compressive_cache=compressive_cache, p_dropsin=0.2, p_droplyr=0.2
    )
    model = TransformerVQ(config)
    tokens = torch.randint(17, (2, 11))
    ids = torch.arange(11).expand(2, -1) // 6
    state = model(tokens, document_ids=ids).state.detach()
    tensors = state_to_tensors(state, "a")
    again = state_from_tensors(tensors | {"b/other": tokens}, "a")
    back = state_to_tensors(again, "a")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    model.eval()
    more = {"document_ids": ids[:, -1:].expand(2, 11)}
    assert torch.equal(model(tokens, state, **more).logits, model(tokens, again, **more).logits)


def test_a_file_is_replaced_whole_or_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "first")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("content", [None, "", "{", '{"model": {}}', '{"model": {"no": 1}}'])
def test_a_folder_without_a_config_is_no_run(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config"):
        read_config(tmp_path)


def test_a_missing_folder_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder"):
        read_config(tmp_path / "nothing")
