"""Defaults that `tvq sample`, `generate_text` and the server share."""

NEW_TOKENS = 500
"""Maximum number of tokens to generate."""
TEMPERATURE = 1.0
TOP_P = 0.95
