"""SentencePiece vocabularies for tests; the package only reads them."""

import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Write a lossless BPE vocabulary with bytes, line ends and bos, like that of PG-19."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines(keepends=True)),
        model_writer=model,
        minloglevel=2,
        model_type="bpe",
        vocab_size=vocab_size,
        bos_id=1,
        eos_id=-1,
        user_defined_symbols=["\n"],
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
    )
    path.write_bytes(model.getvalue())
