"""Servers of each engine: recognition, requests and answers. Fake servers write answers in each engine's form."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest

from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.probing.runs.run_measurement import run_server
from dflash_cli.probing.runs.server_run import ServerRequest
from dflash_cli.probing.servers.http_client import HttpClient, ServerUnreachable
from dflash_cli.probing.servers.inference_server import SERVERS, Asked, InferenceServer, ServerTokenizer, server_engines
from dflash_cli.probing.servers.recognition import open_server
from dflash_runtime.errors import DFlashError, RequestError, UnsupportedError, UsageError
from dflash_testing.fake_engines import FakeEngine, K, Text, make_text
from dflash_testing.inference_servers import serving
from dflash_testing.refusals import refuses

PROMPTS = [(7, 8, 9 + index) for index in range(14)]
LENGTH = 40
ENGINES: dict[str, dict[str, Any]] = {
    "vLLM that reports a summary": {"reports": "summary"},
    "vLLM that reports each step": {"reports": "detailed"},
    "vLLM before 0.29, by its counters": {"release": "0.24.0"},
    "vLLM, by counters that it redirects to": {"release": "0.24.0", "metrics_slash": "/"},
    "SGLang": {"style": "sglang", "release": "0.5.23"},
    "SGLang with earlier names": {"style": "sglang", "release": "0.5.10", "old_names": True},
    "llama.cpp, by its counters": {"style": "llama.cpp"},
    "llama.cpp of an earlier release": {"style": "llama.cpp", "old_names": True},
}


def open_fake(fake: FakeEngine, **options: Any) -> InferenceServer:
    return open_server(HttpClient(fake.url, num_retries=0), **options)


def measure(engine: FakeEngine, concurrency: int = 1) -> Summary:
    server = open_fake(engine)
    request = ServerRequest(
        rows=[PromptRow(index=index, kind="prompt_token_ids", value=list(ids)) for index, ids in enumerate(PROMPTS)],
        asked=Asked(max_new_tokens=LENGTH),
        tokenizer=ServerTokenizer(server),
    )
    return run_server(server, server.describe(), request, name="run", concurrency=concurrency).total


def made() -> list[Text]:
    """The answers of the fake servers, with their steps."""
    return [make_text(ids).cut(LENGTH) for ids in PROMPTS]


@pytest.fixture(scope="module")
def expected() -> dict[str, float]:
    """The acceptance length of these answers by each project's definition, computed here."""
    texts = made()
    steps, accepted = sum(len(text.accepted) for text in texts), sum(sum(text.accepted) for text in texts)
    return {
        "vllm": 1 + accepted / steps,
        "sglang": fmean(LENGTH / len(text.accepted) for text in texts),
        "zlab": fmean((LENGTH - 1) / len(text.accepted) for text in texts),
        "zlab_untruncated": fmean(1 + fmean(text.accepted) for text in texts),
        "committed": sum(LENGTH - 1 for _ in texts) / steps,
    }


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_is_read_as_every_definition_says(name: str, expected: dict[str, float]) -> None:
    with serving(FakeEngine(**ENGINES[name])) as engine:
        total = measure(engine)
    assert {key: total.definitions[key] for key in expected} == pytest.approx(expected)
    positions = [sum(number > place for text in made() for number in text.accepted) for place in range(K)]
    assert total.counts.per_pos_accepted == positions
    assert getattr(total.acceptance_len_no_interval, "id", None) == "too-few-prompts", "the answers bring their steps"


def test_counters_of_requests_that_overlap_give_totals_and_no_interval(expected: dict[str, float]) -> None:
    with serving(FakeEngine()) as engine:
        total = measure(engine, concurrency=4)
    assert total.counts.acceptance_len == pytest.approx(expected["vllm"])
    assert total.acceptance_len_interval is None
    assert total.acceptance_len_no_interval
    assert total.histogram == tuple(
        sum(number == value for text in made() for number in text.accepted) for value in range(K + 1)
    )


@pytest.mark.parametrize("old_names", [False, True])
def test_timings_of_llama_cpp_bound_the_length_from_above(expected: dict[str, float], old_names: bool) -> None:
    with serving(FakeEngine(style="llama.cpp", has_metrics=False, old_names=old_names)) as engine:
        server = open_fake(engine)
        answers = [server.answer(ids, Asked(max_new_tokens=LENGTH)) for ids in PROMPTS]
    assert {answer.num_draft_tokens for answer in answers} == {K if old_names else None}
    steps = sum(answer.num_steps or 0 for answer in answers)
    assert steps <= sum(len(text.accepted) for text in made())
    assert 1 + sum(answer.num_accepted or 0 for answer in answers) / steps >= expected["vllm"] - 1e-9


