"""Run vLLM's own server in a new process: `python vllm_server.py --model DIR ...`, with the options of `vllm serve`.

Reduced copies of vLLM may lack the routes for metrics, health and version. This script then adds routes that read the
same registry. It imports nothing of this project, so its environment may differ.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "vllm.entrypoints.serve.instrumentator"


def add_routes(app: Any) -> None:
    """Add the routes that a probe needs and that the missing package would add."""
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
    """Register a replacement of the package with the names that the server imports."""

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
    # This folder is first on the path, and vLLM must not import its modules.
    sys.path.pop(0)
    if find_spec(PACKAGE) is None:
        stand_in()
    # The same calls as vLLM's own module. Its processes start from this file and do not need the replacement.
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
