"""`tvq bench serve`: its requests, what it counts as wrong, and its record."""

import json
from dataclasses import replace
from itertools import islice

import pytest
from helpers import tiny_run
from servers import TOKENIZER, a_model, a_service, running

from transformer_vq.bench.serve import bare_engine, different_texts, served_tokens
from transformer_vq.bench.serve_hostile import ATTACKS
from transformer_vq.bench.serve_load import Load, choices, make_jobs
from transformer_vq.bench.serve_records import ServeSettings
from transformer_vq.cli.main import main
from transformer_vq.training.run import train

SETTINGS = ServeSettings(clients=4, slots=2, minutes=0.02, requests=8, max_prompt=60, max_tokens=9)
TOKENS = list(b"the cat sat on the mat and ran off " * 20)


def test_prompts_come_from_the_text_and_have_all_lengths():
    jobs = make_jobs(TOKENS, TOKENIZER, 300, max_prompt=200, max_tokens=50)
    lengths = [len(job.prompt) for job in jobs]
    assert min(lengths) == 1
    assert 150 < max(lengths) <= 200
    assert {job.max_tokens for job in jobs} >= {1, 2, 3}
    for job in jobs[:20]:
        assert job.prompt[0] == TOKENIZER.bos
        assert bytes(job.prompt[1:]) in bytes(TOKENS)
    assert make_jobs(TOKENS, TOKENIZER, 300, 200, 50) == jobs
    assert all(len(job.prompt) <= len(TOKENS) for job in make_jobs(TOKENS, TOKENIZER, 50, 9**9, 2))


def test_load_sees_complete_cancelled_and_rejected_requests(tmp_path):
    service = a_service(tmp_path)
    jobs = make_jobs(TOKENS, TOKENIZER, 8, 60, 9)
    with running(service) as client:
        load = Load(client.port, jobs, cancelled=0.3, malformed=0.3)
        load.start(4, seconds=1.5)
        seen = load.join()
        assert served_tokens(client.port) > 0
    outcomes = {x.outcome for x in seen}
    assert {x.detail for x in seen if x.outcome == "wrong"} == set()
    assert outcomes == {"complete", "cancelled", "rejected"}
    assert different_texts(service.engine.model, TOKENIZER, jobs, seen, SETTINGS) == (0, 0)
    one = next(x for x in seen if x.outcome == "complete")
    mixed = [*seen, replace(one, text=f"{one.text}!")]
    assert different_texts(service.engine.model, TOKENIZER, jobs, mixed, SETTINGS) == (1, 1)


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_request_is_answered_and_leaves_others_unchanged(tmp_path, monkeypatch, name):
    monkeypatch.setattr("transformer_vq.bench.serve_hostile.IDLE_SECONDS", 0.2)
    with running(a_service(tmp_path)) as client:
        ask = {"prompt": "the cat", "max_tokens": 5, "seed": 0}
        before = client.complete(**ask)["choices"]
        assert ATTACKS[name](client.port) == ""
        assert client.complete(**ask)["choices"] == before


def test_server_that_is_gone_is_an_error(tmp_path):
    with running(a_service(tmp_path)) as client:
        pass
    jobs = make_jobs(TOKENS, TOKENIZER, 8, 60, 9)
    load = Load(client.port, jobs, cancelled=0.0, malformed=0.0)
    load.start(1, seconds=0.05)
    seen = load.join()
    assert {x.outcome for x in seen} == {"wrong"}
    assert "refused" in seen[0].detail


def test_clients_make_the_same_choices_again():
    jobs = make_jobs(TOKENS, TOKENIZER, 8, 60, 9)
    some = list(islice(choices(3, jobs, cancelled=0.3, malformed=0.3), 200))
    assert list(islice(choices(3, jobs, cancelled=0.3, malformed=0.3), 200)) == some
    assert list(islice(choices(4, jobs, cancelled=0.3, malformed=0.3), 200)) != some
    assert {job.number for x in some if (job := x.job) is not None} == set(range(8))
    assert sum(x.job is None for x in some) > 30
    assert all(1 <= x.limit <= x.job.max_tokens for x in some if x.limit is not None)


def test_bare_engine_processes_all_tokens():
    model = a_model()
    jobs = make_jobs(TOKENS, TOKENIZER, 8, 60, 9)
    assert bare_engine(model, TOKENIZER, jobs, SETTINGS) > 0


@pytest.mark.slow
def test_command_writes_a_record(tmp_path, capsys):
    train(tiny_run(tmp_path), tmp_path / "run")
    text = tmp_path / "text" / "0.txt"
    options = f"--clients 4 --slots 2 --minutes 0.1 --requests 8 --max-prompt 60 --text {text}"
    out = tmp_path / "record.json"
    main(["bench", "serve", str(tmp_path / "run"), *options.split(), "--out", str(out), "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(out.read_text())
    assert json.loads(last) == record
    assert str(tmp_path / "text") not in last
    found = record["serve"]
    assert found["outcomes"].get("wrong", 0) == 0, found["errors"]
    assert found["different_texts"] == 0
    assert found["outcomes"]["complete"] > 0
    assert found["share_of_engine"] > 0
    assert table[0] == "| load | result |"
