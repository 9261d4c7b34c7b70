"""The files of other tools are read with their totals, prompts and definition, or are refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.comparing.measured_result import RESULT_FORMATS, read_result
from dflash_runtime.errors import UsageError
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses
from dflash_testing.result_samples import (
    AIPERF,
    GUIDELLM,
    MLX,
    MLX_RUN,
    SGLANG,
    SPECFORGE,
    SPECULATORS,
    SWEEP,
    SWEEP_RUN,
    VLLM,
    aiperf_record,
    lines,
    mlx_suite,
    read,
    specdec_bench,
)


def test_vllm_bench_gives_totals(tmp_path: Path) -> None:
    result = read(tmp_path, VLLM)
    assert (result.acceptance_len, result.conversations) == (3.1, ())
    assert result.counts is not None
    assert result.counts.per_pos_accepted == [800, 500, 300, 200, 150, 100, 50]
    assert result.counts.acceptance_len == result.acceptance_len
    assert result.facts == {"target": "Qwen/Qwen3-8B", "num_speculative_tokens": 7}


def test_aiperf_has_a_row_for_each_request(tmp_path: Path) -> None:
    """Turns of one conversation are added up. Warm-ups, failed requests and requests without steps are left out."""
    other = aiperf_record("b", 0, {"3": 4})
    warm_up = {"metadata": other["metadata"] | {"benchmark_phase": "warmup"}}
    result = read(
        tmp_path,
        lines(
            aiperf_record("a", 0, {"0": 5, "2": 5}),
            aiperf_record("a", 1, {"1": 10}),
            other,
            aiperf_record("c", 0, {"0": 9}, **warm_up),
            aiperf_record("d", 0, {"0": 9}, spec_decode_acceptance=None, error={"code": 500}),
        ),
    )
    assert [(item.name, item.num_tokens, item.num_steps) for item in result.conversations] == [
        ("a", 40, 20),
        ("b", 16, 4),
    ]
    assert result.counts is not None
    assert (result.counts.num_drafts, result.counts.per_pos_accepted) == (24, [19, 9, 4])
    assert result.acceptance_len == pytest.approx(56 / 24)
    assert result.facts == {"num_speculative_tokens": 3, "serving_engine": "vllm"}


def test_conversations_of_aiperf_are_identified_by_name_and_prompt_length(tmp_path: Path) -> None:
    one, same, longer = (aiperf_record("a", 0, {"0": 5}) for _ in range(3))
    longer["metrics"]["input_sequence_length"]["value"] = 9
    digests = [read(tmp_path, lines(row)).conversations[0].digest for row in (one, same, longer)]
    assert digests[0] == digests[1] != digests[2]


def test_the_summary_of_aiperf_gives_totals(tmp_path: Path) -> None:
    result = read(tmp_path, AIPERF)
    assert result.acceptance_len == 2.4
    assert result.counts is not None
    assert (result.counts.per_pos_accepted, result.counts.acceptance_len) == ([60, 40, 40], 2.4)
    assert "profile_export.jsonl" in str(result.why_no_rows)


def test_specdec_bench_has_means_of_requests(tmp_path: Path) -> None:
    """Both forms: a length for each turn, or a mean over turns (MT-Bench, SPEC-Bench). The total is the file's mean."""
    turns = {"Request_AL": {"0": {"0": 3.0, "1": 5.0}, "1": {"0": 1.0}}, "Average_AL": 3.0}
    result = read(tmp_path, [turns])
    assert [(item.num_tokens, item.num_steps) for item in result.conversations] == [(8.0, 2), (1.0, 1)]
    assert result.acceptance_len == 9 / 3
    assert "specdec_bench" in result.definition
    result = read(tmp_path, {"Request_AL": {"81": 3.0, "82": 2.0}, "Category_AL": {"coding": 2.5}, "Average_AL": 2.5})
    assert [item.name for item in result.conversations] == ["request 81", "request 82"]


def test_specforge_gives_a_mean_by_sglangs_definition(tmp_path: Path) -> None:
    result = read(tmp_path, SPECFORGE)
    assert (result.acceptance_len, result.definition, result.conversations) == (4.21, "sglang", ())
    assert result.facts == {"dataset": "gsm8k"}


def test_sglangs_bench_gives_a_mean_since_the_start_of_the_server(tmp_path: Path) -> None:
    """SGLang's 8 draft tokens count the anchor. For a tree of drafts the number of draft tokens is left out."""
    result = read(tmp_path, SGLANG)
    assert (result.acceptance_len, result.conversations) == (3.2, ())
    assert "since the server's start" in result.definition
    facts = {"dataset": "sharegpt", "target": "org/target", "serving_engine": "sglang"}
    assert result.facts == facts | {"num_speculative_tokens": 7}
    tree = SGLANG | {"server_info": {**SGLANG["server_info"], "speculative_eagle_topk": 4}}
    assert read(tmp_path, tree).facts == facts


def test_a_run_on_several_lines_is_read_as_on_one(tmp_path: Path) -> None:
    """Editors and `jq` write JSON so."""
    for content in (SGLANG, aiperf_record("a", 0, {"0": 5, "2": 1})):
        assert read(tmp_path, json.dumps(content, indent=2)) == read(tmp_path, content)


