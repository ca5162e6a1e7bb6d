"""Loading with `trust_remote_code=True`: each saved folder has a Python file with the classes.

`auto_map` in config.json and tokenizer_config.json names the classes of that file. It only imports
them from this package, so that models have one implementation and one set of registered classes.
"""

from __future__ import annotations

import os
from pathlib import Path

from transformer_vq.files import write_text

MODULE = "transformer_vq_classes"
FILE = f"{MODULE}.py"
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.TransformerVQConfig",
    "AutoModel": f"{MODULE}.TransformerVQModel",
    "AutoModelForCausalLM": f"{MODULE}.TransformerVQForCausalLM",
    "AutoModelForSequenceClassification": f"{MODULE}.TransformerVQForSequenceClassification",
}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": [f"{MODULE}.TransformerVQTokenizer", None]}
# transformers reports imports outside of `try` itself, and suggests a package name that is wrong.
CODE = '''\
"""Classes for `trust_remote_code=True`, imported from the package transformer-vq."""

try:
    from transformer_vq.hf import (
        TransformerVQConfig,
        TransformerVQForCausalLM,
        TransformerVQForSequenceClassification,
        TransformerVQModel,
        TransformerVQTokenizer,
    )
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformer_vq":
        raise
    raise ImportError(
        "this model needs the Python package transformer-vq: git clone its repository, then "
        "pip install 'PATH-OF-THE-CLONE[hf]'"
    ) from None

__all__ = [
    "TransformerVQConfig",
    "TransformerVQForCausalLM",
    "TransformerVQForSequenceClassification",
    "TransformerVQModel",
    "TransformerVQTokenizer",
]
'''


class FixedAutoMap:
    """A class whose `auto_map` always names the file that `write_remote_code` writes."""

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Do nothing.

        In transformers, this makes `save_pretrained` copy the source file of the class. A copy
        would be a second implementation, next to the one in this package.
        """


def write_remote_code(folder: str | os.PathLike[str]) -> None:
    """Write the file that `auto_map` refers to."""
    write_text(Path(folder) / FILE, CODE)
