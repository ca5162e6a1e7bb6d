"""The code blocks of the guides run, also those that need client libraries (`py`)."""

import re
from pathlib import Path

import pytest

from transformer_vq import generate

GUIDES = Path(__file__).parent.parent.parent / "docs" / "guides"
BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["hugging-face.md", "harnesses.md"])
def test_all_blocks_of_a_guide_run_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for code in BLOCK.findall((GUIDES / name).read_text()):
        exec(compile(code, name, "exec"), namespace)
    if name == "harnesses.md":
        want = generate(namespace["model"], [1, 2, 3], 20, temperature=0)
        assert namespace["found"] == want
