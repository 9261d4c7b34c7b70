"""Fields of SGLang's and llama.cpp's answers as their servers write them: docs/measurements/server-fields.md."""

from collections.abc import Mapping
from typing import Any

import pytest

from dflash_cli.probing.counters.metrics_text import read_metrics
from dflash_cli.probing.servers.inference_server import (
    MEASURED,
    SERVERS,
    Asked,
    InferenceServer,
    Variant,
    server_engines,
)
from dflash_runtime.errors import RequestError
from dflash_testing.fake_engines import FakeEngine, Text
from dflash_testing.refusals import refuses
from dflash_testing.scripted_faults import Telling
from dflash_testing.scripted_operations import Told
from dflash_testing.scripted_servers import L, S, Script, ScriptedClient, V, named, probe_named, probe_script
from dflash_testing.server_forms import METRICS

PLAIN, FIVE = Variant(is_plain=True), Asked(max_new_tokens=5)
STREAMED_AND_WHOLE = """\
sglang:spec_verify_calls_total{engine_type="unified",model_name="m"} 4.0
sglang:num_requests_total{is_streaming="false",model_name="m"} 2.0
sglang:num_requests_total{is_streaming="true",model_name="m"} 1.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 32.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 16.0
"""


class Recording(ScriptedClient):
    """A scripted client that keeps every request."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.bodies: list[tuple[str, Mapping[str, Any]]] = []

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        self.bodies.append((path, body))
        return super().post(path, body)


def opened(script: Script) -> tuple[InferenceServer, Recording]:
    server_engines()
    client: Any = Recording(script)
    return SERVERS[script.style](client, "m"), client


@pytest.mark.parametrize("flags", [(True, True), ()], ids=["by its slots", "by its answers"])
def test_llama_cpp_drafts_although_its_props_say_that_it_does_not(
    flags: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = {"told": {"/slots": None}} if not flags else {"slots": flags}
    found = probe_script(monkeypatch, Telling(**L, **hidden))
    assert (found.server.is_drafting, found.server.method) == (True, "draft-dflash")
    assert named(found) == set()


def test_a_draft_that_llama_cpp_could_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_named(monkeypatch, Telling(**L, slots=(False, False)), {"draft-not-engaged"})


def test_llama_cpp_answers_without_drafts_in_requests_that_are_too_short_for_one() -> None:
    server, client = opened(Script(**L))
    drafted, plain = server.answer((7, 8), FIVE), server.answer((7, 8), FIVE, PLAIN)
    assert drafted.num_drafted
    assert (plain.num_drafted, plain.token_ids) == (None, drafted.token_ids)
    asked = [body for _, body in client.bodies[1:]]
    assert [body["n_predict"] for body in asked] == [2, 2, 1]
    assert [server.num_requests_of(5, item) for item in (MEASURED, PLAIN)] == [1, len(asked)]
    assert [body["cache_prompt"] for body in asked] == [False, True, True]
    assert [body.get("id_slot") for body in asked] == [None, 0, 0]
    assert [tuple(body["prompt"]) for body in asked] == [(7, 8, *drafted.token_ids[:place]) for place in (0, 2, 4)]
    assert not server.can_switch_off


def test_earlier_llama_cpp_answers_without_drafts_by_a_field() -> None:
    server, client = opened(Script(**L, old_names=True))
    drafted, plain = server.answer((7, 8), FIVE), server.answer((7, 8), FIVE, PLAIN)
    assert (drafted.num_draft_tokens, plain.num_drafted) == (client.script.k, None)
    assert [body.get("speculative.n_max") for _, body in client.bodies] == [None, 0]
    assert server.can_switch_off


def test_llama_cpp_tells_the_targets_log_probabilities_in_the_same_way() -> None:
    """Those of drafted tokens are told as 0."""
    server, client = opened(Told(**L))
    ids = server.answer((7, 8), FIVE).token_ids[:4]
    drafted, plain = (server.told_logprobs((7, 8), Asked(max_new_tokens=4), item) for item in (MEASURED, PLAIN))
    own = [value for item in client.script.scores((7, 8, *ids)) for value in item.values()]
    assert plain.entries == tuple(zip(ids, own, strict=True))
    assert drafted.entries == tuple(zip(ids, [own[0], 0.0, 0.0, 0.0], strict=True))
    assert own[1:] != [0.0, 0.0, 0.0]


def test_a_rendered_conversation_gets_the_special_token_that_llama_cpp_takes_off() -> None:
    server, client = opened(Script(**L))
    server.render([{"role": "user", "content": "hi"}], {})
    assert client.bodies[-1][1]["add_special"] is True


def test_the_last_token_of_llama_cpp_may_come_without_a_draft() -> None:
    """Three target tokens and six accepted ones after the first token: two steps, and one token without a draft."""
    server, client = opened(Script(**L))
    timings = {"predicted_n": 10, "draft_n": 14, "draft_n_accepted": 6}
    document = {"tokens": [1] * 10, "content": "", "stop_type": "limit", "timings": timings}
    client.script.early_answer = lambda path, body: document  # type: ignore[method-assign]
    assert server.answer((7, 8), Asked(max_new_tokens=10)).num_steps == 2


def test_the_digits_of_positions_do_not_make_rounded_counters_exact() -> None:
    text = "llamacpp:spec_decode_num_drafts_total 2.34568e+06\nllamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    counters = read_metrics(f'{text}{{position="0"}} 1234567\n', SERVERS["llama.cpp"].counter_names, "").counters
    assert counters is not None
    assert counters.resolution == 10


@pytest.mark.parametrize(
    ("engine", "document"),
    [
        ("sglang", {"output_ids": [1], "text": "a", "meta_info": {"finish_reason": {"type": "abort", "message": "m"}}}),
        ("vllm", {"choices": [{"token_ids": [1], "text": "a", "finish_reason": "abort"}]}),
    ],
)
def test_an_aborted_answer_is_not_read_as_a_short_one(engine: Any, document: Any) -> None:
    server, client = opened(Script(style=engine))
    client.script.early_answer = lambda path, body: document  # type: ignore[method-assign]
    with refuses(RequestError, "server-refused", found="abort"):
        server.answer((7, 8), FIVE)


def test_sglang_tells_the_longest_request_that_it_holds() -> None:
    server, _ = opened(Script(**S))
    assert server.describe().max_len == 8186
    cutting, _ = opened(Telling(**S, told={"/server_info": {"allow_auto_truncate": True}}))
    assert cutting.describe().max_len is None


def test_counters_of_sglang_are_absent_until_they_rise_and_are_added_up_over_labels() -> None:
    names, fake = SERVERS["sglang"].counter_names, FakeEngine(**S)
    assert read_metrics(METRICS["sglang"](fake), names, "").counters is None
    fake.count(Text((1, 2, 3), (1,)))
    assert read_metrics(METRICS["sglang"](fake), names, "").counters is not None
    counters = read_metrics(STREAMED_AND_WHOLE, names, "").counters
    assert counters is not None
    assert (counters.num_requests, counters.num_cached_tokens) == (3, 48)


@pytest.mark.parametrize(("style", "name"), [(V, "cache_salt"), (S, "extra_key")], ids=["vllm", "sglang"])
def test_a_fresh_request_has_a_name_of_its_own_for_the_prefix_cache(style: dict[str, Any], name: str) -> None:
    server, client = opened(Script(**style))
    for variant in (Variant(is_fresh=True), Variant(is_fresh=True), MEASURED):
        server.answer((7, 8), FIVE, variant)
    first, second, measured = (body.get(name) for _, body in client.bodies)
    assert len({first, second, measured}) == 3
    assert measured is None
