"""Upload of an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from transformer_vq.errors import UserError

STALE = ["*.safetensors", "*.safetensors.index.json"]
"""Files of an earlier upload that transformers could load instead of the new ones."""


def check_can_push(repo_id: str) -> None:
    """Raise UserError if an upload is certain to fail; does not use the network."""
    from huggingface_hub import get_token, is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise UserError(
            f"--push-to-hub {repo_id}: give a name such as my-model or my-organization/my-model"
        ) from None
    if is_offline_mode():
        raise UserError("--push-to-hub: HF_HUB_OFFLINE is set; unset it to use the network")
    if get_token() is None:
        raise UserError("--push-to-hub: not logged in to the Hugging Face Hub; run `hf auth login`")


def push_folder(folder: Path, repo_id: str, private: bool = False) -> str:
    """Upload a folder to a model repository, which is created if needed; return its address.

    private: for a new repository. An existing public one is rejected, so that nothing is published
    by mistake. Weights of an earlier upload that are not in the folder are deleted.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo.repo_id).private:
            raise UserError(
                f"--private: {repo.repo_id} exists and is public; use another --push-to-hub, or "
                f"make it private in its settings. {folder} is complete"
            )
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message="Upload a Transformer-VQ model",
            delete_patterns=STALE,
        )
    except UserError:
        raise
    except Exception as error:  # versions of huggingface_hub use different HTTP libraries
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"--push-to-hub {repo_id}: {reason:.300}; {folder} is complete, retry with "
            f"`hf upload {repo_id} {folder}`"
        ) from error
    return str(repo)
