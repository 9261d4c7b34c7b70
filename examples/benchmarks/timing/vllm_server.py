"""vLLM's own server, in a process of its own: `python vllm_server.py --model DIR ...`, as `vllm serve` takes it.

Copies of vLLM that were made small may lack the routes for metrics, health and version; the server is then given some
that read the same registry. Nothing of this project is imported, so its environment may be another.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "vllm.entrypoints.serve.instrumentator"


def add_routes(app: Any) -> None:
    """What the missing package would add to the server's application, as far as a probe asks for it."""
    from fastapi.responses import JSONResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry
    from vllm.version import __version__

    def metrics() -> Response:
        return Response(generate_latest(get_prometheus_registry()), media_type=CONTENT_TYPE_LATEST)

    def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    app.add_api_route("/metrics", metrics)
    app.add_api_route("/version", version)
    app.add_api_route("/health", lambda: Response())


def stand_in() -> None:
    """Put the package in place, with the names that the server imports from it."""

    async def health(request: Any) -> Any:
        from fastapi.responses import Response

        return Response()

    names: dict[str, dict[str, Any]] = {
        PACKAGE: {"register_instrumentator_api_routers": add_routes, "__path__": []},
        f"{PACKAGE}.basic": {"base": lambda request: request.app.state.serving_tokenization},
        f"{PACKAGE}.health": {"health": health},
    }
    for name, members in names.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module


def main() -> None:
    # This folder is first on the path, and its modules are none of vLLM's business.
    sys.path.pop(0)
    if find_spec(PACKAGE) is None:
        stand_in()
    # As its own module does when it is run; its processes start from this file, and need nothing that is put in place.
    import uvloop
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    given = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(given)
    uvloop.run(run_server(given))


if __name__ == "__main__":
    main()
