"""Print docs/reference/checks.md from the rules and the cases that make them fire.

python scripts/rule_table.py > docs/reference/checks.md
"""

import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels", "tests/helpers")]

from dflash_cli.engines.engine_names import known_engines
from dflash_cli.rules.rule import Rule, all_rules
from dflash_testing.rule_cases.collected import CASES
from dflash_testing.transfer_cases import CASES as TRANSFER_CASES

RUN_TESTS = {
    "R01": "test_a_falsified_config_is_caught[taps]",
    "R02": "test_a_causal_flag_is_caught",
    "R03": "test_a_falsified_config_is_caught[mask]",
    "R04": "test_a_falsified_config_is_caught[rope]",
    "R05": "test_anchor_first_that_accepts_more_is_reported",
    "R06": "test_a_draft_that_predicts_little_is_reported",
    "R07": "test_a_falsified_config_is_caught[window]",
    "R08": "test_every_factor_has_a_rule",
    "R09": "test_rewritten_tensors_are_named",
    "R10": "test_a_scaled_embedding_is_tried_both_ways",
    "R11": "test_every_factor_has_a_rule",
    "R12": "test_an_unknown_layout_is_found",
    "R13": "test_the_right_cause_is_named_for_drafts_that_walk",
    "R14": "test_the_right_cause_is_named_for_drafts_that_walk",
    "R15": "test_the_right_cause_is_named_for_drafts_that_walk",
    "R16": "test_the_right_cause_is_named_for_drafts_that_walk",
    "R17": "test_the_right_cause_is_named_for_drafts_that_walk",
}
"""Rule of the run level -> its test. These rules run a draft, so CASES leaves them out."""

HEAD = """# Checks

The rules of `dflash validate`, printed by `python scripts/rule_table.py`. A test compares this page with the code. Each
rule is one decorated function in `dflash_cli/rules/themes/` or `dflash_cli/engines/`. Rules of the level kv-transfer
judge two servers ([KV transfer](kv-transfer.md)). All others judge a draft. `dflash explain ID` prints a rule with its
effect, fix and source.

- A rule reports a milder severity for a milder form of its fault.
- A rule with engines is an error only if `--engine` names one of them. Otherwise rules S and P report nothing.
- Known engines: {engines}.
- The last column counts the cases of `test_rule_fires` (`tests/cli/rules/test_rules.py`), or of
  `test_transfer_rule_fires` for servers, or names another test of the rule. `test_silent_on_sound_drafts`,
  `test_silent_on_the_bundled_drafts` and `test_sound_drafts_pass` check that every rule is silent on sound drafts.

{total} rules by level: {levels}.

| id | severity | level | engines | what must hold | file | test |
|---|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    rules = all_rules()
    levels = Counter(rule.level for rule in rules)
    head = HEAD.format(
        engines=known_engines(),
        levels=", ".join(f"{name} {count}" for name, count in levels.items()),
        total=len(rules),
    )
    return head + "".join(_row(rule) for rule in rules)


def _row(rule: Rule) -> str:
    num_cases = [*(case.rule for case in CASES), *(case.rule for case in TRANSFER_CASES)].count(rule.id)
    test = f"`{RUN_TESTS[rule.id]}`" if rule.id in RUN_TESTS else f"{num_cases} cases" if num_cases > 1 else "1 case"
    engines = ", ".join(rule.engines)
    file = rule.module.replace(".", "/") + ".py"
    cells = (rule.id, rule.severity, rule.level, engines, rule.title.rstrip("."), f"`{file}`", test)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(render())
