"""The documentation site: links, navigation, options, extras and the generated page."""

import importlib.util
import re
import tomllib
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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_of_commands_in_sentences_exist(page):
    reference = dict(
        re.findall(
            r"^## tvq (\w+(?: [\w-]+)?)\n\n```text\n(.*?)^```$",
            (DOCS / "reference" / "commands.md").read_text(),
            flags=re.DOTALL | re.MULTILINE,
        )
    )
    for line in re.findall(r"`tvq ([^`\n]*)", page.read_text()):
        words = line.split()
        command = words[0]
        for option in re.findall(r"--[\w.-]+", line):
            assert f"{option} " in reference[command].replace(",", " ").replace("\n", " "), line


def test_table_of_extras_agrees_with_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (DOCS / "getting-started.md").read_text(), re.M)
    table = {extra: text for extra, text in rows if extra in extras}
    assert list(table) == [extra for extra, _ in rows[: len(table)]]
    assert table.keys() == extras.keys()
    included = re.search(r"\[(.*)\]", extras["all"][0])[1].split(",")
    assert set(re.findall(r"`(\w+)`", table["all"])) == extras.keys() - {*included, "all"}


def test_api_page_documents_every_public_name():
    text = (DOCS / "reference" / "api.md").read_text()
    documented = re.findall(r"^::: transformer_vq\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(transformer_vq.__all__)


def test_commands_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate_commands.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"
