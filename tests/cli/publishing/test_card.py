"""Model cards: the Hub's library reads them, and inserting a section keeps all other bytes of a card."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

from dflash_cli.acceptance.acceptance_report import command_line
from dflash_cli.acceptance.intervals.statistics import summarise
from dflash_cli.publishing.card_insertion import BLOCK_MARKS, METADATA_MARKS, insert_card
from dflash_cli.publishing.markdown_report import evaluation_to_markdown
from dflash_cli.publishing.model_card import ModelCard
from dflash_runtime.errors import UsageError
from dflash_testing.command_line import run_main
from dflash_testing.evaluations import drawn_evaluation, request_output, write_evaluation
from dflash_testing.refusals import refuses

CARD = ModelCard({"tags": ["dflash"], "base_model": "org/target"}, "## Acceptance\n\n2.8\n")
OTHER = ModelCard({"tags": ["dflash", "new"]}, "## Acceptance\n\n3.1, and more\nlines\n")


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_evaluation(tmp_path / "r.json", drawn_evaluation())


def made(*arguments: str) -> str:
    done = run_main("card", "r.json", *arguments)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.usefixtures("result")
def test_the_hubs_library_reads_the_numbers() -> None:
    made("--engine", "none", "-o", "README.md")
    card = HubCard.load("README.md", ignore_metadata_errors=False)
    evaluation = drawn_evaluation()
    interval = evaluation.total.acceptance_len_interval
    assert interval is not None
    assert card.data.base_model == "org/target"
    assert card.data.model_name == "draft"
    total, *categories = card.data.eval_results or []
    assert total.metric_value == round(evaluation.total.counts.acceptance_len or 0, 3)
    assert total.metric_args is not None
    assert total.metric_args["interval"] == [round(interval.low, 3), round(interval.high, 3)]
    assert (total.task_type, total.metric_type) == ("text-generation", "acceptance_length")
    assert total.dataset_name == evaluation.prompts.name
    assert [item.dataset_config for item in categories] == list(evaluation.categories)
    assert command_line(evaluation) in card.text
    assert f"[{interval.low:.3f}, {interval.high:.3f}]" in card.text
    assert "temperature 0.0" in card.text


@pytest.mark.parametrize("option", ["--draft-name", "--target-name"])
@pytest.mark.parametrize("name", ["", "a b/c", "a/b\n", "a/b/c", "../b", "a/b@v2"])
def test_a_name_that_the_hub_does_not_take_is_refused(result: Path, option: str, name: str) -> None:
    done = run_main("card", str(result), option, name)
    assert (done.code, done.field, done.out) == (2, option, "")


def test_a_local_pair_has_its_serve_commands(result: Path) -> None:
    settings = drawn_evaluation(draft="tiny", target="tiny").settings
    write_evaluation(result, drawn_evaluation(num_drafted=7), settings=dict(settings))
    text = made("--draft-name", "org/d", "--target-name", "org/t")
    vllm, sglang = (
        shlex.split(next(line for line in text.splitlines() if name in line))
        for name in ("--speculative-config", "--speculative-draft-model-path")
    )
    assert vllm[:3] == ["vllm", "serve", "org/t"]
    config = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert (config["model"], config["num_speculative_tokens"]) == ("org/d", 7)
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "org/d"
    known, unknown = (
        run_main("card", str(result), *names)
        for names in (("--draft-name", "org/d", "--target-name", "org/t"), ("--draft-name", "org/d"))
    )
    assert ["folders-in-commands" in done.notices for done in (known, unknown)] == [False, True]
    absent = write_evaluation(result, drawn_evaluation(draft="./absent"))
    done = run_main("card", str(absent))
    assert done.code == 0
    assert "no-serve-command" in done.notices
    assert "serve" not in done.out


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Mine\n",
        "# Mine, no end",
        "---\nlicense: mit\n---\n# Mine\n\n\ntext  \n",
        "---\n---\n",
        "a\rb\x0bc\n---\n",
    ],
)
def test_bytes_outside_the_marks_stay(text: str, ends: str) -> None:
    text = text.replace("\n", ends)
    ends = ends if ends in text else "\n"
    first = insert_card(text, CARD).text
    assert insert_card(first, CARD).text == first
    assert insert_card(insert_card(first, OTHER).text, CARD).text == first
    after = f"{first}{ends}after{ends}"
    changed = insert_card(after, OTHER).text
    assert changed.endswith(f"{BLOCK_MARKS[1]}{ends}{ends}after{ends}")
    assert without_regions(after, ends) == without_regions(changed, ends)
    for part in text.split(f"---{ends}"):
        assert part in first
    assert ("\r\n" in first) == (ends == "\r\n")


def without_regions(text: str, ends: str) -> str:
    for begin, end in (BLOCK_MARKS, METADATA_MARKS):
        before, _, rest = text.partition(begin + ends)
        text = before + rest.partition(end + ends)[2]
    return text


def test_metadata_that_a_card_states_is_kept() -> None:
    inserted = insert_card("---\nbase_model: mine/own\ntags: [a]\n---\ntext\n", CARD)
    assert inserted.left == ("tags", "base_model")
    assert yaml.safe_load(inserted.text.split("---")[1]) == {"base_model": "mine/own", "tags": ["a"]}


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (f"text\n{BLOCK_MARKS[0]}\nno end\n", "card-marks"),
        (f"{BLOCK_MARKS[1]}\n{BLOCK_MARKS[0]}\n", "card-marks"),
        (f"---\n{METADATA_MARKS[0]}\n---\n", "card-marks"),
        ("---\nno: end\n", "card-metadata-open"),
        ("---\n[1\n---\n", "invalid-yaml"),
        ("---\n- 1\n---\n", "not-a-mapping"),
    ],
)
def test_a_malformed_card_is_refused_and_not_changed(text: str, id: str, result: Path) -> None:
    with refuses(UsageError, id, path="README.md"):
        insert_card(text, CARD, Path("README.md"))
    Path("README.md").write_text(text)
    done = run_main("card", "r.json", "--insert", "README.md", "--engine", "none")
    assert (done.code, done.out, done.error_id) == (2, "", id)
    assert Path("README.md").read_text() == text


@pytest.mark.usefixtures("result")
def test_the_document_of_an_insertion_names_kept_metadata() -> None:
    Path("README.md").write_text("---\ntags: [mine]\n---\n")
    done = run_main("card", "r.json", "--insert", "README.md", "--engine", "none", "--json")
    document = json.loads(done.out)
    assert (document["kind"], document["output"], document["left"]) == ("card", "README.md", ["tags"])
    assert document["block"] in Path("README.md").read_text()
    assert done.notices == ("entries-kept",)
    assert "tags" in done.err
    assert run_main("card", "r.json", "--insert", "absent.md").code == 4
    assert run_main("card", "r.json", "-o", "README.md").code == 2


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["draft", "--target", "there"], "org/d --target org/t"),
        (["-t", "there", "-d", "draft", "--exact-match", "draft"], "-t org/t -d org/d --exact-match draft"),
        (["--json"], "--json"),
    ],
)
def test_the_command_of_a_card_names_the_published_pair(result: Path, typed: list[str], shown: str) -> None:
    evaluation = drawn_evaluation()
    measured = replace(evaluation.measured, argv=("dflash", "eval-acceptance", *typed))
    write_evaluation(result, replace(evaluation, measured=measured))
    text = made("--engine", "none", "--draft-name", "org/d", "--target-name", "org/t")
    assert f"\ndflash eval-acceptance {shown}\n" in text


def test_names_in_a_card_stay_text(result: Path) -> None:
    """Markdown, HTML and line breaks in names, prompts and commands cannot add lines, links or rows."""
    hostile = "a|b\n\n# Title\n<img src=x> [x](http://y) `c` *d*"
    evaluation = drawn_evaluation(draft=f"org/{hostile}")
    argv = ("dflash", "eval-acceptance", "```\n# Title")
    evaluation = replace(
        evaluation,
        categories={hostile: next(iter(evaluation.categories.values()))},
        prompts=replace(evaluation.prompts, name=hostile),
        measured=replace(evaluation.measured, argv=argv, device_name=hostile),
    )
    write_evaluation(result, evaluation)
    for text in (made("--engine", "none").partition("\n---\n")[2], evaluation_to_markdown(evaluation, hostile)):
        fence = re.search(r"^(`{4,})sh\n(.*?)\n\1$", text, re.MULTILINE | re.DOTALL)
        outside = text.replace(fence[0], "") if fence is not None else text
        assert not [line for line in outside.splitlines() if line.startswith("# Title")]
        bare = re.sub(r"(`+).+?\1", "", re.sub(r"\\.", "", outside))
        assert not {"<img", "](http", "*d*"} & {part for part in ("<img", "](http", "*d*") if part in bare}
        for table in re.findall(r"(?:^\|.*\n)+", outside, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_card_withholds_categories_of_few_prompts(result: Path) -> None:
    """Their length is not published, neither in the table nor in the metadata."""
    evaluation = drawn_evaluation()
    few = summarise([request_output([2, 3, 4], index) for index in range(11)], 4)
    write_evaluation(result, replace(evaluation, categories={**evaluation.categories, "tiny one": few}))
    made("--engine", "none", "-o", "README.md")
    card = HubCard.load("README.md", ignore_metadata_errors=False)
    assert [item.dataset_config for item in card.data.eval_results or []] == [None, *evaluation.categories]
    assert [line for line in card.text.splitlines() if line.startswith("| tiny one")] == []
    assert "left out: tiny one." in card.text
