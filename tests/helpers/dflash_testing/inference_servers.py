"""A server of completions on this machine with the interface of vLLM, SGLang or llama.cpp."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dflash_testing.fake_engines import FakeEngine, Fault
from dflash_testing.server_forms import ANSWERS, LOGPROBS, METRICS, PATHS, documents, read_body, said


class Handler(BaseHTTPRequestHandler):
    """Answers for the server's `engine`."""

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def engine(self) -> FakeEngine:
        engine: FakeEngine = self.server.engine  # type: ignore[attr-defined]
        return engine

    def do_GET(self) -> None:
        engine = self.engine
        if self._is_closed():
            return
        if self.path == f"/metrics{engine.metrics_slash}" and engine.has_metrics:
            text = engine.metrics_text or METRICS[engine.style](engine)
            lines = [
                line for line in text.splitlines(keepends=True) if not any(name in line for name in engine.missing)
            ]
            self._send(200, "".join(lines).encode())
        elif self.path == "/metrics" and engine.metrics_slash:
            self._send(307, b"")
        elif (found := documents(engine).get(self.path)) is not None:
            self._send_json(found)
        else:
            self._send(404, b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_closed():
            return
        engine.headers.append(dict(self.headers))
        if self.path == "/tokenize":
            self._send_json({"tokens": engine.encode(body.get("prompt") or body.get("content") or said(body))})
        elif self.path == "/apply-template":
            self._send_json({"prompt": said(body)})
        elif self.path == PATHS[engine.style]:
            self._complete(read_body(engine, body))
        else:
            self._send(404, b'{"detail":"Not Found"}')

    def _complete(self, body: dict[str, Any]) -> None:
        engine, ids = self.engine, tuple(body["ids"])
        if body["wants_logprobs"]:
            self._send_json(LOGPROBS[engine.style](engine.likeliest(ids)))
            return
        with engine.lock:
            number, engine.num_answers = engine.num_answers, engine.num_answers + 1
            engine.num_active += 1
            engine.bodies.append(body)
            if engine.resets_at == number:
                engine.reset()
        try:
            time.sleep(engine.pause_s)
            if number in engine.faults:
                self._fail(engine.faults[number])
                return
            text = engine.text_of(ids, body["num_tokens"], is_loaded=engine.num_active > 1)
            text = engine.with_cache(ids, text)
            if (body["temperature"] or 0) > 0.1:
                text = replace(text, token_ids=tuple(token + 1 for token in text.token_ids))  # sampled
            with engine.lock:
                engine.count(text)
            self._send_json(ANSWERS[engine.style](engine, text))
        finally:
            with engine.lock:
                engine.num_active -= 1

    def _fail(self, fault: Fault) -> None:
        if fault == "timeout":
            time.sleep(0.6)
        elif fault == "garbage":
            self._send(200, b"<html>a proxy")
        elif fault == "cut":
            self._send(200, b'{"choices": [{}], "meta_info": {}}')
        elif fault == "400":
            self._send(400, b'{"error": {"message": "the prompt is longer than the model reads"}}')
        else:
            self._send(int(fault), b"trouble")

    def _is_closed(self) -> bool:
        key = self.engine.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._send(401, b'{"error": "Unauthorized"}')
        return True

    def _send_json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode())

    def _send(self, status: int, data: bytes) -> None:
        with suppress(ConnectionError):  # whoever asked has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


@contextmanager
def serving(engine: FakeEngine, port: int = 0) -> Iterator[FakeEngine]:
    """The engine behind a URL on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.engine = engine  # type: ignore[attr-defined]
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
