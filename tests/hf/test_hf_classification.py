"""Sequence classification: features of the last token, and a loss for each kind of problem."""

import pytest
import torch
from helpers import assert_close
from transformers import AutoConfig, AutoModelForSequenceClassification

from transformer_vq.hf import TransformerVQForSequenceClassification

TOKENS = torch.randint(1, 256, (2, 30), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def classifier(folder) -> TransformerVQForSequenceClassification:
    """Return a classifier with the body of the saved model and a new head."""
    config = AutoConfig.from_pretrained(folder, num_labels=3, pad_token_id=0)
    return AutoModelForSequenceClassification.from_pretrained(folder, config=config)


def test_classifier_uses_the_features_of_the_last_token(classifier, model):
    assert isinstance(classifier, TransformerVQForSequenceClassification)
    want = classifier.score(model.model(TOKENS).last_hidden_state[:, -1])
    assert_close("logits", classifier(TOKENS).logits, want)
    assert classifier(TOKENS).logits.shape == (2, 3)


@pytest.mark.parametrize(("side", "with_mask"), [("left", True), ("right", True), ("right", False)])
def test_padding_does_not_change_the_classes(classifier, side, with_mask):
    padding = torch.zeros(2, 5, dtype=torch.int64)
    parts = [padding, TOKENS] if side == "left" else [TOKENS, padding]
    padded = torch.cat(parts, dim=1)
    mask = (padded != 0).long() if with_mask else None
    assert_close("logits", classifier(padded, mask).logits, classifier(TOKENS).logits)


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 2]), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])]
)
def test_loss_includes_the_commitment_loss(classifier, labels):
    output = classifier(TOKENS, labels=labels)
    if labels.ndim == 1:
        want = torch.nn.functional.cross_entropy(output.logits, labels)
    else:
        want = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, labels)
    commit_loss = classifier.model(TOKENS).commit_loss
    assert_close("loss", output.loss, want + classifier.config.commit_coef * commit_loss)


def test_saved_classifier_gives_the_same_logits(classifier, tmp_path):
    classifier.save_pretrained(tmp_path / "classifier")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(loaded(TOKENS).logits, classifier(TOKENS).logits)
    assert torch.equal(loaded(TOKENS, return_dict=False)[0], classifier(TOKENS).logits)
