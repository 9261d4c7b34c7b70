"""Recognise the engine of a server by several signs: owners, names of metrics, documents, and answers.

Gateways and names of users replace the owner in the list of models. The server behind them is the same.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from dflash_cli.probing.servers.http_client import HttpClient, ServerUnreachable, TimeIsUp
from dflash_cli.probing.servers.inference_server import (
    MAX_MODELS,
    MAX_SHOWN_CHARS,
    SERVERS,
    Asked,
    InferenceServer,
    server_engines,
)
from dflash_runtime.errors import RequestError, UnsupportedError, UsageError
from dflash_runtime.json_values import as_object
from dflash_runtime.phrases import closest, shorten

logger = logging.getLogger(__name__)
ONE_TOKEN = Asked(max_new_tokens=1)


def check_engine(name: str) -> None:
    """Refuse a name that is neither `auto` nor an engine with a file in `servers/`.

    Raises:
        UsageError: names all engines.
    """
    known = ("auto", *server_engines())
    if name not in known:
        close = closest(name, known)
        hint = f"did you mean {close}?" if close else None
        raise UsageError(field="--engine", found=name, expected=", ".join(known), hint=hint)


def open_server(client: HttpClient, *, engine: str = "auto", model: str | None = None) -> InferenceServer:
    """The server at the client's URL. With `auto`, the first sign of an engine names it.

    Raises:
        UnsupportedError: the server's engine is unknown.
        UsageError: the engine's name is unknown, or the server does not serve the model.
        ServerUnreachable: the server does not answer.
    """
    check_engine(engine)
    models = _models(client)
    names = [shorten(str(item.get("id")), MAX_SHOWN_CHARS) for item in models[:MAX_MODELS]]
    if model is not None and names and model not in names:
        raise UsageError(field="--served-model", found=model, expected=f"a model of {client.url}: {', '.join(names)}")
    chosen = model or (names[0] if names else "default")
    if engine != "auto":
        return SERVERS[engine](client, chosen, recognised_by="--engine")
    owners = {shorten(str(item.get("owned_by")), MAX_SHOWN_CHARS) for item in models[:MAX_MODELS]}
    for name, sign in _signs(client, chosen, owners):
        logger.info("%s: %s, by %s", client.url, name, sign)
        return SERVERS[name](client, chosen, recognised_by=sign)
    found = f"models of {', '.join(sorted(owners))}" if owners else "no list of models at /v1/models"
    raise UnsupportedError(
        f"found {found}, and no metrics, documents or answers of a known engine; expected a server of "
        f"{', '.join(server_engines())}",
        id="unknown-server",
        path=client.url,
        found=sorted(owners),
        hint="name the engine with --engine",
    )


def _signs(client: HttpClient, model: str, owners: set[str]) -> Iterator[tuple[str, str]]:
    """Engines with a sign of each, the surest and cheapest signs first."""
    engines = [(name, SERVERS[name]) for name in server_engines()]
    yield from ((name, f"the owner {kind.owner} at /v1/models") for name, kind in engines if kind.owner in owners)
    metrics = client.find_text("/metrics") or client.find_text("/metrics/") or ""
    lines = metrics.splitlines()
    for name, kind in engines:
        prefix = next(iter(kind.counter_names.values())).partition(":")[0] + ":"
        if any(line.startswith(prefix) for line in lines):
            yield name, f"metrics named {prefix}"
    for name, kind in engines:
        for path, field in kind.own_fields.items():
            if field in as_object(client.find(path)):
                yield name, f"{field} at {path}"
    for name, kind in engines:
        with suppress(RequestError, UnsupportedError):
            if _answers(kind(client, model)):
                yield name, "the fields of an answer"


def _answers(server: InferenceServer) -> bool:
    """Whether the server gives an answer of this engine. A gateway may answer with an error to an unknown path.

    Raises:
        RequestError, UnsupportedError: another engine or a gateway answered.
        ServerUnreachable: the server refuses connections or the key, or no time is left.
    """
    try:
        return bool(server.answer((1,), ONE_TOKEN).token_ids)
    except ServerUnreachable as error:
        if error.id != "no-answer" or isinstance(error, TimeIsUp):
            raise
        return False


def _models(client: HttpClient) -> list[Mapping[str, Any]]:
    data = as_object(client.find("/v1/models")).get("data")
    return [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
