"""ONNX Runtime GenAI, on a model that its own builder makes of a Hugging Face folder (int4, in blocks of 32, for the CPU), once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime_genai as og
from generating import Generating
from protocol import serve


class OnnxRuntime(Generating):
    """One model."""

    def load(self, path: str, threads: int, context: int, streams: int, options: dict[str, Any]) -> dict[str, str]:
        """Builds the model beside the folder if it is not there."""
        built = Path(f"{path}-onnx-int4")
        if not (built / "genai_config.json").exists():
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", path, "-o", os.fspath(built), "-p", "int4", "-e", "cpu"]
            done = subprocess.run([*command, "-c", os.fspath(built / "cache")], capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                raise RuntimeError(f"the model builder failed: {lines[-1]}")
        config = og.Config(os.fspath(built))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = og.Model(config)
        self.vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        self.longest = context
        return {"version": og.__version__}

    def generate(self, ids: list[int], new: int) -> Iterator[Any]:
        """Greedy; the end token does not end it."""
        params = og.GeneratorParams(self.model)
        params.set_search_options(max_length=self.longest, min_length=len(ids) + new, do_sample=False)
        generator = og.Generator(self.model, params)
        generator.append_tokens([ids])
        for _ in range(new):
            generator.generate_next_token()
            yield None


if __name__ == "__main__":
    serve(OnnxRuntime())
