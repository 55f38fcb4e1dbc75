"""Where the memory of a small process goes: what becomes resident with each stage of a load, and whose the pages are at the end. Linux only."""

from __future__ import annotations

from fastllm.bench import Row, Spread

__all__ = ["STAGES", "resident_rows"]

STAGES = """
import json, re, sys
values = json.loads(sys.argv[1])

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

found, last = {}, 0
def stage(what):
    global last
    now = resident()
    found[what], last = found.get(what, 0) + now - last, now

stage("Python")
import numpy
stage("numpy")
from fastllm import loading, llm
from fastllm.core import embedding, engine, executor
from fastllm import text
stage("the engine's modules")
def told(module, name, after, before=""):
    inner = getattr(module, name)
    def outer(*args, **kwargs):
        if before:
            stage(before)
        result = inner(*args, **kwargs)
        stage(after)
        return result
    setattr(module, name, outer)
told(loading, "plan_model", "file, graph, backend and plan")
told(executor, "Executor", "weights", before="tokenizer and template")  # what they took for a moment is given back by then
model = llm.LLM.of(loading.load_model(values.pop("model"), loading.LoadOptions(**values)))
stage("engine")
model.generate("Once upon a time", llm.SamplingParams(max_tokens=8, ignore_eos=True))
stage("the first answer: cache, scratch, logits")
kind = ""
shares = {"pages of files: libraries, the model": 0, "large blocks: weights, cache, scratch, tables": 0, "small blocks: objects": 0}
for line in open("/proc/self/smaps"):
    if m := re.match(r"([0-9a-f]+)-([0-9a-f]+) \\S+ \\S+ \\S+ (\\d+) +(\\S*)", line):
        size = int(m[2], 16) - int(m[1], 16)
        kind = list(shares)[0 if m[3] != "0" else 1 if size >= 4 << 20 and not m[4] else 2]
    elif line.startswith("Rss:"):
        shares[kind] += int(line.split()[1]) * 1024
model.close()
print(json.dumps([list(found.items()), list(shares.items())]))
"""
"""What a child runs: by stage, and by whose the pages are."""


def resident_rows(stages: list[tuple[str, int]], shares: list[tuple[str, int]]) -> list[Row]:
    """Rows of what the child said."""
    total = sum(size for _, size in stages)
    rows = [Row("resident memory", {"with": what}, "MB", Spread.of([size / 1e6])) for what, size in stages]
    return rows + [Row("resident memory", {"of": what}, "MB", Spread.of([size / 1e6]), total / 1e6, "all", Spread.of([size / total])) for what, size in shares]
