"""Exported Hugging Face tokenizers load without custom code and give the ids of training."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import tiny_run
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from transformer_vq import TransformerVQ, UserError
from transformer_vq.cli.main import main
from transformer_vq.data.bpe import learn_bpe
from transformer_vq.data.tokenizers import load_tokenizer, open_tokenizer
from transformer_vq.hf.export import export
from transformer_vq.training.checkpoint import write_config
from transformer_vq.training.loading import load_model_and_tokenizer

LINES = "".join(f"In {1800 + i % 90} the fox saw {i} dogs.\n" for i in range(200))
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
PARTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["<|endoftext|>", "<s>", "</s>", "\u2581", "  ", "\r\n", "\0", " fox \u00e9"]),
)
TEXTS = st.lists(PARTS, max_size=6).map("".join)


def save_llama(folder):
    """Write a tokenizer with byte fallback, a post-processor and a chat template."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [chr(code) for code in range(33, 127)] + ["\u2581", "th", "the", "\u2581the"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def untrained_run(folder, tokenizer):
    """Write a run folder with random weights."""
    config = tiny_run(folder)
    config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    run = folder / "run"
    (run / "best").mkdir(parents=True)
    write_config(run, config, tokenizer)
    tokenizer.save(run)
    torch.manual_seed(0)
    TransformerVQ(config.model).save(run / "best" / "model.safetensors")
    return run


@pytest.fixture(scope="module", params=["bpe", "llama"])
def exported(request, tmp_path_factory):
    """Return our tokenizer and the folder of its export."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bpe":
        learn_bpe([LINES], 300, folder)
        ours = load_tokenizer(folder, end_of_document=True)
    else:
        save_llama(folder)
        ours = open_tokenizer(folder, end_of_document=True)
    export(untrained_run(folder, ours), folder / "out")
    return ours, folder / "out"


@pytest.fixture(scope="module")
def pair(exported):
    """Return our tokenizer and the one that AutoTokenizer loads."""
    ours, folder = exported
    theirs = AutoTokenizer.from_pretrained(folder)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    return ours, theirs


@given(text=TEXTS)
def test_ids_equal_ours_with_bos_before_the_text(pair, text):
    ours, theirs = pair
    tokens = theirs.encode(text, add_special_tokens=False)
    assert tokens == ours.encode(text)
    assert theirs(text)["input_ids"] == [ours.bos, *tokens]
    if ours.bos == ours.eod:  # the learned tokenizer, which is lossless
        assert theirs.decode(tokens) == text
        assert theirs.decode([ours.bos, *tokens, ours.eod], skip_special_tokens=True) == text


def test_a_changed_vocabulary_is_reported(exported, tmp_path, capsys):
    folder = shutil.copytree(exported[1], tmp_path / "out")
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"the"', '"eht"', 1) if '"the"' in text else text + " ")
    with pytest.raises(UserError, match=r"tokenizer\.json is corrupt.*export the model again"):
        load_model_and_tokenizer(folder)
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(folder), "--port", "0"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "tokenizer.json is corrupt" in line


@pytest.mark.slow
def test_the_tokenizer_loads_without_this_package(exported):
    ours, folder = exported
    program = (
        "import sys; sys.modules['transformer_vq'] = None; from transformers import AutoTokenizer;"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False);"
        "print(tokenizer('the fox')['input_ids'])"
    )
    command = [sys.executable, "-c", program, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == [ours.bos, *ours.encode("the fox")]


def test_special_tokens_of_the_chat_template_are_encoded_as_such(tmp_path):
    save_llama(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE.replace("\n{%", "{{ eos_token }}{%")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = open_tokenizer(tmp_path, end_of_document=True)
    export(untrained_run(tmp_path, ours), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "the fox"}]
    tokens = theirs.apply_chat_template(messages)["input_ids"]
    assert tokens == [*ours.encode("user: the fox"), ours.eod]


def test_generation_stops_at_the_end_of_a_document(tmp_path):
    learn_bpe([LINES], 300, tmp_path)
    run = untrained_run(tmp_path, load_tokenizer(tmp_path))
    model = TransformerVQ.load(run / "best" / "model.safetensors").eval()
    prompt = [0, *load_tokenizer(tmp_path).encode("the fox")]
    likely = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    name = open_tokenizer(tmp_path).names[likely]
    config = {"bos_token": "<|endoftext|>", "eos_token": name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "again").mkdir()
    export(untrained_run(tmp_path / "again", open_tokenizer(tmp_path, True)), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = exported.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
    assert tokens[0].tolist() == [*prompt, likely]
