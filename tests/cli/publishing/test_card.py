"""The card: the Hub's own library reads it, and what it is put into keeps every other byte."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

from dflash_cli.publishing.card_insertion import BLOCK_MARKS, METADATA_MARKS, insert_card
from dflash_cli.publishing.model_card import ModelCard
from dflash_runtime.errors import UsageError
from dflash_testing import checkpoints as support
from dflash_testing.evaluations import drawn_evaluation, write_evaluation

CARD = ModelCard({"tags": ["dflash"], "base_model": "org/target"}, "## Acceptance\n\n2.8\n")
OTHER = ModelCard({"tags": ["dflash", "new"]}, "## Acceptance\n\n3.1, and more\nlines\n")


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_evaluation(tmp_path / "r.json", drawn_evaluation())


def made(*arguments: str) -> str:
    done = support.run_main("card", "r.json", *arguments)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.usefixtures("result")
def test_the_hubs_library_reads_the_figures() -> None:
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
    assert (total.task_type, total.metric_type, total.dataset_name) == (
        "text-generation", "acceptance_length", "my prompts.jsonl",
    )  # fmt: skip
    assert [item.dataset_config for item in categories] == list(evaluation.categories)
    for text in ("interval over prompts", "temperature 0.0", "dflash eval-acceptance org/draft -p 'my prompts.jsonl'"):
        assert text in card.text


def test_a_pair_that_is_here_has_its_commands(result: Path) -> None:
    settings = drawn_evaluation(draft="tiny", target="tiny").settings
    write_evaluation(result, drawn_evaluation(num_drafted=7), settings=dict(settings))
    text = made("--draft-name", "org/d", "--target-name", "org/t")
    assert "vllm serve org/t --speculative-config" in text
    assert '"model": "org/d", "num_speculative_tokens": 7' in text
    assert "--speculative-draft-model-path org/d" in text
    known, unknown = (
        support.run_main("card", str(result), *names)
        for names in (("--draft-name", "org/d", "--target-name", "org/t"), ("--draft-name", "org/d"))
    )
    assert ["folders of this machine" in done.err for done in (known, unknown)] == [False, True]
    absent = write_evaluation(result, drawn_evaluation(draft="./absent"))
    done = support.run_main("card", str(absent))
    assert done.code == 0
    assert "warning: no command to serve it: " in done.err
    assert "Serve it" not in done.out


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
def test_everything_else_stays_byte_for_byte(text: str, ends: str) -> None:
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


def test_what_a_card_states_itself_is_left_to_it() -> None:
    inserted = insert_card("---\nbase_model: mine/own\ntags: [a]\n---\ntext\n", CARD)
    assert inserted.left == ("tags", "base_model")
    assert yaml.safe_load(inserted.text.split("---")[1]) == {"base_model": "mine/own", "tags": ["a"]}


@pytest.mark.parametrize(
    "text",
    [
        f"text\n{BLOCK_MARKS[0]}\nno end\n",
        f"{BLOCK_MARKS[1]}\n{BLOCK_MARKS[0]}\n",
        f"---\n{METADATA_MARKS[0]}\n---\n",
        "---\nno: end\n",
        "---\n[1\n---\n",
        "---\n- 1\n---\n",
    ],
)
def test_a_card_that_cannot_be_read_is_refused(text: str, result: Path) -> None:
    with pytest.raises(UsageError):
        insert_card(text, CARD)
    Path("README.md").write_text(text)
    done = support.run_main("card", "r.json", "--insert", "README.md", "--engine", "none")
    assert (done.code, done.out) == (2, "")
    assert Path("README.md").read_text() == text


@pytest.mark.usefixtures("result")
def test_inserting_says_what_it_wrote_and_what_it_left() -> None:
    Path("README.md").write_text("---\ntags: [mine]\n---\n")
    done = support.run_main("card", "r.json", "--insert", "README.md", "--engine", "none", "--json")
    document = json.loads(done.out)
    assert (document["kind"], document["output"], document["left"]) == ("card", "README.md", ["tags"])
    assert document["block"] in Path("README.md").read_text()
    assert "note: README.md states tags itself, which is left as it is" in done.err
    assert support.run_main("card", "r.json", "--insert", "absent.md").code == 4
    assert support.run_main("card", "r.json", "-o", "README.md").code == 2
