"""Ask for JSON by a schema: is it valid, does it end, is it drafted, and is it as fast as other answers?"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_cli.probing.asking.kind_findings import find_endless, find_slow, find_undrafted
from dflash_cli.probing.asking.question import QUESTIONS, CountedAnswer, Outcome, QuestionSession, pooled_length
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.empty_tail import empty_tail
from dflash_cli.probing.servers.inference_server import Variant
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import plural, shorten

ANSWER_LEN = 160
KINDS = ("tool", "plant", "animal", "place")
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"type": "string", "enum": list(KINDS)},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}
TEXTS = (
    "Describe an oak as a JSON object with name, kind, count and two or three tags. Answer with JSON only.",
    "Describe a hammer as a JSON object with name, kind, count and two or three tags. Answer with JSON only.",
)
THOUGHT_END = "</think>"
MARKS = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{1,20}\]|```|\x00")
"""Marks of templates, which a server may leave behind an answer."""
ANY_JSON = (
    "Each answer is a whole JSON object with other keys, as if the request asked for any JSON: a gateway or an option "
    "that turns json_schema into json_object, or drops the schema, does so with and without a draft"
)
LOOK_BEFORE = "ask the engine at its own address, and look for such a rule in the gateway; if the keys stay, "


@QUESTIONS.register("json-schema")
def ask(session: QuestionSession) -> Outcome:
    """Findings about answers by a schema."""
    variant = Variant(json_schema=SCHEMA)
    prompts = [session.prompt_of(text) for text in TEXTS]
    found = [session.ask(prompt_ids, ANSWER_LEN, variant) for prompt_ids in prompts]
    # The engine compiles a schema at its first use, so that only a later answer shows the speed.
    repeated = session.ask(prompts[0], ANSWER_LEN, variant)
    verdicts = [_is_valid(item) for item in found]
    valid = sum(verdict is True for verdict in verdicts)
    cut = sum(verdict is None for verdict in verdicts)
    seen = f"{valid} of {plural(len(found), 'answer')} fit the schema" + (f", {cut} not finished" if cut else "")
    length, _ = pooled_length(found)
    seen += "" if length is None else f", {length:.2f} tokens per step"
    fastest = min(found[1], repeated, key=lambda item: item.seconds / max(1, item.num_tokens))
    findings = [
        *_broken(session, prompts, found, verdicts),
        *_endless(session, prompts, [*found, repeated]),
        *find_undrafted(session, found, "structured-output", "JSON by a schema"),
        *find_slow(session, "structured-output-slow", "JSON by a schema", fastest.seconds, fastest.num_tokens),
    ]
    return Outcome(seen=seen, findings=findings)


def _endless(
    session: QuestionSession, prompts: Sequence[Sequence[int]], found: Sequence[CountedAnswer]
) -> Iterator[ServedFinding]:
    """Answers that begin as JSON and then say nothing up to the limit."""
    texts = [_begun(item) for item in found]
    place = next((place for place, text in enumerate(texts) if empty_tail(text)), 0)

    def ends_plainly() -> bool | None:
        if not session.server.can_switch_off:
            return None
        variant = Variant(json_schema=SCHEMA, is_plain=True)
        return session.ask(prompts[place % len(prompts)], ANSWER_LEN, variant).served.finish_reason != "length"

    yield from find_endless("structured-output", "JSON by a schema", texts, ends_plainly)


def _begun(item: CountedAnswer) -> str:
    """The text of an answer that was cut by the limit, if it begins as JSON; otherwise an empty text."""
    text = item.served.text.rpartition(THOUGHT_END)[2]
    is_begun = text.lstrip()[:1] in ("", "{", "`")
    return text if is_begun and item.served.finish_reason == "length" else ""


def _is_valid(item: CountedAnswer) -> bool | None:
    """Whether an answer fits the schema; None if it was cut before its end."""
    text = item.served.text.rpartition(THOUGHT_END)[2].strip()
    inner = text[text.find("{") : text.rfind("}") + 1]  # a server may leave marks of the template around it
    if any(_fits(candidate) for candidate in (text, inner)) and not _rest(text):
        return True
    return None if item.served.finish_reason == "length" else False


def _rest(text: str) -> str:
    """The text after the object, without white space and marks of templates."""
    return MARKS.sub("", text.rpartition("}")[2]).strip() if "}" in text else ""


def _fault_of(text: str) -> str:
    rest = _rest(text)
    what, part = ("have text after the object", rest) if rest else ("do not fit the schema", text)
    return f"{what}, such as {json.dumps(shorten(' '.join(part.split()), 60))}"


def _fits(text: str) -> bool:
    try:
        value = loads(text.encode())
    except ValueError:
        return False
    if not isinstance(value, dict) or set(value) != set(SCHEMA["required"]):
        return False
    tags = value["tags"]
    is_list = isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
    return isinstance(value["name"], str) and value["kind"] in KINDS and is_list and type(value["count"]) is int


def _broken(
    session: QuestionSession,
    prompts: Sequence[Sequence[int]],
    found: Sequence[CountedAnswer],
    verdicts: Sequence[bool | None],
) -> Iterator[ServedFinding]:
    """Finished answers that do not fit. Where a request can switch drafts off, the same is asked without them."""
    places = [place for place, verdict in enumerate(verdicts) if verdict is False]
    if not places:
        return
    seen = f"{len(places)} of {plural(len(found), 'answer')} {_fault_of(found[places[0]].served.text)}"
    broken, is_draft = [found[place] for place in places], None
    if all(item.num_steps == 0 for item in broken):
        is_draft = False
    elif session.server.can_switch_off:
        variant = Variant(json_schema=SCHEMA, is_plain=True)
        plain = [session.ask(prompts[place], ANSWER_LEN, variant) for place in places]
        is_draft, broken = all(map(_is_valid, plain)), [*broken, *plain]
    follows = {
        None: "the server does not hold the schema; whether the draft is the reason is not known",
        True: "without drafts the same answers fit: drafting breaks structured output",
        False: "without drafts the answers do not fit either: the draft is not the reason",
    }[is_draft]
    is_other = len(places) == len(found) and not is_draft and all(map(_has_other_keys, broken))
    if is_other and is_draft is None and _fits_by_own_field(session, [prompts[place] for place in places]):
        follows = f"the same drafts answer by the schema in the field {session.server.schema_field}: the draft is not "
        follows += "the reason"
    yield ServedFinding(
        id="structured-output-broken",
        severity="error" if is_draft else "warning",
        seen=seen,
        follows=f"{follows}. {ANY_JSON}" if is_other else follows,
        next=f"{LOOK_BEFORE if is_other else ''}start the server without the draft and ask the same; report it to the "
        "engine",
    )


def _fits_by_own_field(session: QuestionSession, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether the answers fit, and are drafted, if the engine's own field gives the schema."""
    if session.server.schema_field is None:
        return False
    variant = Variant(json_schema=SCHEMA, by_own_field=True)
    try:
        found = [session.ask(prompt_ids, ANSWER_LEN, variant) for prompt_ids in prompts]
    except RequestError:
        return False
    return all(_is_valid(item) and item.num_steps for item in found)


def _has_other_keys(item: CountedAnswer) -> bool:
    """Whether a finished answer is a JSON object that lacks keys of the schema or has others."""
    try:
        value = loads(item.served.text.rpartition(THOUGHT_END)[2].strip().encode())
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) != set(SCHEMA["required"])
