"""The device side of the runtime: models, KV pages, request state, CUDA graphs and results of a step."""
