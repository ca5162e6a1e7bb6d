"""The code blocks of the guide run, also those that need client libraries (`py`)."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "hugging-face.md"
BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def test_all_blocks_of_the_guide_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for code in BLOCK.findall(GUIDE.read_text()):
        exec(compile(code, GUIDE.name, "exec"), namespace)
