"""The pages of the project: links, paths, options, make targets, extras and navigation."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import transformer_vq

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "RESULTS.md", *SITE]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SHARED_OPTIONS = [
    ROOT / path
    for path in ("benchmarks/common.py", "benchmarks/steps.py", "transformer_vq/config.py")
]
MAKEFILE = (ROOT / "Makefile").read_text()
REFERENCE = dict(
    re.findall(
        r"^## tvq (\w+)\n\n```text\n(.*?)^```$",
        (DOCS / "reference" / "commands.md").read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
)


def anchors(page: Path) -> set[str]:
    """Return the ids that MkDocs gives to the headings of a page."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request):
    return request.param


def test_links_anchors_and_paths_exist(page):
    text = page.read_text()
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" in target:
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
        elif page in SITE and not file.absolute().is_relative_to(DOCS):
            missing.append(f"{target} is not part of the site")
    folders = "benchmarks|docs|examples|tests|transformer_vq"
    for quoted, included in re.findall(rf"`((?:{folders})/[\w./-]*)|--8<-- \"([^\"]+)\"", text):
        if not (ROOT / (quoted or included)).exists():
            missing.append(quoted or included)
    assert missing == []


def test_commands_options_targets_and_extras_exist(page):
    if page.name == "CHANGELOG.md":
        return  # names what went
    text, wrong = page.read_text(), []
    for line in re.findall(r"`tvq ([a-z][^`\n]*)", text):
        known = REFERENCE.get(line.split()[0], "").replace(",", " ").replace("\n", " ")
        options = re.findall(r"--[\w.-]+", line)
        if not known or any(f"{option} " not in known for option in options):
            wrong.append(f"tvq {line}")
    for script, options in re.findall(r"python (benchmarks/\w+\.py)((?:[^`\n\\]|\\\n)*)", text):
        names = {option.rpartition(".")[2] for option in re.findall(r"--([\w.-]+)", options)}
        known = "".join(path.read_text() for path in (ROOT / script, *SHARED_OPTIONS))
        wrong += [f"{script} --{x}" for x in names if f" {x.replace('-', '_')}: " not in known]
    targets = re.findall(r"(?:^    |`)make ([\w-]+)", text, flags=re.MULTILINE)
    wrong += [f"make {target}" for target in targets if f"\n{target}:" not in MAKEFILE]
    named = [x for extras in re.findall(r"\.\[([\w,]+)\]'", text) for x in extras.split(",")]
    wrong += [f"extra {extra}" for extra in named if extra not in EXTRAS]
    assert wrong == []


@pytest.mark.parametrize("name", ["paper.md", "official.md"])
def test_named_code_and_tests_exist(name):
    """`path.py` `name` is in the package, `path.py::name` and `::name` are tests."""
    named = re.findall(r"`([\w/]+\.py)?(?:::|` `)([\w.]+)`", (DOCS / name).read_text())
    assert len(named) > 20
    missing = []
    for path, names in named:
        file = ROOT / (path or "tests/test_official_differences.py")
        text = (file if file.exists() else ROOT / "transformer_vq" / path).read_text()
        for part in names.split("."):
            if not re.search(rf"^ *(?:def |class )?{part}\b", text, re.M):
                missing.append(f"{path} {part}")
    assert missing == []


def test_cpu_version_of_torch_is_the_pinned_one():
    (pinned,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    for page in (ROOT / "README.md", DOCS / "getting-started.md"):
        command = f"pip install {pinned} --index-url https://download.pytorch.org/whl/cpu"
        assert command in page.read_text()


def test_navigation_lists_every_page_once():
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*: ([\w/.-]+\.md)$", config, flags=re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in SITE}
    assert sorted(listed) == sorted({*pages, "measurements/RESULTS.md"})


def test_api_page_documents_every_public_name():
    text = (DOCS / "reference" / "api.md").read_text()
    documented = re.findall(r"^::: transformer_vq\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(transformer_vq.__all__)


def test_commands_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate_commands.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"
