"""Conversion of pretrained Llama-family models; named so because `convert` is the function."""
