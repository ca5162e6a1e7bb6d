"""Export of a run as a folder for Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from transformer_vq.data.tokenizers import MODEL_FILE, TOKENIZER_FILES, HFTokenizer, Tokenizer
from transformer_vq.files import atomic_folder
from transformer_vq.hf.checksums import write_checksums
from transformer_vq.hf.fast_tokenizer import write_fast_tokenizer
from transformer_vq.hf.modeling_transformer_vq import TransformerVQForCausalLM
from transformer_vq.hf.tokenization_transformer_vq import TransformerVQTokenizer
from transformer_vq.training.checkpoint import (
    CheckpointError,
    load_model,
    read_config,
    read_tokenizer,
)


def export(run: Path, folder: Path, checkpoint: str = "best") -> str:
    """Write config, weights, codebooks and tokenizer to a new folder, atomically.

    checkpoint: `best`, `last` or a step number. Returns the name of the exported checkpoint. Runs
    on images have no tokenizer, because their tokens are not text.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; choose another folder")
    has_images = read_config(run).data.has_images
    model, which = load_model(run, checkpoint)
    tokenizer = read_tokenizer(run)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise CheckpointError(
            f"{run}: the model has {model.config.vocab_size} tokens, the tokenizer "
            f"{tokenizer.vocab_size}; check that {' or '.join(TOKENIZER_FILES)} is not missing"
        )
    try:
        with atomic_folder(folder) as partial:
            # Rows of a batch that end early are filled with bos, which is also the padding token.
            padding = None if tokenizer.eod is None else tokenizer.bos
            wrapped = TransformerVQForCausalLM.from_core(
                model,
                bos_token_id=tokenizer.bos,
                eos_token_id=tokenizer.eod,
                pad_token_id=padding,
            )
            wrapped.save_pretrained(partial)
            if not has_images:
                _save_tokenizer(tokenizer, run, partial)
            for path in partial.iterdir():  # safetensors creates files with mode 600
                path.chmod(0o666 & ~_umask(partial))
    except SafetensorError as error:
        raise OSError(f"cannot write {folder}: {error}") from error
    return which


def _save_tokenizer(tokenizer: Tokenizer, run: Path, folder: Path) -> None:
    if isinstance(tokenizer, HFTokenizer):
        write_fast_tokenizer(tokenizer, folder)
        write_checksums(folder, fast_tokenizer=True)
        return
    vocabulary = run / MODEL_FILE
    vocab_file = str(vocabulary) if vocabulary.is_file() else None
    ends = tokenizer.eod is not None
    TransformerVQTokenizer(vocab_file, end_of_document=ends).save_pretrained(folder)


def _umask(folder: Path) -> int:
    """Return the umask, derived from the mode of a newly created folder."""
    return 0o777 & ~folder.stat().st_mode
