"""Generation: prefill, decode, sampling rules, text streaming and snapshots."""
