"""Modules with parameters, thin over `transformer_vq.ops`."""
