"""--json-schema, --regex, --grammar, --compare-without and --tools of `generate` and `eval-acceptance`."""

import json
import shutil
from pathlib import Path

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_testing.command_line import run_main
from dflash_testing.grammars import SCHEMA
from dflash_testing.pairs import bundled_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "x", "parameters": {}}}]
WITH_TOOLS = (
    "{% for tool in tools or [] %}tool {{ tool['function']['name'] }}\n{% endfor %}"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def test_acceptance_is_measured_with_and_without_the_grammar(schema: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    shared = ("tiny", "--num-prompts", 3, "-n", 40, "--output", rows, "--json")
    done = run_main("eval-acceptance", *shared, "--json-schema", schema, "--compare-without")
    result = json.loads(done.out)
    assert [item["grammar"] for item in result["conditions"]] == ["on", "off"]
    assert result["settings"]["grammar"] == {"kind": "json_schema", "text": schema.read_text()}
    first, second = result["conditions"]
    assert second["num_pairs"] == 3
    assert first["acceptance_len"] > second["acceptance_len"]
    answers = [json.loads(line) for line in rows.read_text().splitlines()[1:]]
    assert len(answers) == 6
    for row in answers:
        if row["condition"] == "grammar":
            jsonschema.validate(json.loads(row["text"]), SCHEMA)
        else:
            assert not row["text"].startswith('{"name"')
    again = run_main("eval-acceptance", *shared, "--regex", "a+", "--compare-without", "--resume")
    assert (again.code, again.error_id) == (2, "settings-differ")


def test_a_text_matches_the_expression_and_the_grammar(tmp_path: Path) -> None:
    (tmp_path / "rule.lark").write_text('start: "yes" | "no"\n')
    matched = run_main("generate", "x =", "--regex", "[0-9]{3}!")
    assert (len(matched.out.strip()), matched.out.strip()[3]) == (4, "!")
    chosen = run_main("generate", "x =", "--grammar", tmp_path / "rule.lark", "--check-lossless")
    assert (chosen.code, chosen.out.strip() in ("yes", "no")) == (0, True)


@pytest.mark.parametrize(
    ("command", "options", "code", "error_id"),
    [
        ("generate", ("--json-schema", "[1]"), 4, "no-such-file"),
        ("generate", ("--json-schema", "{"), 2, "schema-not-an-object"),
        ("generate", ("--json-schema", '{"type": "objec"}'), 2, "grammar-refused"),
        ("generate", ("--json-schema", "{}", "--regex", "a"), 2, "options-exclude-each-other"),
        ("generate", ("--regex", "a", "--ignore-eos"), 2, "options-exclude-each-other"),
        ("generate", ("--regex", "a", "--tensor-parallel", "2"), 2, "options-exclude-each-other"),
        ("generate", ("--regex", "a", "--verify-width", "auto"), 2, "options-exclude-each-other"),
        ("generate", ("--regex", "a", "--handoff-out", "x"), 2, "options-exclude-each-other"),
        ("eval-acceptance", ("--regex", "a", "--disaggregated"), 2, "options-exclude-each-other"),
        ("eval-acceptance", ("--regex", "a", "--mode", "replay", "--dump", "x"), 2, "options-exclude-each-other"),
        ("eval-acceptance", ("--compare-without",), 2, "no-grammar"),
    ],
)
def test_options_without_a_meaning_are_refused(
    command: str, options: tuple[str, ...], code: int, error_id: str
) -> None:
    done = run_main(command, "x" if command == "generate" else "tiny", *options)
    assert (done.code, done.error_id) == (code, error_id)


@pytest.fixture
def caller(tmp_path: Path) -> Path:
    """The bundled target with a template that lists tools."""
    target = tmp_path / "caller"
    shutil.copytree(tiny_directory() / "target", target)
    (target / "chat_template.jinja").write_text(WITH_TOOLS)
    return target


def test_tools_reach_the_template_and_a_row_may_have_its_own(caller: Path, tmp_path: Path) -> None:
    tools, prompts, rows = (tmp_path / name for name in ("tools.json", "prompts.jsonl", "rows.jsonl"))
    tools.write_text(json.dumps(TOOLS))
    own = [{"type": "function", "function": {"name": "time"}}]
    prompts.write_text(f'{{"prompt": "x"}}\n{json.dumps({"turns": ["x"], "tools": own})}\n')
    pair = ("--draft", "tiny", "--target", caller, "--prompts", prompts, "-n", 1, "--chat")
    done = run_main("generate", *pair, "--tools", tools, "--output", rows)
    assert done.code == 0
    prompt_ids = [json.loads(line)["prompt_token_ids"] for line in rows.read_text().splitlines()]
    texts = [bundled_tokenizer().decode(ids) for ids in prompt_ids]
    assert texts == ["tool weather\nx\n", "tool time\nx\n"]


def test_tools_that_change_no_prompt_are_refused(caller: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    ignored = run_main("eval-acceptance", "tiny", "--num-prompts", 1, "--tools", tools, "--chat")
    assert (ignored.code, ignored.error_id) == (2, "tools-ignored")
    raw = run_main("generate", "x", "-d", "tiny", "--target", caller, "--tools", tools)
    assert (raw.code, raw.error_id) == (2, "tools-without-template")
    tools.write_text("{}")
    other = run_main("generate", "x", "--chat", "--tools", tools)
    assert (other.code, other.error_id) == (2, "tools-not-a-list")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x", "tools": 3}\n')
    row = run_main("generate", "--prompts", tmp_path / "prompts.jsonl")
    assert (row.code, row.field) == (2, "tools")
