"""Settings for the tests with client libraries: no downloads, no telemetry, no progress bars."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from transformers.utils import logging

logging.disable_progress_bar()
