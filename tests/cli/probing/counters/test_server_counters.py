"""Server counters: the names and forms of each engine, their rise, and malformed text."""

from collections.abc import Mapping

import pytest

from dflash_cli.probing.counters.metrics_text import read_metrics
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.servers.inference_server import SERVERS, server_engines
from dflash_runtime.errors import UnsupportedError
from dflash_testing.fake_engines import FakeEngine, Text
from dflash_testing.refusals import refuses
from dflash_testing.scripted_operations import Rounded
from dflash_testing.scripted_servers import L
from dflash_testing.server_forms import METRICS

TEXT = Text(tuple(range(20)), (3, 0, 7, 2))
"""Four steps: positions 1 to 7 are accepted 3, 3, 2, 1, 1, 1, 1 times."""
POSITIONS = (3, 3, 2, 1, 1, 1, 1)


def names(engine: str) -> Mapping[str, str]:
    server_engines()
    return SERVERS[engine].counter_names


def counted(style: str, text: str | None = None) -> ServerCounters:
    engine = FakeEngine(style=style)  # type: ignore[arg-type]
    engine.count(TEXT)
    found = read_metrics(text or METRICS[style](engine), names(style), "metrics").counters
    assert found is not None
    return found


def test_counters_of_vllm_as_prometheus_client_prints_them() -> None:
    expected = ServerCounters(
        num_drafts=4,
        num_draft_tokens=28,
        num_accepted_tokens=12,
        per_pos_accepted=POSITIONS,
        num_requests=1,
        num_tokens=20,
        num_cached_tokens=0,
    )
    assert counted("vllm") == expected


def test_counter_names_match_with_and_without_total() -> None:
    engine = FakeEngine()
    engine.count(TEXT)
    text = METRICS["vllm"](engine)
    assert counted("vllm", text.replace("_total", "")) == counted("vllm", text)


def test_counters_of_several_engines_of_one_server_are_added_up() -> None:
    engine = FakeEngine()
    engine.count(TEXT)
    second = [
        line.replace('engine="0"', 'engine="1"') for line in METRICS["vllm"](engine).splitlines() if line[0] != "#"
    ]
    found = counted("vllm", METRICS["vllm"](engine) + "\n".join(second) + "\n")
    assert (found.num_drafts, found.per_pos_accepted) == (8, tuple(2 * count for count in POSITIONS))


def test_counters_of_llama_cpp_have_positions_from_the_first_drafted_answer_on() -> None:
    before = read_metrics(METRICS["llama.cpp"](FakeEngine(style="llama.cpp")), names("llama.cpp"), "metrics").counters
    assert before is not None
    assert before.per_pos_accepted == ()
    risen = counted("llama.cpp").since(before)
    assert risen is not None
    assert (risen.num_drafts, risen.num_accepted_tokens, risen.per_pos_accepted) == (4, 12, POSITIONS)


def test_counters_of_sglang_have_neither_accepted_tokens_nor_positions() -> None:
    found = counted("sglang")
    assert (found.num_drafts, found.num_requests, found.num_tokens) == (4, 1, 20)
    assert (found.num_accepted_tokens, found.histogram) == (None, None)


def test_without_a_count_of_drafts_there_are_no_counters() -> None:
    assert read_metrics(METRICS["vllm"](FakeEngine(has_draft=False)), names("vllm"), "metrics").counters is None
    assert read_metrics("", names("vllm"), "metrics").counters is None


def test_malformed_counters_are_refused_on_one_line() -> None:
    with refuses(UnsupportedError, "not-prometheus", path="http://x/metrics") as error:
        read_metrics('vllm:spec_decode_num_drafts_total{engine="0 what\n', names("vllm"), "http://x/metrics")
    assert "\n" not in error.value.message


def test_steps_by_accepted_drafts_follow_from_positions() -> None:
    assert counted("vllm").histogram == (1, 0, 1, 1, 0, 0, 0, 1)


def test_contradicting_counters_have_no_histogram() -> None:
    assert ServerCounters(num_drafts=2, per_pos_accepted=(3, 1)).histogram is None


def test_counters_after_a_restart_have_no_rise() -> None:
    before, after = counted("vllm"), ServerCounters(num_drafts=1, per_pos_accepted=(0,) * 7)
    assert after.since(before) is None
    assert before.since(before) == ServerCounters(
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        per_pos_accepted=(0,) * 7,
        num_requests=0,
        num_tokens=0,
        num_cached_tokens=0,
    )


