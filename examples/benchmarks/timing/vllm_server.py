"""Run vLLM's own server in a new process: `python vllm_server.py --model DIR ...`, with the options of `vllm serve`.

It imports nothing of this project, so its environment may differ.
"""

import sys


def main() -> None:
    sys.path.pop(0)  # this folder is first on the path, and vLLM must not import its modules
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
