"""The documentation site: links, navigation, code blocks, options and the generated page."""

import importlib.util
import re
from pathlib import Path

import pytest

import transformer_vq

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONFIG = (ROOT / "mkdocs.yml").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def blocks(page: Path) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language == "python"]


def anchors(page: Path) -> set[str]:
    """Return the ids that MkDocs gives to the headings of a page."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def test_navigation_lists_every_page_once():
    listed = re.findall(r"^ +- .*: ([\w/.-]+\.md)$", CONFIG, flags=re.MULTILINE)
    assert sorted(listed) == sorted({*map(name, PAGES), "measurements/RESULTS.md"})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_anchors_resolve(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.is_file(), target
        assert file.absolute().is_relative_to(DOCS), f"{target} is not part of the site"
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_named_in_the_text_exist(page):
    pattern = r"`((?:benchmarks|docs|examples|tests|transformer_vq)/[\w./-]*)|--8<-- \"([^\"]+)\""
    paths = [a or b for a, b in re.findall(pattern, page.read_text())]
    assert [path for path in paths if not (ROOT / path).exists()] == []


# Pages whose code starts harnesses and loads transformers several times.
SLOW_PAGES = {"guides/harnesses.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (name(page) in SLOW_PAGES), id=name(page))
        for page in PAGES
        if blocks(page)
    ],
)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    if page.stem == "hugging-face":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_of_commands_exist(page):
    reference = dict(
        re.findall(
            r"^## tvq (\w+(?: [\w-]+)?)\n\n```text\n(.*?)^```$",
            (DOCS / "reference" / "commands.md").read_text(),
            flags=re.DOTALL | re.MULTILINE,
        )
    )
    lines = re.findall(r"(?:^    |`)tvq ([^`\n]*)|-m transformer_vq ([^`\n]*)", page.read_text())
    for line in ("".join(found) for found in lines):
        words = line.split()
        command = " ".join(words[: 1 + (words[:1] == ["bench"])])
        for option in re.findall(r"--[\w.-]+", line):
            assert f"{option} " in reference[command].replace(",", " ").replace("\n", " "), line


def test_api_page_documents_every_public_name():
    text = (DOCS / "reference" / "api.md").read_text()
    documented = re.findall(r"^::: transformer_vq\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(transformer_vq.__all__)


def test_commands_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate_commands.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"
