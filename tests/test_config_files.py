"""Config files: TOML and JSON are read back as written, and mistakes are one line."""

from dataclasses import replace

import pytest

from transformer_vq.config_files import (
    ConfigFileError,
    config_text,
    read_config_file,
)
from transformer_vq.files import write_json
from transformer_vq.presets import PRESETS

TINY = PRESETS["tiny"]


def written(tmp_path, content, name="my.toml"):
    path = tmp_path / name
    path.write_text(content)
    return path


def error(path, base=None):
    with pytest.raises(ConfigFileError) as found:
        read_config_file(path).apply(base)
    (line,) = str(found.value).splitlines()
    return line.replace(f"{path.parent}/", "")


@pytest.mark.parametrize("name", PRESETS)
def test_written_presets_are_read_back_exactly(tmp_path, name):
    text = config_text(PRESETS[name], "A title\nof two lines")
    file = read_config_file(written(tmp_path, text))
    assert file.apply(None) == PRESETS[name]
    assert file.preset is None


def test_unusual_values_are_read_back_exactly(tmp_path):
    paths = ("a b.txt", 'quote".txt', "back\\slash", "\u4e2d \U0001f600", "new\nline", "\x1f")
    config = replace(
        TINY,
        data=replace(TINY.data, path=paths, test_share=1e-5),
        optim=replace(TINY.optim, grad_clip=None, lr=1e-5, betas=(0.5, 0.75)),
    )
    path = written(tmp_path, config_text(config))
    assert read_config_file(path).apply(None) == config
    assert read_config_file(path).apply(TINY) == config


def test_written_files_explain_every_setting():
    lines = config_text(TINY).splitlines()
    for settings in TINY.to_dict().values():
        for key in settings:
            starts = (f"{key} = ", f"# {key} = ")
            (place,) = [i for i, line in enumerate(lines) if line.startswith(starts)]
            assert lines[place - 1].startswith("# "), key
    assert max(map(len, lines)) <= 92


def test_files_override_their_base_and_accept_dashes(tmp_path):
    text = 'preset = "tiny"\n[model]\nn-code = 64\n[data]\npath = "one.txt"\n'
    file = read_config_file(written(tmp_path, text))
    assert file.preset == "tiny"
    config = file.apply(TINY)
    assert config == replace(
        TINY,
        model=replace(TINY.model, n_code=64),
        data=replace(TINY.data, path=("one.txt",)),
    )


def test_config_of_a_run_is_a_config_file(tmp_path):
    about = {"format": 2, "tokenizer_sha256": None}
    write_json(tmp_path / "config.json", TINY.to_dict() | about)
    for path in (tmp_path, tmp_path / "config.json"):
        file = read_config_file(path)
        assert file.apply(None) == TINY
        assert file.name == tmp_path.name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("my.toml", "[model]\nn_cod = 3", "model.n_cod is not an option (did you mean n_code?)"),
        ("my.toml", "[modle]\nn_code = 3", "modle is not an option (did you mean model?)"),
        ("my.toml", '[model]\nn_code = "x"', "model.n_code='x': must be an integer"),
        ("my.toml", "[optim]\nlr = true", "optim.lr=True: must be a number"),
        ("my.toml", "[optim]\nbetas = 3", "optim.betas=3: must be a list of"),
        ("my.toml", "[train]\nseq_len = 1000", "train.seq_len=1000 is not a multiple"),
        ("my.toml", "model = 3", "model is not a section with options"),
        ("my.toml", "[model\nn_code = 3", "is not valid TOML: "),
        ("my.toml", "\udcff", "is not valid TOML: "),
        ("my.json", '{"model": {"n_code": 1,}}', "is not valid JSON: "),
        ("my.json", "[" * 100_000, "is not valid JSON"),
        ("my.txt", "", "is not a config file; use a .toml or .json file"),
        ("no.toml", None, "does not exist"),
        (".", None, "is not a run folder"),
    ],
)
def test_mistakes_are_one_line_with_file_and_key(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    line = error(path, TINY)
    assert message in line
    assert path.name in line


def test_settings_without_a_default_must_be_given(tmp_path):
    line = error(written(tmp_path, "[model]\nd_model = 64"))
    assert line.startswith("my.toml: model.vocab_size is missing")
    assert 'preset = "tiny"' in line
