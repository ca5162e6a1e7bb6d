"""Our models, and three recurrent models of transformers, under the common tests of transformers.

`transformers_suite.py` puts this file next to these tests; it does not run by itself.
"""

import copy
import unittest
from unittest import mock

import torch
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MambaModel,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RecurrentGemmaModel,
    xLSTMConfig,
    xLSTMForCausalLM,
    xLSTMModel,
)
from transformers.models.auto import modeling_auto

from transformer_vq.hf import (
    TransformerVQCache,
    TransformerVQConfig,
    TransformerVQForCausalLM,
    TransformerVQForSequenceClassification,
    TransformerVQModel,
)
from transformer_vq.nn.quantizer import VectorQuantizer

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor

VOCAB_SIZE, BATCH_SIZE, SEQ_LEN = 99, 7, 13


class Tester:
    """Small inputs and a small config, under the names that the common tests read."""

    is_training = True
    batch_size, seq_length, vocab_size = BATCH_SIZE, SEQ_LEN, VOCAB_SIZE
    hidden_size, num_hidden_layers, num_labels = 32, 2, 3

    def __init__(self, config):
        self.config = config

    def get_config(self):
        return copy.deepcopy(self.config)

    def prepare_config_and_inputs_for_common(self):
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class Common(ModelTesterMixin, GenerationTesterMixin):
    has_attentions = False  # the attention matrix is never computed
    make_config = None

    def setUp(self):
        self.model_tester = Tester(type(self).make_config())


class TransformerVQTest(Common, unittest.TestCase):
    all_model_classes = (
        TransformerVQModel,
        TransformerVQForCausalLM,
        TransformerVQForSequenceClassification,
    )
    test_can_init_all_missing_weights_before_2023 = True  # the year is read from a file header

    @staticmethod
    def make_config():
        return TransformerVQConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            d_k=16,
            n_code=16,
            block_len=4,
            bos_token_id=0,
            eos_token_id=VOCAB_SIZE - 1,
            pad_token_id=VOCAB_SIZE - 1,
            num_labels=3,
        )

    @classmethod
    def setUpClass(cls):
        """Enter our classes in the tables of model names, where those of transformers are."""
        tables = {
            "MODEL_MAPPING_NAMES": TransformerVQModel,
            "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": TransformerVQForCausalLM,
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": (
                TransformerVQForSequenceClassification
            ),
        }
        for name, model in tables.items():
            table = getattr(modeling_auto, name)
            cls.enterClassContext(mock.patch.dict(table, {"transformer_vq": model.__name__}))

    def test_torch_save_load(self):
        """The original cannot compare boolean buffers: it calls the dict that holds them."""

        def as_numbers(model, *args, **kwargs):
            tensors = torch.nn.Module.state_dict(model, *args, **kwargs)
            tensors.update({n: x.byte() for n, x in tensors.items() if x.dtype == torch.bool})
            return tensors

        with mock.patch.object(PreTrainedModel, "state_dict", as_numbers, create=True):
            super().test_torch_save_load()

    if hasattr(Common, "test_left_padding_compatibility"):  # only with a checkout

        def test_left_padding_compatibility(self):
            """The original skips models without attention weights, but padding is supported."""
            with mock.patch.object(type(self), "has_attentions", True):
                super().test_left_padding_compatibility()

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """The original checks keys and values that grow with the length; our state does not."""
        cache = past_key_values
        assert isinstance(cache, TransformerVQCache)
        assert cache.get_seq_length() == seq_length
        assert len(cache.state.layers) == 2 * config.num_hidden_layers
        for layer in cache.state.layers:
            assert layer.k.shape == (batch_size, 1, config.block_len, config.d_k)
            assert layer.cache.count.shape == (batch_size, 1, config.n_code)

    def test_init_weights_can_init_buffers(self):
        """The original compares values, so the random codebooks get constant ones here."""

        def constant(module):
            module.c_sum.fill_(0.5)
            module.c_count.fill_(1.0)
            module.started.fill_(module.codebook_init == "random")

        normal = torch.nn.init.normal_

        def fill(x, mean=0.0, std=1.0, generator=None):
            is_codebook = x.ndim == 3
            return x.fill_(0.5) if is_codebook else normal(x, mean, std, generator)

        name = "transformers.initialization.TORCH_INIT_FUNCTIONS"
        with (
            mock.patch.object(VectorQuantizer, "reset_parameters", constant),
            mock.patch.dict(name, {"normal_": fill}),
        ):
            super().test_init_weights_can_init_buffers()


class MambaTest(Common, unittest.TestCase):
    all_model_classes = (MambaModel, MambaForCausalLM)

    @staticmethod
    def make_config():
        return MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2)


class XLSTMTest(Common, unittest.TestCase):
    all_model_classes = (xLSTMModel, xLSTMForCausalLM)

    @staticmethod
    def make_config():
        return xLSTMConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_heads=2, chunk_size=16
        )


class RecurrentGemmaTest(Common, unittest.TestCase):
    all_model_classes = (RecurrentGemmaModel, RecurrentGemmaForCausalLM)

    @staticmethod
    def make_config():
        return RecurrentGemmaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            lru_width=32,
            attention_window_size=8,
        )
