"""The direction of imports: nothing imports from a layer to its right."""

import ast
import tomllib
from pathlib import Path

import transformer_vq
from transformer_vq.errors import EXTRAS, missing_extra

ROOT = Path(transformer_vq.__file__).parent
LAYERS = [
    {"errors"},
    {"ops", "checks", "config", "device", "files", "memory_use", "progress", "threads"},
    {"nn"},
    {"data", "evaluation", "generation", "interop", "presets", "config_files"},
    {"parallel"},
    {"training", "conversion", "sizes", "plots"},
    {"hf", "serve", "demo", "doctor"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


def test_imports_point_to_the_left():
    # The package itself exports names from every layer, and __main__ calls the command.
    for path in set(ROOT.rglob("*.py")) - {ROOT / "__init__.py", ROOT / "__main__.py"}:
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        names = (x.split(".") for x in imported(path) if x.startswith("transformer_vq."))
        for _, other, *_ in names:
            assert RANK[other] <= RANK[part], f"{path.relative_to(ROOT)} must not import {other}"


def test_ops_need_nothing_but_torch():
    allowed = {"torch", "transformer_vq", "__future__", "dataclasses", "typing"}
    allowed |= {"collections", "contextlib", "functools"}
    for path in (ROOT / "ops").glob("*.py"):
        assert {name.split(".")[0] for name in imported(path)} <= allowed, path


def test_every_public_name_exists():
    assert sorted(set(transformer_vq.__all__)) == sorted(transformer_vq.__all__)
    assert set(transformer_vq.__all__) == set(transformer_vq._MODULE_OF)
    for name in transformer_vq.__all__:
        assert hasattr(transformer_vq, name)


def test_errors_name_the_extras_of_the_project():
    """Every package that `missing_extra` knows is in the extra that it names."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        assert any(x.startswith(package) for x in project["optional-dependencies"][extra])
        assert f"(extra '{extra}'): pip install {package}" in str(missing_extra("this", package))
