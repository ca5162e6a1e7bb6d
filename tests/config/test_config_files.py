"""Config files: TOML, YAML and JSON are read back as written, and mistakes are one line."""

import json
import sys
from dataclasses import replace

import pytest

from transformer_vq.config.file_text import config_text
from transformer_vq.config.files import SUFFIXES, ConfigFileError, config_fields, read_config_file
from transformer_vq.errors import MissingExtraError
from transformer_vq.files import write_verified_json
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


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", PRESETS)
def test_written_presets_are_read_back_exactly(tmp_path, name, suffix):
    text = config_text(PRESETS[name], SUFFIXES[suffix], title="A title\nof two lines")
    file = read_config_file(written(tmp_path, text, f"my{suffix}"))
    assert file.apply(None) == PRESETS[name]
    assert file.preset is None


@pytest.mark.parametrize("kind", ["toml", "yaml", "json"])
def test_unusual_values_are_read_back_exactly(tmp_path, kind):
    paths = ("a b.txt", 'quote".txt', "back\\slash", "\u4e2d \U0001f600", "new\nline", "\x7f\x1f")
    config = replace(
        TINY,
        data=replace(TINY.data, path=paths, weights=(1, 2.5, 3, 4, 1e-5, 6)),
        optim=replace(TINY.optim, grad_clip=None, lr=1e-5, betas=(0.5, 0.75)),
    )
    path = written(tmp_path, config_text(config, kind), f"my.{kind}")
    assert read_config_file(path).apply(None) == config
    assert read_config_file(path).apply(TINY) == config


@pytest.mark.parametrize("kind", ["toml", "yaml"])
def test_written_files_explain_every_setting(kind):
    lines = config_text(TINY, kind).splitlines()
    separator = " = " if kind == "toml" else ": "
    for name, _, _ in config_fields():
        key = name.partition(".")[2]
        starts = (f"{key}{separator}", f"# {key}{separator}")
        (place,) = [i for i, line in enumerate(lines) if line.strip().startswith(starts)]
        assert lines[place - 1].strip().startswith("# "), name
    assert max(map(len, lines)) <= 92


def test_only_differences_from_a_preset_are_written(tmp_path):
    config = replace(TINY, optim=replace(TINY.optim, grad_clip=None))
    text = config_text(config, preset="tiny", base=TINY)
    file = read_config_file(written(tmp_path, text))
    assert file.preset == "tiny"
    assert file.values == {"optim": {"grad_clip": None}}
    assert file.apply(TINY) == config


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


def test_yaml_numbers_with_an_exponent_and_none_are_understood(tmp_path):
    text = "optim:\n  lr: 3e-4\n  eps: 1.0e-8\n  grad_clip: None\ntrain:\n  init_from: null\n"
    config = read_config_file(written(tmp_path, text, "my.yml")).apply(TINY)
    assert config.optim.lr == 3e-4
    assert config.optim.eps == 1e-8
    assert config.optim.grad_clip is None


def test_config_of_a_run_is_a_config_file(tmp_path):
    about = {"format": 2, "tokenizer_sha256": None}
    write_verified_json(tmp_path / "config.json", TINY.to_dict() | about)
    for path in (tmp_path, tmp_path / "config.json"):
        file = read_config_file(path)
        assert file.apply(None) == TINY
        assert file.name == tmp_path.name
    edited = json.loads((tmp_path / "config.json").read_text())
    edited["model"]["n_code"] = 9
    (tmp_path / "config.json").write_text(json.dumps(edited))
    assert read_config_file(tmp_path / "config.json").apply(None).model.n_code == 9
    with pytest.raises(ConfigFileError, match="was edited"):
        read_config_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nn_cod = 3", "my.toml: model.n_cod is not an option (did you mean n_code?)"),
        ("[modle]\nn_code = 3", "my.toml: modle is not an option (did you mean model?)"),
        ("n_code = 3", "my.toml: n_code is not an option (did you mean model.n_code?)"),
        ("[train]\nn_code = 3", "train.n_code is not an option (did you mean model.n_code?)"),
        ("[model]\nxyz = 3", "my.toml: model.xyz is not an option"),
        ('[model]\nn_code = "x"', "my.toml: model.n_code='x': must be an integer of at least 1"),
        ("[optim]\nlr = true", "my.toml: optim.lr=True: must be a number"),
        ("[data]\nweights = 3", "my.toml: data.weights=3: must be a list of values"),
        ("[train]\nseq_len = 1000", "my.toml: train.seq_len=1000 is not a multiple"),
        ("model = 3", "my.toml: model=3: must be a section with options"),
        ("preset = 3", "my.toml: preset=3: must be text"),
        ("[model]\nn_code = 3\nn-code = 4", "my.toml: model.n_code is given twice"),
        ("[model]\nn_code = 3\nn_code = 4", "my.toml is not valid TOML: "),
        ("[model\nn_code = 3", "at line 1, column 7"),
    ],
)
def test_mistakes_in_toml_are_one_line_with_file_and_key(tmp_path, text, message):
    assert message in error(written(tmp_path, text), TINY)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("my.yaml", "a: b: c", "my.yaml is not valid YAML: mapping values are not allowed here"),
        ("my.yaml", "model:\n  n_code: [", "at line 2"),
        ("my.yaml", "model:\n  n_code: 1\n  n_code: 2", "line 3: 'n_code' is given twice"),
        ("my.yaml", "model: &a\n  n_code: *b", "my.yaml is not valid YAML: "),
        ("my.yaml", "model: {n_code: !!python/name:os.system }", "my.yaml is not valid YAML: "),
        ("my.yaml", "? [1, 2]\n: 3", "my.yaml is not valid YAML: "),
        ("my.yaml", "model:\n  3: 4", "my.yaml: model.3 is not an option"),
        ("my.yaml", "- 1", "my.yaml: must contain sections such as [model], not [1]"),
        ("my.yaml", "", "my.yaml: must contain sections such as [model], not None"),
        ("my.json", '{"model": {"n_code": 1,}}', "my.json is not valid JSON: "),
        ("my.json", '{"model": {}, "model": {}}', "'model' is given twice"),
        ("my.json", "[" * 100_000, "my.json is not valid JSON"),
        ("my.json", "{", "line 1 column 2"),
        ("my.txt", "", "my.txt is not a config file; use a .toml, .yaml or .json file"),
    ],
)
def test_mistakes_in_other_formats_are_one_line(tmp_path, name, text, message):
    assert message in error(written(tmp_path, text, name), TINY)


def test_files_that_cannot_be_read_are_rejected(tmp_path):
    assert "does not exist" in error(tmp_path / "no.toml")
    assert "is not a run folder" in error(tmp_path)
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    assert "bytes.toml is not valid TOML: it is not UTF-8" in error(path)


def test_settings_without_a_default_must_be_given(tmp_path):
    line = error(written(tmp_path, "[model]\nd_model = 64"))
    assert line.startswith("my.toml: model.vocab_size, model.n_layer missing")
    assert 'preset = "tiny"' in line


def test_yaml_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"extra 'config'.*pip install pyyaml"):
        read_config_file(written(tmp_path, "model: {}", "my.yaml"))