def test_dflash_mlx_has_steps_and_accepted_tokens(tmp_path: Path) -> None:
    """The ratio of dflash-mlx is accepted / generated tokens: 911 of 1024 in 113 steps, and 113 + 911 = 1024."""
    result = read(tmp_path, MLX)
    assert result.acceptance_len == pytest.approx(1 + 911 / 113)
    assert [(item.name, item.num_tokens, item.num_steps) for item in result.conversations] == [("f", 3 * 1024, 3 * 113)]
    assert result.facts == {
        "draft": "z-lab/Qwen3.5-9B-DFlash", "target": "Qwen/Qwen3.5-9B", "num_speculative_tokens": 15,
        "max_new_tokens": 1024,
    }  # fmt: skip
    assert "dflash-mlx" in result.definition


def test_a_suite_of_dflash_mlx_has_a_row_for_each_prompt(tmp_path: Path) -> None:
    """The limit cuts a block after a stop token only: 12 generated of 4 steps with 10 accepted tokens."""
    cut = {**MLX_RUN, "cycles": 4, "tokens_per_cycle": 3.0, "acceptance_ratio": 10 / 12, "accepted_from_draft": 10}
    result = read(tmp_path, mlx_suite(MLX_RUN, cut))
    assert [(item.name, item.num_tokens, item.num_steps) for item in result.conversations] == [
        ("id0", 1024, 113),
        ("id1", 14, 4),
    ]
    assert result.acceptance_len == pytest.approx(1038 / 117)
    assert len({item.digest for item in result.conversations}) == 2


def test_the_sweep_of_specforge_pools_answer_tokens(tmp_path: Path) -> None:
    result = read(tmp_path, SWEEP)
    assert (result.acceptance_len, result.conversations) == (4.1, ())
    assert "first token included" in result.definition
    assert result.facts == {
        "dataset": "gsm8k", "draft": "org/draft", "serving_engine": "sglang", "num_speculative_tokens": 7,
    }  # fmt: skip
    (entry,) = SWEEP["gsm8k"]
    unknown = SWEEP | {"gsm8k": [{**entry, "steps": None, "topk": None, "num_draft_tokens": None}]}
    assert "num_speculative_tokens" not in read(tmp_path, unknown).facts


def test_aiperf_without_a_fixed_number_of_draft_tokens_or_names(tmp_path: Path) -> None:
    """An engine with blocks of different lengths states no K. Requests without conversation_id are not one prompt."""
    one, two = aiperf_record("a", 0, {"2": 5}), aiperf_record("b", 0, {"3": 5})
    two["spec_decode_acceptance"]["num_spec_tokens"] = None
    found = read(tmp_path, lines(one, two))
    assert found.facts == {"serving_engine": "vllm"}
    assert found.acceptance_len == 3.5
    for row in (one, two):
        row["metadata"].pop("conversation_id")
        row["metadata"].pop("turn_index")
    found = read(tmp_path, lines(one, two))
    assert found.conversations == ()
    assert "conversation_id" in str(found.why_no_rows)


def test_speculators_gives_totals_of_all_subsets(tmp_path: Path) -> None:
    result = read(tmp_path, SPECULATORS)
    assert result.acceptance_len == 1 + 360 / 400
    assert result.counts is not None
    assert result.counts.per_pos_accepted == [260, 100]


