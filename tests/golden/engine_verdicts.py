"""Record what engines' own code makes of configs, for tests/behaviour/test_engine_verdicts.py.

The configs are the cases of `dflash_testing.config_cases`.

Each engine loads each draft with its own, unchanged code on a CPU: the config, the modules, the weights. Third-party
modules without a CPU wheel are empty stand-ins. Run the script once for each engine. It replaces the engine's entry in
tests/golden/engine_verdicts.json. `--new` loads only cases that the entry lacks. PYTHONHASHSEED=0 fixes the order of
names in errors.

    python -m venv env
    env/bin/pip install torch==2.13.0 transformers==5.19.0 numpy safetensors regex pydantic msgspec cloudpickle cbor2 \
        psutil prometheus_client pyzmq einops pillow jinja2 pyyaml requests aiohttp openai partial-json-parser blake3 \
        cachetools setproctitle tiktoken sentencepiece protobuf fastapi pybase64 python-json-logger depyf diskcache \
        lark openai_harmony uvloop py-cpuinfo triton orjson tqdm pytest
    env/bin/pip install --no-deps dflash==0.1.0
    pip download --no-deps vllm==0.33.0     # and sglang==0.5.23
    unpack them into engines/vllm-0.33.0 and engines/sglang
    export PYTHONPATH=.:runtime:kernels:tests/helpers
    env/bin/python tests/golden/engine_verdicts.py vllm engines/vllm-0.33.0 tests/golden/engine_verdicts.json
    env/bin/python tests/golden/engine_verdicts.py sglang engines/sglang tests/golden/engine_verdicts.json
    env/bin/python tests/golden/engine_verdicts.py zlab - tests/golden/engine_verdicts.json
"""

import engine_loaders
from verdict_recorder import Recorder

from dflash_testing import config_cases

RECORDER = Recorder(
    description=__doc__,
    engines={
        "vllm": ("vllm", engine_loaders.start_vllm, "vllm"),
        "sglang": ("sglang", engine_loaders.start_sglang, "sglang 0.5.23"),
        "llama.cpp": ("gguf", engine_loaders.start_llama, "llama.cpp"),
        "zlab": ("dflash", engine_loaders.start_zlab, "z-lab 0.1.0"),
    },
    cases=config_cases.all_cases(),
    is_read=lambda case, engine: engine != "llama.cpp" or case.is_read_by_llama,
    stem_of=lambda case: "draft",
    plain_of=lambda found: found["full: as it is"],
    base_of=lambda plain, name: plain,
)

if __name__ == "__main__":
    RECORDER.main()
