"""The model card of an export: what the run records, and nothing about the user's machine."""

import pytest
import torch
from servers import TOKENIZER, a_run

from transformer_vq import TransformerVQ, UserError
from transformer_vq.cli.main import main
from transformer_vq.config import DataConfig, TrainConfig
from transformer_vq.files import write_json
from transformer_vq.hf import TransformerVQForCausalLM
from transformer_vq.hf.export import export
from transformer_vq.training.checkpoint import load_model, read_config, save_checkpoint
from transformer_vq.training.metrics import write_rows

ROWS = [
    {"kind": "train", "step": 1, "nats_per_token": 5.0, "bits_per_byte": 7.2, "tokens": 1000},
    {"kind": "validation", "step": 2, "nats_per_token": 3.0, "bits_per_byte": 4.25, "tokens": 99},
    {"kind": "train", "step": 3, "nats_per_token": 4.0, "bits_per_byte": 5.8, "tokens": 1000},
    {"kind": "validation", "step": 3, "nats_per_token": 3.5, "bits_per_byte": 5.75, "tokens": 99},
]


def write_run(folder, data=None, rows=ROWS, init_from=None):
    """Write a run folder with random weights: a best model, and a checkpoint of step 3."""
    train = TrainConfig(steps=10, seq_len=48, backprop_len=48, init_from=init_from)
    run = a_run(folder / "run", data, train, TOKENIZER)
    model = TransformerVQ(read_config(run).model)
    metadata = {"config": read_config(run).to_dict(), "best_loss": 3.0}
    tensors = {f"model/{name}": x for name, x in model.state_dict().items()}
    save_checkpoint(run, 3, tensors, metadata, keep=1)
    write_rows(run / "metrics.jsonl", rows)
    return run


def evaluation(run, checkpoint="best", bits=4.5, step=2):
    result = {"bits_per_byte": bits, "word_perplexity": None, "tokens": 1234}
    about = {"checkpoint": checkpoint, "step": step, "split": "test", "seq_len": 48}
    write_json(run / "evaluation-test.json", about | {"protocols": {"windowed": result}})


def card_of(run, folder, checkpoint="best", **options):
    export(run, folder, checkpoint, **options)
    return (folder / "README.md").read_text()


def rows_of(card):
    """Return the cells of all table rows by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in rows}


def metadata_of(card):
    """Return the YAML front matter of a card."""
    return pytest.importorskip("yaml").safe_load(card.split("---\n", 2)[1])


def test_card_of_the_packaged_model_states_its_data_and_license(tmp_path, capsys):
    main(["export", "books", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert metadata_of(card)["license"] == "mit"
    assert "base_model" not in metadata_of(card)
    data = rows_of(card)["data"][0]
    assert "32 public-domain" in data
    assert "Project Gutenberg" in data
    assert "standard library" not in card


def test_card_states_license_sizes_training_and_the_validation_of_the_best_model(tmp_path):
    run = write_run(tmp_path)
    evaluation(run)
    card = card_of(run, tmp_path / "out", name="me/my-model", license_id="cc-by-4.0")
    assert metadata_of(card) == {
        "library_name": "transformers",
        "license": "cc-by-4.0",
        "pipeline_tag": "text-generation",
        "tags": ["transformer-vq", "long-context", "linear-attention"],
    }
    assert card.split("---\n", 2)[2].lstrip().startswith("# me/my-model\n")
    rows = rows_of(card)
    model = TransformerVQ.load(run / "best" / "model.safetensors")
    assert rows["parameters"] == [f"{sum(p.numel() for p in model.parameters()):,}"]
    assert rows["state per sequence"][0].startswith(f"{model.init_state(1).n_bytes:,} bytes")
    assert rows["codes per codebook"] == ["8"]
    assert "step 2 of 10" in rows["checkpoint"][0]
    assert rows["tokens trained on"] == ["1,000"]
    assert rows["sequence length"] == ["48 tokens"]
    assert rows["validation"][1:] == ["99", "4.2500"]
    assert rows["test"] == ["windowed, 48 tokens", "1,234", "4.5000"]
    for wrong in ("my license", "a: b", "a\nb", ""):
        with pytest.raises(UserError, match="license="):
            card_of(run, tmp_path / "other", license_id=wrong)
    assert not (tmp_path / "other").exists()


def test_requested_checkpoint_is_exported_and_only_its_results_are_stated(tmp_path):
    run = write_run(tmp_path)
    evaluation(run, "best", step=1)
    assert "test" not in rows_of(card_of(run, tmp_path / "best"))
    rows = rows_of(card_of(run, tmp_path / "out", "3"))
    model = TransformerVQForCausalLM.from_pretrained(tmp_path / "out")
    for name, want in load_model(run, "3")[0].state_dict().items():
        assert torch.equal(model.to_core().state_dict()[name], want), name
    assert "step 3 of 10" in rows["checkpoint"][0]
    assert rows["tokens trained on"] == ["3,000"]
    assert rows["validation"][1:] == ["99", "5.7500"]
    assert "test" not in rows


def test_card_of_a_run_without_metrics_has_no_results(tmp_path, capsys):
    run = write_run(tmp_path, rows=[])
    (run / "evaluation-test.json").write_text("[]")
    rows = rows_of(card_of(run, tmp_path / "out"))
    assert "validation" not in rows
    assert "tokens trained on" not in rows
    assert "evaluation-test.json" in capsys.readouterr().err


def test_card_has_no_folders_of_the_users_machine(tmp_path):
    data = DataConfig(path=(str(tmp_path / "text"), "/home/alice/private/*.txt"))
    run = write_run(tmp_path, data, init_from="/home/alice/private/old-run")
    card = card_of(run, tmp_path / "out")
    rows = rows_of(card)
    assert rows["files"] == ["`text`, `*.txt`"]
    assert rows["fine-tuned from"] == ["`old-run`"]
    assert metadata_of(card)["base_model"] == "old-run"
    assert "alice" not in card
    assert str(tmp_path) not in card


def test_snippet_of_the_card_loads_and_generates(tmp_path, monkeypatch, capsys):
    card = card_of(write_run(tmp_path), tmp_path / "my model")
    monkeypatch.chdir(tmp_path)
    snippet = card.split("```python\n")[1].split("```")[0]
    assert 'from_pretrained("my model")' in snippet
    exec(compile(snippet.replace("=100", "=4"), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("The")
