"""Run the common model tests of transformers against our classes, and keep nothing.

    python tests/clients/transformers_suite.py
    python tests/clients/transformers_suite.py --checkout ~/transformers

The tests are in the source distribution of the installed version of transformers, which is
downloaded with pip to a temporary folder and deleted afterwards. The tests of generation and export
are only in its git repository; `--checkout` takes them from a clone (`.git` folders work, too).
Needs the extra `clients`.

Prints the outcome per model, and the tests that our models skip or fail with the reason and the
outcome for the recurrent models of transformers. Exits with 1 if one of our models fails a test.
"""

import argparse
import collections
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

HERE = Path(__file__).parent
OURS = "TransformerVQTest"
# Files outside of the source distribution, with the name of the mixin that others import from them.
ONLY_IN_REPOSITORY = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
COLLECT = """
import json, os
def pytest_runtest_logreport(report):
    if os.environ.get("PYTEST_XDIST_WORKER") or report.when != "call" and report.passed:
        return
    model, test = report.nodeid.split("::")[-2:]
    reason = report.longrepr[2] if report.skipped else ""
    if report.failed:
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "error")
    row = {"model": model, "test": test, "outcome": report.outcome, "reason": reason}
    with open("outcomes.jsonl", "a") as file:
        file.write(json.dumps(row) + chr(10))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkout", type=Path, help="clone of huggingface/transformers")
    parser.add_argument("--only", help="pytest -k expression")
    parser.add_argument(
        "--peers", action="store_true", help="also run mamba, xlstm, recurrent_gemma"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        obtain(root, options.checkout)
        chosen = [options.only] if options.only else []
        run(root, " and ".join(chosen if options.peers else [OURS, *chosen]))
        lines = (root / "outcomes.jsonl").read_text().splitlines()
        return report([json.loads(line) for line in lines])


def obtain(root: Path, checkout: Path | None) -> None:
    """Put the common tests in root/tests, and our cases next to them."""
    version = transformers.__version__
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
    ]
    subprocess.run([*command, "--dest", root, f"transformers=={version}"], check=True)
    with tarfile.open(next(root.glob("transformers-*.tar.gz"))) as archive:
        archive.extractall(root, filter="data")
    tests = root / "tests"
    shutil.move(root / f"transformers-{version}" / "tests", tests)
    (tests / "__init__.py").touch()
    for name, mixin in ONLY_IN_REPOSITORY.items():
        path = tests / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        if checkout is None:
            path.write_text(f"class {mixin}:\n    pass\n")
        else:
            path.write_bytes(read_from(checkout, f"tests/{name}"))
    if checkout is not None:  # imported by the tests of export
        helpers = "exporters/test_utils.py"
        (tests / helpers).write_bytes(read_from(checkout, f"tests/{helpers}"))
    shutil.copy(HERE / "suite_cases.py", tests / "test_cases.py")
    (root / "conftest.py").write_text(COLLECT)


def read_from(checkout: Path, name: str) -> bytes:
    """Return a file of a clone: of its work tree, or of the newest commit of a git folder."""
    if (checkout / name).is_file():
        return (checkout / name).read_bytes()
    command = ["git", "--git-dir", checkout, "show", f"HEAD:{name}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def run(root: Path, expression: str) -> None:
    """Run the tests; each outcome is a line of outcomes.jsonl."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_cases.py"]
    command += ["-p", "no:cacheprovider", "-n", "2", "-W", "ignore"]
    if expression:
        command += ["-k", expression]
    subprocess.run(command, cwd=root, check=False)


def report(rows: list[dict[str, str]]) -> int:
    """Print the outcomes; return 1 if one of our models failed a test."""
    # A test may have several outcomes, one per model class: the worst one counts.
    order = ("passed", "skipped", "failed")
    found: dict[str, dict[str, tuple[str, str]]] = collections.defaultdict(dict)
    for row in rows:
        outcome = row["outcome"], row["reason"].strip().split("\n")[0].removeprefix("Skipped: ")
        before = found[row["model"]].get(row["test"], outcome)
        found[row["model"]][row["test"]] = max(before, outcome, key=lambda o: order.index(o[0]))
    for test, (outcome, reason) in sorted(found[OURS].items()):
        if outcome != "passed":
            peers = [m.removesuffix("Test") for m in found if m != OURS]
            same = [m for m in peers if found[f"{m}Test"].get(test, ("", ""))[0] == outcome]
            print(f"{outcome:8}{test}: {reason[:160]}", f"(also {', '.join(same)})" if same else "")
    for model, outcomes in found.items():
        count = collections.Counter(outcome for outcome, _ in outcomes.values())
        print(f"{model}: {', '.join(f'{count[o]} {o}' for o in ('passed', 'failed', 'skipped'))}")
    return int(any(outcome == "failed" for outcome, _ in found[OURS].values()))


if __name__ == "__main__":
    sys.exit(main())
