"""Serving: an engine that batches requests continuously, and an OpenAI-compatible HTTP server."""
