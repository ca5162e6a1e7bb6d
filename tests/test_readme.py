"""README snippets run, and every path, module and test named in the documentation exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")])


def test_snippets_run_in_order():
    # That of the section on Hugging Face needs an export: tests/hf/test_hf_export.py runs it.
    before = README.partition("## Hugging Face")[0]
    snippets = re.findall(r"```python\n(.*?)```", before, flags=re.DOTALL)
    assert len(snippets) >= 2
    namespace: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    targets = [page.parent / link for link in links if "://" not in link]
    paths = re.findall(r"`((?:benchmarks|docs|tests|transformer_vq)/[\w./-]+)", text)
    targets += [ROOT / path for path in paths]
    assert [str(target) for target in targets if not target.exists()] == []


KINDS = "Definition|Theorem|Corollary|Remark|Section|Table|Code"
PAPER = (ROOT / "docs" / "paper.md").read_text()
ROWS = re.findall(rf"^\| ((?:{KINDS})s? [^|]*)\|([^|]*)\|([^|]*)\|$", PAPER, flags=re.MULTILINE)


def test_paper_table_lists_every_numbered_statement():
    named = " ".join(paper for paper, _, _ in ROWS)
    numbers = set(re.findall(r"\d\.\d+", named))
    assert numbers >= {f"2.{n}" for n in range(1, 9)} | {f"3.{n}" for n in range(1, 11)}
    assert all(f"Code {n}" in named for n in range(1, 5))


@pytest.mark.parametrize(("paper", "code", "test"), ROWS, ids=[paper for paper, _, _ in ROWS])
def test_paper_table_names_existing_code_and_tests(paper, code, test):
    for module, name in re.findall(r"`([\w/]+)\.py`(?: `([\w.]+)`)?", code):
        found = importlib.import_module(f"transformer_vq.{module.replace('/', '.')}")
        for part in name.split(".") if name else []:
            found = getattr(found, part)
    path, _, function = test.strip().strip("`").partition("::")
    assert (ROOT / path).is_file()
    assert not function or f"def {function}(" in (ROOT / path).read_text()


def test_the_readme_is_short():
    assert len(README.encode()) <= 10_000
