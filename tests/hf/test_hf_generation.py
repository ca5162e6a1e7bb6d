"""`generate` of transformers compared with ours, with and without a cache."""

import pytest
import torch
from helpers import tiny_config
from transformers import pipeline

from transformer_vq import TransformerVQ
from transformer_vq.generation.decode import generate
from transformer_vq.hf import (
    TransformerVQCache,
    TransformerVQForCausalLM,
    TransformerVQTokenizer,
)

PROMPT = [0, 72, 101, 108, 108, 111, 44, 32]
SHORTER = [0, 72, 105, 33]


def search(model, prompts, **options):
    return model.generate(torch.tensor(prompts), **({"max_new_tokens": 20} | options)).tolist()


def padded(n_more: int = 0) -> dict[str, torch.Tensor]:
    """Return both prompts as one batch, left-padded by `n_more` columns more than needed."""
    rows = [PROMPT, SHORTER]
    width = len(PROMPT) + n_more
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_greedy_search_equals_our_generate(attention):
    core = TransformerVQ(tiny_config(vocab_size=256, attention=attention)).eval()
    model = TransformerVQForCausalLM.from_core(core)
    want = PROMPT + generate(core, PROMPT, 20, temperature=0)
    assert search(model, [PROMPT]) == [want]
    assert search(model, [PROMPT], use_cache=False) == [want]
    assert search(model, [PROMPT], prefill_chunk_size=3) == [want]
    assert search(model, [PROMPT], pad_token_id=0) == [want]  # bos is not masked


def test_generate_without_a_prompt_starts_from_bos(model, core):
    assert model.generate(max_new_tokens=5).tolist() == [[0, *generate(core, [0], 5, 0.0)]]


def test_beam_search_does_not_depend_on_the_cache(model):
    options = padded() | {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 2}
    got = model.generate(**options)
    assert got.shape == (4, len(PROMPT) + 12)
    assert torch.equal(got, model.generate(**options, use_cache=False))


def test_padded_batch_generates_the_same_as_single_prompts(model):
    inputs = padded(5)
    got = model.generate(**inputs, max_new_tokens=20)[:, -20:].tolist()
    assert got == [search(model, [row])[0][-20:] for row in (PROMPT, SHORTER)]


def test_generate_continues_from_a_returned_cache(model):
    first = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, return_dict_in_generate=True)
    more = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=12)
    assert more.tolist() == search(model, [PROMPT])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "top_p": 0.9}])
def test_repeated_prompt_cache_serves_several_sequences(model, options):
    def draw(**more):
        torch.manual_seed(0)
        return search(model, [PROMPT], num_return_sequences=3, **options, **more)

    with torch.no_grad():
        cache = model(torch.tensor([PROMPT[:5]])).past_key_values
    cache.batch_repeat_interleave(3)
    assert draw(past_key_values=cache) == draw()


@pytest.mark.parametrize("name", ["static", "offloaded"])
def test_every_cache_implementation_uses_the_state(model, name):
    got = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=20,
        cache_implementation=name,
        return_dict_in_generate=True,
    )
    assert isinstance(got.past_key_values, TransformerVQCache)
    assert got.sequences.tolist() == search(model, [PROMPT])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "paged"}, "continuous batching"),
        ({"prompt_lookup_num_tokens": 3}, "stateful"),
    ],
)
def test_unsupported_kinds_of_generation_are_rejected(model, options, message):
    with pytest.raises(ValueError, match=message):
        search(model, [PROMPT], **options)


def test_pipeline_continues_texts(folder, core):
    generator = pipeline("text-generation", model=str(folder), max_new_tokens=20, do_sample=False)
    tokenizer = TransformerVQTokenizer()
    texts = ["Hello, ", "Hi!", ""]
    want = [
        text + tokenizer.decode(generate(core, tokenizer(text).input_ids, 20, temperature=0))
        for text in texts
    ]
    for options in ({}, {"batch_size": 3}):
        got = [result[0]["generated_text"] for result in generator(texts, **options)]
        assert got == [text.replace("\0", "") for text in want]
