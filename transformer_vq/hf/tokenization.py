"""The tokenizers of `data/tokenizers.py` with the transformers interface; ids are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from transformer_vq.data.tokenizers import MODEL_FILE, ByteTokenizer, SentencePieceTokenizer
from transformer_vq.hf.configuration import TOKENIZER_AUTO_MAP, FixedAutoMap, write_remote_code
from transformer_vq.training.checkpoint import TOKENIZER_CONFIG
from transformer_vq.training.loading import check_export


class TransformerVQTokenizer(FixedAutoMap, PreTrainedTokenizer):
    """A byte tokenizer, or a SentencePiece tokenizer if `vocab_file` is given.

    A bos token is put before each text, as in training; `add_special_tokens=False` omits it. Names
    of special tokens inside a text are treated as text. Padding is on the left and uses the bos id,
    so only the attention mask distinguishes it.
    end_of_document: whether the model was trained with a token after each document, the eos token.
    errors: how `decode` handles invalid UTF-8, such as incomplete characters, as in `bytes.decode`.
    """

    vocab_files_names: ClassVar = {"vocab_file": MODEL_FILE}
    model_input_names: ClassVar = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str | None = None,
        kind: str | None = None,
        errors: str = "replace",
        end_of_document: bool = False,
        **kwargs: Any,
    ) -> None:
        if kind == "sentencepiece" and vocab_file is None:
            raise ValueError(f"{MODEL_FILE} is missing; copy it from the exported folder")
        self._core: ByteTokenizer | SentencePieceTokenizer = ByteTokenizer(end_of_document)
        if vocab_file is not None:
            self._core = SentencePieceTokenizer(Path(vocab_file), None, end_of_document)
        self._pieces = self._core.pieces
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        # Special tokens decode to their names, as in transformers; skip_special_tokens omits them.
        self._texts = {
            piece: self._core.decode([i]) or piece.encode() for i, piece in enumerate(self._pieces)
        }
        self.errors = errors
        bos = self._pieces[self._core.bos]
        defaults = {
            "bos_token": bos,
            "pad_token": bos,
            "special_tokens_pattern": "bos",
            "split_special_tokens": True,
        }
        if self._core.eod is not None:
            defaults["eos_token"] = self._pieces[self._core.eod]
        kind = "bytes" if vocab_file is None else "sentencepiece"
        super().__init__(
            kind=kind,
            errors=errors,
            end_of_document=end_of_document,
            **(defaults | kwargs | {"auto_map": TOKENIZER_AUTO_MAP}),
        )

    @property
    def vocab_size(self) -> int:
        return self._core.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Decode the tokens jointly, because a character can span several tokens."""
        data = b"".join(self._texts.get(token, token.encode()) for token in tokens)
        return data.decode("utf-8", self.errors)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> TransformerVQTokenizer:
        """Load a tokenizer as in transformers, but reject corrupt folders."""
        folder = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        check_export(folder, MODEL_FILE, TOKENIZER_CONFIG)
        tokenizer: TransformerVQTokenizer = super().from_pretrained(*args, **kwargs)
        return tokenizer

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Write the vocabulary of a SentencePiece model, and the code of `auto_map`."""
        write_remote_code(save_directory)
        self._core.save(Path(save_directory))
        path = Path(save_directory, MODEL_FILE)
        if isinstance(self._core, ByteTokenizer):
            return ()
        if filename_prefix:
            path = path.rename(path.with_name(f"{filename_prefix}-{path.name}"))
        return (str(path),)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._pieces[token] for token in self._core.encode(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]
