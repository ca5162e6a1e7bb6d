"""Loading with `trust_remote_code=True`, in a process that has not imported transformer_vq.hf."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import tiny_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from transformer_vq import TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM, TransformerVQTokenizer
from transformer_vq.hf.configuration import FILE

BLOCK = "import sys; sys.modules['transformer_vq'] = None\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a byte-level model and its tokenizer."""
    folder = tmp_path_factory.mktemp("saved") / "my-model"
    core = TransformerVQ(tiny_config(vocab_size=257)).eval()
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    TransformerVQForCausalLM.from_core(core, **ids).save_pretrained(folder)
    TransformerVQTokenizer(end_of_document=True).save_pretrained(folder)
    return folder


def run_python(program, *arguments, cache, check=True):
    """Run a program in a subprocess with a new cache of remote code; return its output."""
    env = os.environ | {"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=check, env=env, stdin=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_remote_code_loads_all_classes_and_is_saved_again(saved, tmp_path):
    program = """
        import json, sys
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
        folder, again = sys.argv[1:]
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert "transformer_vq.hf" in sys.modules
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        loaded = {"config": type(config).__module__}
        for auto in (AutoModel, AutoModelForCausalLM):
            model = auto.from_pretrained(folder, trust_remote_code=True)
            loaded[auto.__name__] = type(model).__name__
        inputs = tokenizer("the fox", return_tensors="pt")
        loaded["logits"] = model(**inputs).logits.tolist()
        model.save_pretrained(again)
        tokenizer.save_pretrained(again)
        print(json.dumps(loaded))
    """
    again = tmp_path / "again"
    out = run_python(program, saved, again, cache=tmp_path / "cache").stdout
    loaded = json.loads(out.splitlines()[-1])
    model, tokenizer = (
        auto.from_pretrained(saved) for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    want = model(**tokenizer("the fox", return_tensors="pt")).logits
    assert torch.equal(torch.tensor(loaded.pop("logits")), want)
    assert loaded == {
        "config": "transformer_vq.hf.configuration",
        "AutoModel": "TransformerVQModel",
        "AutoModelForCausalLM": "TransformerVQForCausalLM",
    }
    assert {path.name for path in again.iterdir()} == {path.name for path in saved.iterdir()}
    for name in ("config.json", "tokenizer_config.json"):
        found, wanted = (json.loads((f / name).read_text()) for f in (again, saved))
        assert found["auto_map"] == wanted["auto_map"]
    assert [path.name for path in again.glob("*.py")] == [FILE]


@pytest.mark.slow
def test_missing_package_is_reported_in_one_line_with_the_fix(saved, tmp_path):
    program = """
        import transformers
        for name in ("AutoTokenizer", "AutoModelForCausalLM", "AutoConfig"):
            try:
                getattr(transformers, name).from_pretrained(sys.argv[1], trust_remote_code=True)
            except ImportError as error:
                print(error)
        transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
    """
    program = BLOCK + textwrap.dedent(program)
    ended = run_python(program, saved, cache=tmp_path, check=False)
    assert ended.returncode == 1
    *_, last = ended.stderr.splitlines()
    assert last.startswith("ImportError: ")
    assert "transformer-vq" in last
    assert "git clone" in last
    assert "pip install" in last
    assert ended.stdout.splitlines() == 3 * [last.removeprefix("ImportError: ")]


@pytest.mark.parametrize("auto", [AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer])
def test_remote_code_is_not_run_after_the_import(saved, tmp_path, auto):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    (folder / FILE).write_text("raise AssertionError")
    assert type(auto.from_pretrained(folder)).__module__.startswith("transformer_vq.hf.")
