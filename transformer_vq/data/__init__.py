"""Data: sources of tokens, prepared corpora on disk, and batches for truncated BPTT."""
