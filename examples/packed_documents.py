"""Pack several documents into one row, and pad rows of different lengths.

With `document_ids`, tokens attend only to their own document. With `valid`, padding is ignored by
the state, the positions and the codebooks. In both cases the outputs equal those of each document
on its own. The computation is in float64, so that only rounding errors remain.

Run:     python examples/packed_documents.py
Prints:  the largest difference between packed, padded and separate outputs
"""

import torch

from transformer_vq import ModelConfig, TransformerVQ, document_ids_from_starts

LENGTHS = [700, 45, 320]

torch.manual_seed(0)
config = ModelConfig(vocab_size=256, d_model=64, n_layer=2, d_k=32, n_code=64, block_len=64)
model = TransformerVQ(config).double().eval()
documents = [torch.randint(256, (length,)) for length in LENGTHS]


def difference(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest absolute difference between the logits of the documents."""
    return max((a - b).abs().max().item() for a, b in zip(outputs, expected, strict=True))


with torch.no_grad():
    separate = [model(document[None]).logits[0] for document in documents]

    # One row with all documents. Ids may be any integers that differ between documents.
    tokens = torch.cat(documents)[None]
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    packed = model(tokens, document_ids=ids)
    print(f"packed into one row: {difference(packed.logits[0].split(LENGTHS), separate):.1e}")

    # The same row in two calls. The cut is inside document 0, which continues in the second call.
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[0, torch.tensor(LENGTHS).cumsum(0)[:-1]] = True
    cut = 500
    first = model(tokens[:, :cut], document_ids=document_ids_from_starts(starts[:, :cut]))
    later_ids = document_ids_from_starts(starts[:, cut:], first.state.document)
    second = model(tokens[:, cut:], first.state, document_ids=later_ids)
    logits = torch.cat([first.logits, second.logits], dim=1)[0]
    print(f"packed, in two calls: {difference(logits.split(LENGTHS), separate):.1e}")

    # One row per document, padded on the left. The value of padding tokens does not matter.
    rows = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    valid = torch.zeros_like(rows, dtype=torch.bool)
    for row, document in enumerate(documents):
        rows[row, -len(document) :] = document
        valid[row, -len(document) :] = True
    padded = model(rows, valid=valid)
    ends = [padded.logits[row, -length:] for row, length in enumerate(LENGTHS)]
    print(f"padded to one length: {difference(ends, separate):.1e}")
    print(f"positions after the padded rows: {padded.state.position.tolist()}")