@pytest.mark.parametrize(("content", "id", "name"), [
    ({"model_id": "a", "request_throughput": 1.0}, "no-acceptance", "vllm bench serve"),
    (GUIDELLM, "no-acceptance", "GuideLLM"),
    (lines({"metadata": {}, "metrics": {}}), "no-acceptance", "AIPerf"),
    (SPECFORGE | {"average_acceptance_length": None}, "no-acceptance", "specforge benchmark"),
    (
        VLLM | {"spec_decode_num_drafts": 0, "spec_decode_acceptance_length": 0.0, "spec_decode_accepted_tokens": 0},
        "no-steps",
        "vllm bench serve",
    ),
    (specdec_bench(1.0) * 2, "several-runs", "2"),
    (SPECULATORS.splitlines()[0] + "\n", "malformed-result", "speculators' acceptance.csv"),
    (AIPERF | {"total_spec_decode_steps": {"avg": 0.0}}, "no-steps", "AIPerf"),
    (lines(aiperf_record("a", 0, {"4": 1})), "malformed-result", "AIPerf profile_export.jsonl"),
    (SGLANG | {"accept_length": None, "backend": "vllm"}, "no-acceptance", "vllm"),
    (lines(SGLANG, SGLANG), "several-runs", "2"),
    (mlx_suite({**MLX_RUN, "cycles": 0, "tokens_per_cycle": 0.0, "acceptance_ratio": 0.0}), "no-steps", "dflash-mlx"),
    (mlx_suite(MLX_RUN, copyspec_mode="auto"), "mixed-drafts", "auto"),
    (mlx_suite({**MLX_RUN, "acceptance_ratio": 0.88}), "malformed-result", "acceptance_ratio"),
    (mlx_suite({**MLX_RUN, "cycles": 112, "tokens_per_cycle": 1024 / 112}), "malformed-result", "contradict"),
    (mlx_suite({**MLX_RUN, "accepted_from_draft": 910}), "malformed-result", "contradict"),
    (SWEEP | {"math500": SWEEP["gsm8k"]}, "several-runs", "gsm8k, math500"),
    (
        SWEEP | {"gsm8k": [{**SWEEP["gsm8k"][0], "metrics": [{**SWEEP_RUN, "accept_length": 1.0}]}]},
        "no-acceptance",
        "bench_eagle3.py",
    ),
    (AIPERF | {"total_accepted_draft_tokens": {"avg": 150.0}}, "malformed-result", "2.5"),
    (lines(aiperf_record("a", 0, {"-1": 1, "3": 1})), "malformed-result", "-1"),
    (lines(aiperf_record("a", 0, {"0": 1}, spec_decode_acceptance={"acceptance_histogram": {}})), "no-steps", "verify"),
    (SPECFORGE | {"average_acceptance_length": 0.0, "spec_verify_count": 0}, "no-acceptance", "specforge benchmark"),
    (SGLANG | {"accept_length": 8.1}, "malformed-result", "8.1"),
    (mlx_suite({"cycles": 10, "tokens_per_cycle": 20.0, "acceptance_ratio": 0.95}), "malformed-result", "20"),
    (SWEEP | {"gsm8k": [{**SWEEP["gsm8k"][0], "metrics": []}]}, "no-acceptance", ""),
    (json.dumps(SGLANG)[:-1] + ",}", "not-json", "double quotes"),
    ("", "unknown-result-format", ""),
    (lines({"settings": {}}) + "{broken\n" + lines({"index": 0}), "not-an-object", "result:2: "),
    ([], "unknown-result-format", ""),
    ("1\n2\n", "unknown-result-format", ""),
])  # fmt: skip
def test_a_file_without_acceptance_is_refused_in_one_line(tmp_path: Path, content: Any, id: str, name: str) -> None:
    with refuses(UsageError, id) as caught:
        read(tmp_path, content)
    assert name in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("change", [
    lambda text: "\ufeff" + text,
    lambda text: "\n" + text.replace("\n", "\r\n"),
    lambda text: text.replace('"x"', '"\u2028\u2029\x85"'),
])  # fmt: skip
def test_lines_end_at_line_feeds_only(change: Callable[[str], str], tmp_path: Path) -> None:
    """JSON may hold other line separators inside strings; a byte order mark and blank lines are skipped."""
    text = change(lines(aiperf_record("a", 0, {"0": 5}, note="x"), aiperf_record("b", 0, {"1": 5})))
    path = tmp_path / "result"
    path.write_bytes(text.encode())
    assert [item.name for item in read_result(path).conversations] == ["a", "b"]


def test_each_sample_is_recognised_by_one_format_only(tmp_path: Path) -> None:
    from dflash_cli.comparing.measured_result import PACKAGE, ResultFile

    RESULT_FORMATS.discover(PACKAGE)
    samples = [
        VLLM,
        SPECFORGE,
        SPECULATORS,
        GUIDELLM,
        AIPERF,
        SGLANG,
        MLX,
        mlx_suite(MLX_RUN),
        SWEEP,
        lines(aiperf_record("a", 0, {"0": 5})),
        specdec_bench(1.0),
    ]
    for number, content in enumerate(samples):
        path = tmp_path / str(number)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        known = [kind.title for kind in RESULT_FORMATS.values() if kind().recognises(ResultFile(path))]
        assert len(known) == 1, (number, known)


RECORDED = ROOT / "tests" / "golden" / "results"
"""Files that aiperf 0.13.0 and specforge 0.2.0 wrote for a made-up server, with fewer records and keys."""


@pytest.mark.parametrize(("name", "length", "num_prompts"), [
    ("aiperf_records.jsonl", 1 + 60 / 34, 2),
    ("aiperf_summary.json", 2.6470588235294117, 0),
    ("specforge.json", 3.447664835164835, 0),
])  # fmt: skip
def test_files_of_the_tools_themselves_are_read(name: str, length: float, num_prompts: int) -> None:
    """AIPerf asks a prompt again if there are fewer prompts than requests: repeats are one conversation."""
    found = read_result(RECORDED / name)
    assert found.acceptance_len == pytest.approx(length)
    assert len(found.conversations) == num_prompts
    if found.counts is not None:
        assert found.counts.num_speculative_tokens == 7


@pytest.mark.parametrize("rate", ["y" * 3000, [0] * 3000, True, None])
def test_a_rate_that_is_no_number_is_not_multiplied(rate: Any, tmp_path: Path) -> None:
    """A text times a count would be a text of that many pieces: the fuzzer found a MemoryError."""
    file = tmp_path / "a.json"
    changes = {"spec_decode_num_drafts": 2**45, "spec_decode_per_position_acceptance_rates": [rate] * 7}
    file.write_text(json.dumps({**VLLM, **changes}))
    with refuses(UsageError, "malformed-result"):
        read_result(file)
