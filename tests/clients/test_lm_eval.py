"""lm-evaluation-harness: likelihoods equal those of `tvq eval`, for any length and batch size."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import tiny_run
from lm_eval.api.instance import Instance

from transformer_vq.config import DataConfig
from transformer_vq.generation.decode import generate
from transformer_vq.generation.prefill import SEGMENT_LEN, prefill
from transformer_vq.hf.export import export
from transformer_vq.hf.lm_eval import TransformerVQLM
from transformer_vq.training.checkpoint import load_model, read_tokenizer
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import train

PAIRS = [
    *(("the cat", " sat"), ("the cat ", "sat"), ("the cat", " ran off"), ("the mat", " s")),
    *(("caf\u00e9", "\n"), ("caf\u00e9", "\u00e9"), ("a" * 300, " then it ran"), ("", "the")),
]
# Both libraries warn about deprecated parts of their dependencies.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return runs on bytes and their exports, with and without an end-of-document token."""
    result = {}
    for has_end in (True, False):
        folder = tmp_path_factory.mktemp("run")
        config = tiny_run(
            folder,
            train={"steps": 60, "seq_len": 512, "backprop_len": 512, "eval_every": 60},
            optim={"lr": 1e-2},
            model={"block_len": 64, "n_layer": 1, "vocab_size": 256 + has_end},
        )
        config = replace(config, data=replace(config.data, end_of_document=has_end))
        train(config, folder / "run")
        export(folder / "run", folder / "model")
        result[has_end] = folder / "run", folder / "model"
    return result


@pytest.fixture(params=[True, False], ids=["end", "no end"])
def trained(request, runs):
    return runs[request.param]


@pytest.fixture
def trained_with_end(runs):
    return runs[True]


def harness(folder, batch_size=1):
    return TransformerVQLM(str(folder), device="cpu", batch_size=batch_size)


def ask(model, kind, *arguments):
    requests = [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]
    return getattr(model, kind)(requests, disable_tqdm=True)


def document(n: int, seed: int = 0) -> str:
    """Return n characters, of which some take several bytes."""
    words = ["the", "a", "cat", "mat", "sat", "caf\u00e9", "\u4e2d\u6587", "then\n", "it", "ran"]
    return " ".join(random.Random(seed).choices(words, k=n))[:n]


def nats(run, prompt: list[int], tokens: list[int]) -> float:
    """Return the log-likelihood of tokens after a prompt, by the core model."""
    with torch.no_grad():
        logits = load_model(run)[0].eval()(torch.tensor([prompt + tokens[:-1]])).logits
    chosen = logits[0, len(prompt) - 1 :].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
    return float(chosen.double().sum())


def test_rolling_likelihood_of_a_long_document_equals_evaluate(trained, tmp_path):
    run, folder = trained
    text = document(90_000)
    (tmp_path / "long.txt").write_text(text, "utf-8", newline="")
    data = DataConfig(path=(str(tmp_path / "long.txt"),), cache=str(tmp_path / "cache"))
    want = evaluate(run, data=data, split="all", protocols=["streaming"]).protocols["streaming"]
    assert want.tokens > 100_000
    (got,) = ask(harness(folder), "loglikelihood_rolling", (text,))
    tokenizer = read_tokenizer(run)
    if tokenizer.eod is not None:  # `tvq eval` also scores the end of the document
        context = prefill(load_model(run)[0], [[tokenizer.bos, *tokenizer.encode(text)]])
        got += float(context.logits[0].log_softmax(-1)[tokenizer.eod])
    assert -got == pytest.approx(want.nats, rel=1e-7)
    bits_per_byte = -got / math.log(2) / len(text.encode())
    assert bits_per_byte == pytest.approx(want.bits_per_byte, rel=1e-7)


def test_rolling_likelihood_of_short_and_empty_documents(trained):
    run, folder = trained
    tokenizer, texts = read_tokenizer(run), [document(n, seed=n) for n in (30, 0, 1)]
    got = ask(harness(folder, batch_size=4), "loglikelihood_rolling", *((x,) for x in texts))
    assert got[1] == 0
    for i in (0, 2):
        want = nats(run, [tokenizer.bos], tokenizer.encode(texts[i]))
        assert got[i] == pytest.approx(want, rel=1e-6)


def test_likelihoods_have_one_bos_and_do_not_depend_on_the_batch_size(trained):
    run, folder = trained
    tokenizer = read_tokenizer(run)
    single, batches = (ask(harness(folder, batch_size=n), "loglikelihood", *PAIRS) for n in (1, 4))
    assert [hit for _, hit in single] == [hit for _, hit in batches]
    for pair, (got, _), (other, _) in zip(PAIRS, single, batches, strict=True):
        assert got == pytest.approx(other, rel=1e-5)
        n = len(pair[0].rstrip())  # the harness scores spaces with the continuation
        text = "".join(pair)
        prompt = [tokenizer.bos, *tokenizer.encode(text[:n])]
        assert got == pytest.approx(nats(run, prompt, tokenizer.encode(text[n:])), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generate_until_continues_prompts_up_to_a_stop_string(trained, batch_size):
    run, folder = trained
    core, tokenizer = load_model(run)[0], read_tokenizer(run)
    prompts = ["the cat", "a", "then it ran off and sat on the mat"]
    texts = []
    for prompt in prompts:
        tokens = generate(core, [tokenizer.bos, *tokenizer.encode(prompt)], 12, temperature=0)
        ends = [i for i, token in enumerate(tokens) if token == tokenizer.eod]
        texts.append(tokenizer.decode(tokens[: ends[0]] if ends else tokens))
    texts = [text.decode("utf-8", "replace") for text in texts]
    stop = next(x for x in texts[0] if x.isprintable() and x.isascii())
    model = harness(folder, batch_size)
    for until in ([], [stop]):
        options = {"until": until, "max_gen_toks": 12, "do_sample": False}
        got = ask(model, "generate_until", *((prompt, options) for prompt in prompts))
        assert got == [text.split(stop)[0] if until else text for text in texts]


def test_logits_exist_for_one_segment_at_a_time(trained_with_end):
    model = harness(trained_with_end[1])
    lengths = []
    model.model.lm_head.register_forward_hook(lambda *x: lengths.append(x[-1].shape[1]))
    ask(model, "loglikelihood_rolling", (document(3 * SEGMENT_LEN),))
    assert max(lengths) == SEGMENT_LEN


def test_command_evaluates_local_tasks(trained_with_end, tmp_path):
    folder = trained_with_end[1]
    rows = [{"text": "the cat", "choices": [" sat", " mat"], "label": 1}] * 3
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data.jsonl").write_text(lines)
    (tmp_path / "task.yaml").write_text(
        "task: cats\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: '{{text}}'\n"
        "doc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{label}}'\n"
        "target_delimiter: ''\n"
        "metric_list: [{metric: acc}]\n"
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "transformer_vq.hf.lm_eval"),
            *("--model", "tvq", "--device", "cpu", "--batch_size", "2", "--tasks", "cats"),
            *("--model_args", f"pretrained={folder},trust_remote_code=True"),
            *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")),
        ],
        check=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
    )
    (path,) = tmp_path.glob("out*.json")
    got = json.loads(path.read_text())["results"]["cats"]["acc,none"]
    (first, _), (second, _) = ask(
        harness(folder), "loglikelihood", *(("the cat", choice) for choice in rows[0]["choices"])
    )
    assert got == float(second > first)
