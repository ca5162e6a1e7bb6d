"""HTML reports: self-contained, escaped, and written for runs in any condition."""

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from helpers import interrupt_after, tiny_run

from transformer_vq.errors import UserError
from transformer_vq.files import read_verified_json, write_verified_json
from transformer_vq.training import report, report_charts
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.report import report_html, write_report
from transformer_vq.training.rows import write_rows
from transformer_vq.training.run import train
from transformer_vq.training.svg_chart import Line, chart, number, ticks

EVIL = "<script>alert('&')</script>"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what the page contains."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def sections(self):
        return re.findall(
            r"^(Training|Evaluation|Samples|Config|History|Environment)$", self.text, re.MULTILINE
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    train(tiny_run(folder), folder / "run")
    evaluation = evaluate(folder / "run").to_dict()
    write_verified_json(folder / "run" / "evaluation-test.json", evaluation)
    return folder / "run"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(report, "SAMPLE_TOKENS", 12)
    monkeypatch.setattr(report_charts, "MIN_TOKENS", 1)


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_report_shows_all_sections_in_one_file(run):
    write_rows(
        run / "history.jsonl",
        [
            {
                "time": "2030-01-02T03:04:05+00:00",
                "event": "resume",
                "step": 7,
                "changed": {"optim.lr": [0.001, 0.5]},
                "device": "cuda:7",
            },
        ],
    )
    path = write_report(run, prompt="the ", n_samples=2)
    assert path == run / "report.html"
    text = path.read_text()
    page = Page(text)
    assert page.sections() == [
        *("Training", "Evaluation", "Samples", "Config", "History", "Environment")
    ]
    assert len(text) < 1_000_000
    assert not re.search(r"https?://|url\(|@import|<link|<script| src=", text)
    assert sum(attrs.get("class") == "sample" for _, attrs in page.tags) == 2
    assert sum(tag == "figure" for tag, _ in page.tags) == 7
    assert "finished" in page.text
    assert "2030-01-02 03:04:05" in page.text
    assert "optim.lr: 0.001 -> 0.5" in page.text
    assert "cuda:7" in page.text
    assert "model.n_code" in page.text
    bits = read_verified_json(run / "evaluation-test.json")["protocols"]["windowed"]
    assert f"{bits['bits_per_byte']:.4f}" in page.text


def test_report_shows_the_step_of_an_evaluation_and_whether_it_is_current(run):
    evaluation = read_verified_json(run / "evaluation-test.json")
    step = evaluation["step"]
    current = Page(report_html(run, n_samples=0)).text
    assert f"test (best, step {step})" in current
    assert "not of the current model" not in current
    for old in (step - 1, None):
        write_verified_json(run / "evaluation-test.json", evaluation | {"step": old})
        page = Page(report_html(run, n_samples=0)).text
        assert f"test (best, step {step})" not in page
        assert f"not of the current model (best, step {step})" in page


def test_samples_depend_only_on_the_seed(run):
    def samples(seed):
        return re.findall(r'class="sample">(.*?)</div>', report_html(run, seed=seed), re.DOTALL)

    assert samples(1) == samples(1)
    assert samples(1) != samples(2)
    assert len(samples(1)) == 3


def test_text_from_users_and_files_is_escaped(run, tmp_path):
    config = tiny_run(tmp_path)
    paths = (EVIL, "\x1b[31m", "\udcff")
    config = replace(config, data=replace(config.data, path=paths))
    stored = read_verified_json(run / "config.json")
    write_verified_json(run / "config.json", stored | config.to_dict())
    row = {"time": EVIL, "event": EVIL, "step": EVIL, "changed": {EVIL: [EVIL, EVIL]}}
    write_rows(run / "history.jsonl", [row | {"command": EVIL, "device": EVIL}])
    evaluation = read_verified_json(run / "evaluation-test.json")
    evaluation |= {"split": EVIL, "checkpoint": EVIL}
    evaluation["protocols"] = {EVIL: evaluation["protocols"]["windowed"]}
    write_verified_json(run / "evaluation-test.json", evaluation)
    odd = run.rename(tmp_path / "<b>&'\"")
    text = write_report(odd, tmp_path / "out.html", n_samples=1, prompt=EVIL).read_text()
    page = Page(text)
    assert "<script" not in text.lower()
    assert not {"script", "b>"} & {tag for tag, _ in page.tags}
    assert page.text.count(EVIL) >= 8
    assert "\x1b" not in text
    assert "<b>&'\"" in page.text


def test_unfinished_runs_have_a_report(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        train(tiny_run(tmp_path), tmp_path / "run")
    text = report_html(tmp_path / "run", n_samples=1)
    assert "stopped" in Page(text).text
    assert "of 10" in text


@pytest.mark.parametrize("content", [None, b"", b"garbage\n[]\n", b'{"kind": "train"'])
def test_runs_without_valid_metrics_have_a_report(run, content):
    (run / "metrics.jsonl").unlink()
    if content is not None:
        (run / "metrics.jsonl").write_bytes(content)
    page = Page(report_html(run, n_samples=0))
    assert "No metrics have been logged yet." in page.text
    assert "Samples" not in page.sections()


def test_damaged_models_and_evaluations_are_explained_in_the_report(run):
    for path in run.rglob("model.safetensors"):
        path.write_bytes(b"")
    (run / "evaluation-test.json").write_text("{}")
    write_verified_json(run / "evaluation-valid.json", {"split": "x", "protocols": 3})
    page = Page(report_html(run))
    assert "No samples: " in page.text
    assert "evaluation-test.json is left out" in page.text
    assert "evaluation-valid.json is left out: it has an unknown format" in page.text


def test_values_that_are_not_finite_are_left_out(run):
    rows = [
        {
            "kind": "train",
            "step": i,
            "bits_per_byte": x,
            "lr": x,
            "share_in_use": x,
            "relative_error": x,
            "perplexity": x,
            "grad_norm": None,
            "tokens": 1,
            "seconds": 0,
        }
        for i, x in enumerate([1.0, float("nan"), float("inf"), 2.0], start=1)
    ]
    write_rows(run / "metrics.jsonl", rows)
    text = report_html(run, n_samples=0)
    Page(text)
    assert "nan" not in re.sub(r"<details>.*</details>", "", text, flags=re.DOTALL).lower()
    assert not re.search(r"\binf\b", text)


def test_other_folders_are_rejected(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        report_html(tmp_path)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 150), (2.7, 7.9), (0, 3e-3), (-1, 1), (1e-9, 2e-9), (0, 1e7)]
)
def test_ticks_are_few_round_numbers_in_range(low, high):
    found = ticks(low, high)
    assert 3 <= len(found) <= 8
    assert all(low - 1e-12 <= x <= high + 1e-12 for x in found)


def test_number_labels_are_short():
    values = {0: "0", 0.5: "0.5", 8192: "8,192", 125_000: "125k", 2_500_000: "2.5M", 3e-4: "3e-4"}
    assert {value: number(value) for value in values} == values


def test_charts_show_finite_points_and_escape_their_text():
    lines = [Line(EVIL, [1, 2, 3], [1.0, float("nan"), 3.0], has_dots=True)]
    text = chart(EVIL, lines)
    assert text.count("<circle") == 2
    assert "<script" not in text
    assert chart("empty", [Line("x", [1], [float("inf")])]) == ""
    assert "<polyline" in chart("one", [Line("x", [1], [1.0])])
    many = chart("many", [Line("x", range(100_000), [float(i % 7) for i in range(100_000)])])
    assert len(many) < 10_000
