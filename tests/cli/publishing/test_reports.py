"""Reports: complete in each format, with escaped texts, and written completely or not at all."""

import csv
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest

from dflash_cli.acceptance.acceptance_figures import find_figures
from dflash_cli.acceptance.acceptance_report import command_line, headline, tables
from dflash_cli.acceptance.condition_results import ConditionResult
from dflash_cli.acceptance.context_curve import ContextCurve
from dflash_cli.comparing.stored_evaluation import read_evaluations
from dflash_cli.figures.drawing import COLUMN, LETTER, PAGE, Label, lay_out
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.context_marks import ContextMark
from dflash_cli.publishing.csv_report import COLUMNS
from dflash_cli.publishing.report_format import choose_format, name_results, write_report
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_testing.command_line import run_main
from dflash_testing.evaluations import HOSTILE, drawn_evaluation, write_evaluation
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`a.json` of 128 prompts, and `b.json` of 20 prompts with shorter blocks, without intervals by position."""
    monkeypatch.chdir(tmp_path)
    write_evaluation(tmp_path / "a.json", drawn_evaluation(0.7))
    write_evaluation(tmp_path / "b.json", drawn_evaluation(0.4, count=20, num_drafted=3))
    return tmp_path


def written(*arguments: str) -> str:
    done = run_main("report", *arguments)
    assert done.code == 0, done.err
    return Path(done.out.strip()).read_text()


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects the tags and references of a page."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_self_contained_and_well_formed(files: Path) -> None:
    page = written("a.json", "b.json", "-o", "report.html")
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.references == []
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert not re.search(r"https?://|url\(|@import", page)
    assert "prefers-color-scheme:" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 4
    for drawing in drawings:
        parts = ElementTree.fromstring(drawing)
        assert parts.find("title") is not None
        assert parts.find("desc") is not None
        named = set((parts.get("aria-labelledby") or "").split())
        assert named == {item.get("id") for item in parts if item.get("id")}
    assert page.count("<table>") == page.count('<th scope="col">definition</th>') * 5 + len(drawings)


def test_texts_of_a_result_are_escaped_in_a_page(files: Path) -> None:
    page = written("a.json", "-o", "report.html")
    assert HOSTILE not in page
    assert "<b>more</b>" not in page
    assert "&lt;/td&gt;&lt;script" in page


def test_labels_fit_their_drawing_at_every_width_of_the_page(files: Path) -> None:
    """A label ends at its anchor. With any font of the style sheet, the longest label of a row starts inside."""
    page = written("a.json", "-o", "report.html")
    sizes = [int(size) for size in re.findall(r"svg text \{ font(?:-size)?: (\d+)px", page)]
    ends = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">', page)
    room = max(map(float, ends))
    assert sizes
    assert max(sizes) * 0.58 * PAGE.name_length <= room, (
        "0.58 is the mean width of letters, as a share of the font size"
    )
    assert "overflow-x: auto" in page.partition("@media (max-width")[2].partition("@media")[0], "a narrow page scrolls"


def test_a_page_has_results_tables_and_provenance(files: Path) -> None:
    page = written("a.json", "b.json", "-o", "report.html")
    evaluation = drawn_evaluation(0.7)
    interval = evaluation.total.acceptance_len_interval
    assert interval is not None
    for text in (
        f"{evaluation.total.counts.acceptance_len:.3f}",
        f"[{interval.low:.3f}, {interval.high:.3f}]", *(title.capitalize() for title in tables(evaluation)),
        *(failure.error for failure in evaluation.failed), command_line(evaluation), "draft.commit", "a" * 40, "4567",
    ):  # fmt: skip
        assert escape(text, quote=True).replace("&#x27;", "&#39;") in page, text


def test_bands_show_the_intervals(files: Path) -> None:
    stored = read_evaluations([Path("a.json"), Path("b.json")])
    figures = find_figures({item.name: item.evaluation for item in stored})
    by_position, by_condition = figures[:2]
    first, second = by_position.series
    assert [point is not None and point.ends is not None for point in first.points] == [True] * 4
    assert second.points[3] is None, "its blocks are shorter"
    assert all(point is not None and point.ends is None for point in second.points[:3])
    conditional = by_condition.series[0].points
    assert conditional[0] is not None
    assert conditional[0].ends == first.points[0].ends if first.points[0] else False
    assert [figure.columns for figure in figures] == [
        [name, "a", "b"] for name in ("draft position", "draft position", "tokens committed by a step", "category")
    ]
    page = written("a.json", "b.json", "-o", "report.html")
    assert page.count('class="band s0"') == 2
    assert page.count('class="band s1"') == 0


def test_a_shape_is_shown_with_its_test(tmp_path: Path) -> None:
    evaluation = drawn_evaluation(0.1, count=60)
    write_evaluation(tmp_path / "low.json", evaluation)
    page = written(str(tmp_path / "low.json"), "-o", str(tmp_path / "low.html"))
    (shape,) = evaluation.shapes
    assert shape.name in page
    assert shape.test in page


def test_a_table_is_tidy(files: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(written("a.json", "b.json", "-o", "report.csv"))))
    assert tuple(rows[0]) == COLUMNS
    assert {row["result"] for row in rows} == {"a", "b"}
    keys = [(row["result"], row["category"], row["quantity"], row["position"]) for row in rows]
    assert len(keys) == len(set(keys))
    evaluation = drawn_evaluation(0.7)
    (length,) = [
        row for row in rows if row["result"] == "a" and not row["category"] and row["quantity"] == "acceptance_len"
    ]
    assert float(length["value"]) == evaluation.total.counts.acceptance_len
    assert evaluation.total.acceptance_len_interval is not None
    assert float(length["low"]) == evaluation.total.acceptance_len_interval.low
    steps = [row for row in rows if row["result"] == "a" and not row["category"] and row["quantity"] == "steps_giving"]
    assert [int(row["count"]) for row in steps] == list(evaluation.total.histogram)


def test_markdown_of_several_results_has_the_report_of_each(files: Path) -> None:
    one = run_main("report", "a.json").out
    assert one.startswith("# Acceptance\n")
    evaluation = drawn_evaluation(0.7)
    for title, (_, rows) in tables(evaluation).items():
        table = one.partition(f"\n## {title.capitalize()}\n\n")[2].partition("\n\n")[0]
        assert len(table.splitlines()) == 2 + len(rows), title
    for text in (headline(evaluation), command_line(evaluation), *(failure.error for failure in evaluation.failed)):
        assert text in one
    assert "| `[ a\\|b] 2` |" in one
    assert f"| `[{HOSTILE[:14]}…` |" in one, "tokens are inline code, so HTML in them stays text"
    both = written("a.json", "b.json", "-o", "report.md")
    assert both.startswith("# Acceptance of several results\n")
    assert one.partition("\n")[2] in both
    assert "\n# b\n" in both


def test_the_format_comes_from_the_option_or_the_suffix(files: Path) -> None:
    assert written("a.json", "-o", "report.txt", "--format", "csv").startswith("result,")
    assert run_main("report", "a.json", "--format", "csv").out.startswith("result,")
    wrong = run_main("report", "a.json", "-o", "report.gif")
    assert (wrong.code, wrong.out) == (2, "")
    with refuses(UsageError, "unknown-suffix", path="report.gif", field="suffix", found=".gif"):
        choose_format(Path("report.gif"), None)
    document = json.loads(run_main("report", "a.json", "-o", "r.md", "--json").out)
    assert (document["kind"], document["format"], document["output"]) == ("report", "md", "r.md")


def test_an_existing_report_is_not_replaced_and_a_failed_run_writes_nothing(files: Path) -> None:
    Path("report.html").write_text("mine")
    assert run_main("report", "a.json", "-o", "report.html").code == 2
    assert run_main("report", "a.json", "absent.json", "-o", "report.html", "--force").code == 4
    assert Path("report.html").read_text() == "mine"
    assert sorted(path.name for path in files.iterdir()) == ["a.json", "b.json", "report.html"]
    assert run_main("report", "a.json", "-o", "/dev/null", "--format", "html").code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("form", ["png", "pdf"])
def test_a_picture_without_matplotlib_is_refused_with_a_hint(
    form: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run_main("report", "a.json", "-o", f"report.{form}")
    assert (done.code, done.error_id, done.field) == (5, "no-matplotlib", "--format")
    assert done.error is not None
    assert "dflash-cli[plot]" in str(done.error.hint)
    assert len(done.err.splitlines()) == 2, "one line for the error, one for the hint"
    with refuses(UnsupportedError, "no-matplotlib"):
        write_report(read_evaluations([Path("a.json")]), "png")
    assert not Path(f"report.{form}").exists()
    assert run_main("report", "a.json", "-o", "report.svg").code == 0, "an SVG needs no library"


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_a_picture_is_the_same_each_time(form: Literal["svg", "png", "pdf"], files: Path) -> None:
    pytest.importorskip("matplotlib")
    stored = read_evaluations([Path("a.json"), Path("b.json")])
    first, again = (write_report(stored, form) for _ in range(2))
    assert first.startswith({"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}[form])
    assert first == again


def test_characters_that_the_font_lacks_are_told_in_one_line(files: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_main("report", "a.json", "b.json", "--figure", "positions", "--name", "日,b", "-o", "x.png")
    assert (done.code, done.notices, len(done.err.splitlines())) == (0, ("characters-not-drawn",), 1)


def test_one_figure_has_the_width_of_a_column_and_the_names_of_the_user(files: Path) -> None:
    text = written("a.json", "b.json", "--figure", "positions", "--name", "DFlash,EAGLE-3", "-o", "figure.svg")
    whole = ElementTree.fromstring(text)
    assert whole.get("width") == "3.330in"
    texts = [item.text for item in whole if item.tag.endswith("text")]
    assert {"DFlash", "EAGLE-3", "draft position", "share of verify steps"} <= set(texts)
    page = written("a.json", "b.json", "--figure", "histogram", "--name", "DFlash,EAGLE-3", "-o", "report.html")
    assert page.count("<svg") == 1
    assert "<h2>EAGLE-3</h2>" in page


@pytest.mark.parametrize(
    ("options", "id", "field"),
    [
        (["--figure", "context"], "no-such-figure", "--figure"),
        (["--figure", "differences"], "no-such-figure", "--figure"),
        (["--figure", "positions", "--format", "csv"], "usage-error", "--figure"),
        (["--name", "one"], "usage-error", "--name"),
        (["--name", "one,one"], "usage-error", "--name"),
    ],
)
def test_figures_and_names_that_do_not_fit_are_refused(options: list[str], id: str, field: str, files: Path) -> None:
    done = run_main("report", "a.json", "b.json", "-o", "report.svg", *options)
    assert (done.code, done.error_id, done.field) == (2, id, field)
    assert not Path("report.svg").exists()


def test_files_of_one_name_stay_apart(files: Path) -> None:
    stored = read_evaluations([Path("a.json"), Path("a.json"), Path("b.json")])
    assert [item.name for item in name_results(stored, ())] == ["a", "a 2", "b"]


def test_results_of_the_same_prompts_are_compared_by_position(files: Path) -> None:
    write_evaluation(files / "c.json", drawn_evaluation(0.5))
    both = written("a.json", "c.json", "-o", "report.md")
    assert "## c minus a by position\n\nlower at 1 to 4" in both
    page = written("a.json", "c.json", "-o", "report.html")
    assert "<h3>Difference by position</h3>" in page
    assert "c: lower at 1 to 4" in page
    texts = {
        item.text
        for item in ElementTree.fromstring(written("a.json", "c.json", "--figure", "differences", "-o", "d.svg"))
    }
    assert "difference of shares" in texts
    assert "by position" not in written("a.json", "b.json", "-o", "other.md").partition("\n# a\n")[0], "other prompts"


def test_context_lengths_have_a_figure_with_the_lengths_that_the_draft_names(files: Path) -> None:
    evaluation = drawn_evaluation(0.6)
    results = tuple(
        ConditionResult(
            condition=Condition(context_len=size), summary=drawn_evaluation(chance).total, prompt_len=size, num_failed=0
        )
        for size, chance in ((1024, 0.7), (4096, 0.7), (16384, 0.3))
    )
    window = ContextMark(kind="window", num_tokens=8192, source="sliding_window of 5 of 5 layers")
    curve = ContextCurve(marks=(window,))
    write_evaluation(files / "c.json", dataclasses.replace(evaluation, conditions=results, context=curve))
    (found,) = [
        item for item in find_figures({"c": read_evaluations([Path("c.json")])[0].evaluation}) if item.name == "context"
    ]
    assert found.labels == ("1,024", "4,096", "16,384")
    assert [point is not None and point.ends is not None for point in found.series[0].points] == [True] * 3
    for figure in [*find_figures({"c": evaluation}), found]:
        drawing = lay_out(figure, COLUMN)
        for item in drawing.shapes:
            if isinstance(item, Label) and item.is_turned:
                assert LETTER * COLUMN.text * len(item.text) <= 2 * min(item.y, drawing.height - item.y), item.text
    (mark,) = found.marks
    assert (round(mark.place, 6), mark.name) == (1.5, "window 8,192")
    assert ">window 8,192<" in written("c.json", "--figure", "context", "-o", "context.svg")
    assert "no fall with the context was measured" in written("c.json", "-o", "context.md")


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
@pytest.mark.parametrize(("scheme", "setting"), [("dark", 0), ("light", 1)])
def test_a_browser_draws_the_page_in_light_and_dark(scheme: str, setting: int, files: Path) -> None:
    """In the colours of the reader's setting. The page needs no script."""
    page = written("a.json", "b.json", "-o", "report.html").replace(
        "</body>",
        "<div style='position:absolute;top:0;left:0;width:8px;height:8px;background:var(--c0)'></div></body>",
    )
    Path("probe.html").write_text(page)
    subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=500,700",
            f"--user-data-dir={files / 'profile'}", f"--blink-settings=preferredColorScheme={setting}",
            f"--screenshot={files / 'shot.png'}", (files / "probe.html").as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    pixels = first_pixels(files / "shot.png")
    assert pixels[0] == {"light": (0x2E, 0x8A, 0xE6), "dark": (0xB2, 0xC6, 0xFF)}[scheme]
    assert pixels[-1] == {"light": (0xFB, 0xFB, 0xFA), "dark": (0x14, 0x17, 0x1A)}[scheme]


def first_pixels(path: Path) -> list[tuple[int, ...]]:
    """Return the first row of a PNG with 8 bits per channel, read without a library."""
    import struct
    import zlib

    data = path.read_bytes()
    width, _, _, kind = struct.unpack(">IIBB", data[16:26])
    size = {2: 3, 6: 4}[kind]
    place, packed = 8, b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        packed += data[place + 8 : place + 8 + length] if data[place + 4 : place + 8] == b"IDAT" else b""
        place += 12 + length
    row = bytearray(zlib.decompress(packed)[: 1 + width * size])
    assert row[0] != 3, "with nothing above, the other filters are the bytes as they are, or differences from the left"
    for index in range(1 + size, len(row)) if row[0] in (1, 4) else ():
        row[index] = (row[index] + row[index - size]) % 256
    return [tuple(row[1 + size * place : 4 + size * place]) for place in range(width)]


def test_the_page_is_part_of_the_package() -> None:
    assert (ROOT / "dflash_cli" / "publishing" / "page.html").is_file()
