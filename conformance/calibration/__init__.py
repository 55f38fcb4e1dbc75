"""Margins of honest kernels, one JSON file per backend, made by `fastllm conformance calibrate --out`."""
