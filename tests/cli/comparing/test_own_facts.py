"""Settings of our own results are compared alike, from files of answers and from JSON documents."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.comparing.measured_result import MeasuredResult, read_result
from dflash_cli.comparing.own_facts import own_facts
from dflash_cli.comparing.result_comparison import compare_results
from dflash_testing.command_line import run_main


@pytest.mark.parametrize(
    ("setting", "option", "usual"),
    [
        ({"num_tree_nodes": 8}, {"tree": [8]}, {"tree": []}),
        ({"tree_candidates": 4}, {"tree_candidates": 4}, {"tree_candidates": None}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel": 2}, {"tensor_parallel": 1}),
        ({"kv_dtype": "fp8"}, {"kv_dtype": "fp8"}, {"kv_dtype": "auto"}),
        ({"drafting": "ngram"}, {"drafting": "ngram"}, {"drafting": "model"}),
        ({"module_swaps": False}, {"module_swaps": False}, {"module_swaps": True}),
        ({"draft_confidence": True}, {}, {}),
        ({"layout": "fill-in"}, {"layout": "fill-in"}, {"layout": None}),
    ],
    ids=lambda item: next(iter(item), None),
)
def test_a_setting_is_a_difference_between_both_kinds_of_our_results(
    setting: dict[str, Any], option: dict[str, Any], usual: dict[str, Any]
) -> None:
    """A file of answers states only chosen settings, a JSON document every option beside the chosen settings."""

    def facts(source: str, settings: Mapping[str, Any]) -> MeasuredResult:
        found = own_facts({"dflash": "1", **settings})
        return MeasuredResult(name=source, source=source, acceptance_len=2.0, facts=found)

    plain = [facts("rows", {}), facts("document", usual)]
    chosen = [facts("rows", setting), facts("document", {**option, **setting})]
    for base, other in product(plain, chosen):
        (found,) = compare_results([base, other])
        assert found.unlike.keys() == setting.keys()
    for base, other in (plain, chosen):
        (found,) = compare_results([base, other])
        assert not found.unlike


def test_runs_with_and_without_a_tree_differ_in_it_alone(tmp_path: Path) -> None:
    runs: dict[str, list[MeasuredResult]] = {}
    for name, options in (("plain", ()), ("tree", ("--tree", "8"))):
        rows, document = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.json"
        given = ("eval-acceptance", "tiny", "--num-prompts", "2", "-n", "8", *options, "--json", "-o", rows)
        document.write_text(run_main(*given).out)
        runs[name] = [read_result(rows), read_result(document)]
    for base, other in product(runs["plain"], runs["tree"]):
        (found,) = compare_results([base, other])
        assert found.unlike == {"num_tree_nodes": (None, 8)}
    for results in runs.values():
        (found,) = compare_results(results)
        assert not found.unlike
