"""Data: sources of tokens, corpora on disk, batches for truncated BPTT."""