def test_the_steps_of_a_summary_by_draft_length_keep_both_numbers() -> None:
    from dflash_cli.probing.servers.vllm_server import _steps

    found = {"acceptance_histogram": [1, 1, 1], "acceptance_histogram_by_draft_length": {"1": [1, 0], "2": [0, 1, 1]}}
    steps = _steps({"metrics": {"speculative_decoding": found}})
    assert steps is not None
    assert sorted(zip(steps.drafted, steps.accepted, strict=True)) == [(1, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize(("reports", "is_ordered"), [("summary", False), ("detailed", True)])
def test_decay_with_context_is_looked_for_only_where_the_order_of_steps_is_known(
    reports: Any, is_ordered: bool
) -> None:
    texts: dict[tuple[int, ...], Text] = {ids: make_text(ids, length=400) for ids in PROMPTS[:2]}
    with serving(FakeEngine(reports=reports, texts=texts)) as engine:
        server = open_fake(engine)
        request = ServerRequest(
            rows=[PromptRow(index=index, kind="prompt_token_ids", value=list(ids)) for index, ids in enumerate(texts)],
            asked=Asked(max_new_tokens=400),
            tokenizer=ServerTokenizer(server),
        )
        run = run_server(server, server.describe(), request, name="run", concurrency=1)
    for answer, text in zip(run.answers, texts.values(), strict=True):
        assert list(answer.output.acceptance_lengths) != sorted(answer.output.acceptance_lengths)
        assert (answer.output.acceptance_lengths == tuple(number + 1 for number in text.accepted)) == is_ordered
    assert all((item.num_far_steps > 0) == is_ordered for item in run.conversations)


@pytest.fixture(params=["vllm", "sglang", "llama.cpp"])
def engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    with serving(FakeEngine(style=request.param)) as engine:
        yield engine


def test_an_engine_is_known_by_its_list_of_models(engine: FakeEngine) -> None:
    server = open_fake(engine)
    assert server.name == engine.style
    facts = server.describe()
    num_draft_tokens = None if engine.style == "llama.cpp" else K
    assert (facts.model, facts.is_drafting, facts.num_draft_tokens) == ("org/model", True, num_draft_tokens)


def test_a_server_gives_its_likeliest_tokens_by_id(engine: FakeEngine) -> None:
    server = open_fake(engine)
    answer = server.answer((7, 8, 9), Asked(max_new_tokens=LENGTH))
    found = server.next_logprobs((7, 8, 9, *answer.token_ids[:4]))
    token = answer.token_ids[4]
    assert found == pytest.approx({token: -0.1, token + 1: -0.15, 5: -9.0})


def test_texts_and_conversations_become_ids_by_the_server(engine: FakeEngine) -> None:
    tokenizer = ServerTokenizer(open_fake(engine))
    assert tokenizer.encode("def") == [100, 101, 102]
    rendered = tokenizer.render([{"role": "user", "content": "hi"}], where="row")
    assert "".join(map(chr, rendered)).endswith("hi<assistant>")


def test_an_unknown_server_and_an_unknown_model_are_refused() -> None:
    with serving(FakeEngine()) as engine:
        with refuses(UsageError, field="--served-model", found="other") as error:
            open_fake(engine, model="other")
        assert "org/model" in str(error.value.expected)
        owners = {name: SERVERS[name].owner for name in server_engines()}
        assert sorted(owners.values()) == ["llamacpp", "sglang", "vllm"]
        with refuses(UsageError, field="--engine", found="vlm", expected="auto, llama.cpp, sglang, vllm"):
            open_fake(engine, engine="vlm")


@pytest.mark.parametrize(
    ("fault", "kind", "error_id", "facts"),
    [
        ("timeout", ServerUnreachable, "no-answer", ["0.2 s", "1 try"]),
        ("500", ServerUnreachable, "no-answer", ["500", "1 try"]),
        ("501", RequestError, "server-refused", ["501"]),
        ("400", RequestError, "server-refused", ["400", "the prompt is longer than the model reads"]),
        ("garbage", UnsupportedError, "not-json", ["<html>a proxy"]),
        ("cut", UnsupportedError, "foreign-answer", ["token_ids", "vLLM"]),
    ],
)
def test_failed_requests_raise_an_error_of_one_line(
    fault: Any, kind: type[DFlashError], error_id: str, facts: list[str]
) -> None:
    with serving(FakeEngine(faults={0: fault})) as engine:
        server = open_server(HttpClient(engine.url, num_retries=0, timeout_s=0.2))
        with refuses(kind, error_id, path=f"{engine.url}/v1/completions") as error:
            server.answer((1, 2), Asked(max_new_tokens=4))
    assert all(fact in error.value.message for fact in facts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
def test_malformed_urls_are_refused(url: str) -> None:
    with refuses(UsageError, "usage-error", field="URL", found=url):
        HttpClient(url)


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    with refuses(UsageError, "password-in-url", field="URL", found=None) as error:
        HttpClient("http://user:secret@host")
    assert "secret" not in str(error.value)


def test_the_path_of_openai_clients_is_taken_off_a_url() -> None:
    assert HttpClient("localhost:8000/v1/").url == "http://localhost:8000"
    assert HttpClient("https://host/served/v1").url == "https://host/served"