@pytest.mark.parametrize(
    ("counts", "positions", "contradicts"),
    [
        ({"num_accepted_tokens": 90}, (50, 40), False),
        ({"num_accepted_tokens": 98}, (50, 40), False),
        ({"num_accepted_tokens": 180}, (50, 40), True),
        ({"num_accepted_tokens": 90, "num_draft_tokens": 50}, (50, 40), True),
        ({"num_accepted_tokens": 90}, (), False),
        ({}, (50, 40), False),
    ],
)
def test_counters_that_cannot_both_be_right_contradict_each_other(
    counts: dict[str, int], positions: tuple[int, ...], contradicts: bool
) -> None:
    found = ServerCounters(num_drafts=60, per_pos_accepted=positions, **counts)
    assert bool(found.contradiction) == contradicts
    assert found.histogram is None or not contradicts


@pytest.mark.parametrize(
    ("printed", "resolution"), [("9.71234e+07", 100), ("1e+06", 10), ("999999", 1), ("5e+08", 1000)]
)
def test_the_digits_of_counters_show_their_resolution(printed: str, resolution: int) -> None:
    text = f"llamacpp:tokens_predicted_total {printed}\nllamacpp:spec_decode_num_drafts_total 12\n"
    assert counted("llama.cpp", text).resolution == resolution


@pytest.mark.parametrize("other", ["12.0", "1.234567e+06", "12345678"])
def test_round_numbers_of_an_exact_printer_are_exact(other: str) -> None:
    """Python and Go print 5e+08 for this number, too, and all digits of others."""
    text = f"llamacpp:tokens_predicted_total 5e+08\nllamacpp:spec_decode_num_drafts_total {other}\n"
    assert counted("llama.cpp", text).is_exact


def test_rises_of_rounded_counters_are_not_exact_and_contradict_nothing() -> None:
    script = Rounded(**L)
    before = counted("llama.cpp", script.as_metrics(METRICS["llama.cpp"](script)))
    script.count(TEXT)
    risen = counted("llama.cpp", script.as_metrics(METRICS["llama.cpp"](script))).since(before)
    assert risen is not None
    assert (risen.is_exact, risen.contradiction, risen.histogram) == (False, None, None)


def test_a_count_with_the_targets_own_tokens_leaves_positions_right() -> None:
    drafts, positions = 100, (90, 80, 30)
    risen = ServerCounters(num_drafts=drafts, num_accepted_tokens=300, per_pos_accepted=positions, num_tokens=300)
    assert risen.contradiction is not None
    assert (risen.counts_bonus, risen.num_accepted_drafts, risen.histogram) == (True, 200, (10, 10, 50, 30))


def test_positions_that_lack_a_part_of_the_server_are_not_taken_for_the_targets_own_tokens() -> None:
    """The surplus is one for each step by chance, but steps and accepted tokens are the tokens of the answers."""
    risen = ServerCounters(num_drafts=100, num_accepted_tokens=200, per_pos_accepted=(60, 40), num_tokens=300)
    assert risen.contradiction is not None
    assert (risen.counts_bonus, risen.num_accepted_drafts, risen.histogram) == (False, 200, None)


def test_a_counter_that_each_rank_of_a_model_shows_is_read_once() -> None:
    """SGLang can show the metrics of each rank. Ranks of data parallelism count their own requests."""
    name = "sglang:spec_verify_calls_total"
    ranks = "".join(f'{name}{{tp_rank="{rank}",dp_rank="{part}"}} {10 + part}\n' for rank in (0, 1) for part in (0, 1))
    assert counted("sglang", ranks).num_drafts == 21
    assert counted("sglang", f'{name}{{engine_type="unified"}} 10\n' * 4).num_drafts == 10


def test_gauges_and_queue_times_are_read_beside_counters() -> None:
    queue = "vllm:request_queue_time_seconds"
    text = 'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting_by_reason{reason="x"} 9\n'
    text += f'# TYPE {queue} histogram\n{queue}_bucket{{le="+Inf"}} 7\n{queue}_count 7\n{queue}_sum 1.5\n'
    text += "vllm:num_requests_running NaN\n"
    found = read_metrics(text, names("vllm"), "here", SERVERS["vllm"].load_names)
    assert found.load == {"waiting": 3.0, "queue_s": 1.5}
