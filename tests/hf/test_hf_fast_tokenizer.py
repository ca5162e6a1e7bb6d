"""Exported Hugging Face tokenizers load without custom code and give the ids of training."""

import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import a_run
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from transformer_vq import UserError
from transformer_vq.cli.main import main
from transformer_vq.data.bpe import learn_bpe
from transformer_vq.data.tokenizers import load_tokenizer, open_tokenizer
from transformer_vq.hf.export import export
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
    export(a_run(folder / "run", tokenizer=ours), folder / "out")
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


def test_special_tokens_of_the_chat_template_and_the_model_are_those_of_the_tokenizer(tmp_path):
    save_llama(tmp_path)
    ours = open_tokenizer(tmp_path, end_of_document=True)
    run = a_run(tmp_path / "run", tokenizer=ours)
    (run / "chat_template.jinja").write_text(TEMPLATE.replace("\n{%", "{{ eos_token }}{%"))
    export(run, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = theirs.apply_chat_template([{"role": "user", "content": "the fox"}])["input_ids"]
    assert tokens == [*ours.encode("user: the fox"), ours.eod]
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.bos_token_id, settings.eos_token_id) == (ours.bos, ours.eod) == (1, 2)
