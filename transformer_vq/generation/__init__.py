"""Generation: prefill, decode, sampling rules, text streaming and snapshots."""

# Defaults that `tvq sample`, `generate_text` and the server share.
NEW_TOKENS = 500
TEMPERATURE = 1.0
TOP_P = 0.95
