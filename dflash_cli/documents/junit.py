"""JUnit XML, which CI systems show as tests."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from dflash_cli.documents.atomic_file import check_parent, write_whole
from dflash_runtime.errors import GateFailed

NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test case.

    group     the name under which CI systems list it
    failures  one line per fault; empty if it passed
    error     why it could not be judged; empty if it was
    details   lines about the failures
    output    lines that do not make it fail
    """

    name: str
    group: str
    failures: tuple[str, ...] = ()
    error: str = ""
    details: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


def junit(name: str, cases: Sequence[Case]) -> str:
    """The XML text of one test suite."""
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(bool(case.failures) for case in cases)),
        "errors": str(sum(bool(case.error) for case in cases)),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": _safe(name), **counts, "skipped": "0"})
    for case in cases:
        _add(suite, case)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


@contextmanager
def gate_written(path: Path | None, command: str, gate: str) -> Iterator[None]:
    """Write the verdict of a gate that the block checks: passed, failed, or an error of another kind.

    Raises:
        UsageError: the parent of `path` is not a directory.
    """
    if path is None:
        yield
        return
    case = Case(name=gate, group=command)
    try:
        yield
    except GateFailed as error:
        case = Case(name=gate, group=command, failures=(error.message,), details=(error.hint or "",))
        raise
    except Exception as error:
        case = Case(name=gate, group=command, error=str(error) or "the command failed before the gate was checked")
        raise
    finally:
        check_parent(path)
        write_whole(path, junit(command, [case]).encode())


def _add(suite: ElementTree.Element, case: Case) -> None:
    element = ElementTree.SubElement(suite, "testcase", {"classname": _safe(case.group), "name": _safe(case.name)})
    if case.error:
        ElementTree.SubElement(element, "error", {"message": _safe(case.error), "type": "error"})
    if case.failures:
        attributes = {"message": _safe("; ".join(case.failures)), "type": "failure"}
        failure = ElementTree.SubElement(element, "failure", attributes)
        failure.text = _safe("\n".join(case.details))
    if case.output:
        ElementTree.SubElement(element, "system-out").text = _safe("\n".join(case.output))


def _safe(text: str) -> str:
    """The text, with characters escaped that XML cannot have."""
    return NOT_IN_XML.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
