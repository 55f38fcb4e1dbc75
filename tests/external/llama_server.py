"""The command line of llama-server, as far as its suite uses it, on top of `fastllm server`; `native` adds its native routes.

Flags that ask for what we do not have (slots on disk, drafts, adapters, pictures, several models) are taken and have no effect: the
cases that need them fail, and are excluded with that reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "command-r": (
        "{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' + {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m['role']]"
        " + m['content'] + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
    ),
}
"""What llama.cpp has in its own code."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags that mean something here."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--alias", default="")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--n-predict", type=int, default=-1)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--chat-template", default="")
    parser.add_argument("--chat-template-file", default="")
    parser.add_argument("--pooling", default="")
    parser.add_argument("--reasoning", default="auto")
    for flag in ("--embedding", "--reranking", "--metrics", "--slots", "--kv-unified", "--verbose", "--no-ui"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(arguments)[0]


def with_template(model: Path, template: str) -> Path:
    """The model's folder with another template, in a folder that the process leaves to the system's cleaning."""
    import json

    folder = Path(tempfile.mkdtemp(prefix="llama-suite-"))
    for path in model.iterdir():
        if path.name != "tokenizer_config.json":
            os.link(path, folder / path.name)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder


def main(arguments: list[str]) -> int:
    """Serves until a signal."""
    from native import Native, Setup

    from fastllm.cli.main import run_command
    from fastllm.server import serve

    asked = parse(arguments)
    model = Path(os.environ["FASTLLM_EXTERNAL_MODEL"])
    if asked.chat_template_file:
        model = with_template(model, Path(asked.chat_template_file).read_text())
    elif asked.chat_template:
        model = with_template(model, TEMPLATES.get(asked.chat_template, asked.chat_template))
    slots = max(1, asked.parallel)
    n_ctx = asked.ctx_size if asked.kv_unified else max(8, asked.ctx_size // slots)
    setup = Setup(slots, n_ctx, asked.n_predict, asked.seed, asked.slots, asked.verbose, asked.reasoning)
    make_app = serve.make_app
    serve.make_app = lambda runtime: Native(make_app(runtime), runtime, setup)
    command = ["server", str(model), "--port", str(asked.port), "-t", "1", "--offline", "--temperature", str(asked.temp)]
    for host in asked.host.split(","):
        command += ["--host", host.strip()]
    for name in filter(None, asked.alias.split(",")):
        command += ["--model-name", name]
    command += ["--ctx", str(n_ctx), "--max-batch-size", str(slots), "--prefill-chunk", str(asked.batch_size), "--block-size", "16"]
    command += ["--kv-cache-size", f"{asked.ctx_size}tok"] if asked.kv_unified else []
    command += ["--api-key", asked.api_key] if asked.api_key else []
    command += ["--embedding", asked.pooling if asked.pooling in ("last", "mean", "cls") else "mean"] if asked.embedding or asked.reranking else []
    command += [] if asked.metrics else ["--no-metrics"]
    command += ["--no-web"] if asked.no_ui else []
    return run_command(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
