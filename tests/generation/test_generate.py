"""Generation: decoding token by token agrees with the forward pass."""

import sys

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.generation.decode import generate, stream
from transformer_vq.generation.prefill import prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.nn.quantizer import NotFiniteError

module = sys.modules["transformer_vq.generation.prefill"]
decode = sys.modules["transformer_vq.generation.decode"]
NOT_IDS = "a prompt is a sequence of token ids; use tokenizer.encode(text)"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(params=["shga", "mqa", "mha", "gqa", "full"])
def model(request):
    kind = {"attention": "full"} if request.param == "full" else {"head_type": request.param}
    return TransformerVQ(tiny_config(n_layer=1, **kind)).double().eval()


@pytest.fixture
def vq():
    return TransformerVQ(tiny_config()).double().eval()


@torch.no_grad()
def test_greedy_tokens_are_the_most_likely_ones_of_the_forward_pass(model):
    tokens = generate(model, PROMPT, 12, temperature=0)
    assert len(tokens) == 12
    logits = model(torch.tensor([PROMPT + tokens])).logits[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


def test_the_same_seed_gives_the_same_tokens(model):
    first = generate(model, PROMPT, 12, seed=7)
    torch.manual_seed(99)
    assert generate(model, PROMPT, 12, seed=7) == first
    assert generate(model, PROMPT, 12, seed=8) != first


def test_sampling_does_not_change_the_global_generator(vq):
    before = torch.get_rng_state()
    generate(vq, PROMPT, 3)
    generate(vq, PROMPT, 3, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prefill", [1, 10])
def test_prefill_in_segments_gives_the_same_tokens(model, monkeypatch, prefill):
    whole = generate(model, PROMPT, 8, seed=2)
    monkeypatch.setattr(module, "SEGMENT_LEN", prefill)
    assert generate(model, PROMPT, 8, seed=2) == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": []}, "a prompt has no tokens; start it with the tokenizer's bos"),
        ({"prompt_tokens": [17]}, "token 17 is outside the vocabulary of 17"),
        *(({"prompt_tokens": x}, NOT_IDS) for x in ("abc", ["abc"], [b"abc"], [1.5])),
        ({"temperature": -0.1}, "temperature=-0.1: must be"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1: must be above 0 and at most 1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: must not be negative"),
        ({"top_k": 0}, "top_k=0: must be at least 1, or None"),
    ],
)
def test_bad_arguments_are_rejected_in_one_line(vq, arguments, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        generate(vq, **({"prompt_tokens": PROMPT, "max_new_tokens": 1} | arguments))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(vq, training):
    vq.train(training)
    generate(vq, PROMPT, 2)
    assert vq.training is training
    tokens = stream(vq, prefill(vq, [PROMPT]), 5)
    next(tokens)
    tokens.close()
    assert vq.training is training
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate(vq, [99], 1)
    assert vq.training is training


def test_dropout_is_off_while_sampling():
    model = TransformerVQ(tiny_config(p_dropres=0.5, p_dropsin=0.5, p_droplyr=0.5)).double()
    training = generate(model.train(), PROMPT, 8, temperature=0)
    assert training == generate(model.eval(), PROMPT, 8, temperature=0)


def test_samples_of_a_row_do_not_depend_on_other_rows(model):
    prompts = [PROMPT, PROMPT[:3], PROMPT[:7]]
    together = list(zip(*stream(model, prefill(model, prompts), 9, seed=5), strict=True))
    first = list(stream(model, prefill(model, prompts[:1]), 9, seed=5))
    assert [token for (token,) in first] == list(together[0])
    two = list(zip(*stream(model, prefill(model, prompts[:2]), 9, seed=5), strict=True))
    assert two == together[:2]


def test_prompts_of_different_lengths_equal_separate_prompts(model, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT_LEN", 4)
    prompts = [PROMPT, PROMPT[:1], PROMPT[:6]]
    together = prefill(model, prompts)
    for row, prompt in enumerate(prompts):
        separate = prefill(model, [prompt]).logits[0]
        assert torch.allclose(together.logits[row], separate, rtol=1e-10, atol=1e-12)


def test_a_stop_token_ends_its_row(vq):
    context = prefill(vq, [PROMPT]).repeat(2)
    free = list(zip(*stream(vq, context, 30, seed=1), strict=True))
    stop = free[0][4]
    rows = list(zip(*stream(vq, context, 30, seed=1, stop_tokens=[stop]), strict=True))
    first = free[0].index(stop)
    assert rows[0][: first + 1] == free[0][: first + 1]
    assert set(rows[0][first + 1 :]) <= {None}
    ended = generate(vq, PROMPT, 30, seed=1, stop_tokens=[stop])
    assert ended == list(free[0][: first + 1])


def test_prefill_continues_a_context(vq):
    started = prefill(vq, [PROMPT[:5]])
    whole = prefill(vq, [PROMPT])
    assert torch.allclose(prefill(vq, [PROMPT[5:]], started).logits, whole.logits, rtol=1e-10)


@pytest.fixture
def run_ahead(monkeypatch):
    """Decode in the order of a GPU: a step is launched before the last tokens are read."""
    return lambda: monkeypatch.setattr(decode, "runs_ahead", lambda logits: True)


def test_running_ahead_gives_the_same_tokens(model, run_ahead):
    context = prefill(model, [PROMPT, PROMPT[:4], PROMPT[2:]])
    ends = (), set(range(0, 17, 3))
    want = [list(stream(model, context, 40, seed=3, stop_tokens=stop)) for stop in ends]
    assert 1 < len(want[1]) < 40
    run_ahead()
    assert [list(stream(model, context, 40, seed=3, stop_tokens=stop)) for stop in ends] == want


@pytest.mark.parametrize("ahead", [False, True])
def test_stream_ends_at_the_first_token_without_finite_logits(vq, run_ahead, ahead):
    """An output bias that becomes NaN after the first token stands for a state that overflows."""
    if ahead:
        run_ahead()
    steps = stream(vq, prefill(vq, [PROMPT]), 20, seed=0)
    first = [next(steps) for _ in range(2)]
    torch.nn.init.constant_(vq.head.bias, torch.nan)
    assert all(0 <= token < vq.config.vocab_size for (token,) in first)
    next(steps) if ahead else None  # one step was launched before
    with pytest.raises(NotFiniteError):
        next(steps)


def test_rows_that_have_ended_may_be_without_finite_logits(vq, monkeypatch):
    context = prefill(vq, [PROMPT, PROMPT])
    context.logits[0, 3] = 1e9  # the first row stops at once
    step = decode.Decoder.step

    def broken_first_row(self, tokens):
        logits = step(self, tokens)
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(decode.Decoder, "step", broken_first_row)
    rows = list(stream(vq, context, 4, Sampling(temperature=0), stop_tokens=[3]))
    assert [row[0] for row in rows] == [3, *[None] * (len(rows) - 1)]
