"""Results files, tables, and peers that work, fail or die."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import environments, limits, peers, plots, results, tables
from fastllm.bench import Row, Spread

ROOT = Path(__file__).resolve().parents[2]


def record(cell="decode", reason="", **changes):
    row = Row(cell, {"context": 0}, "tok/s", None if reason else Spread.of([1, 2, 3]), reason=reason)
    return results.record("engine", "m", "fastllm", {"threads": 2}, row) | changes


def test_a_file_grows_and_a_new_measurement_replaces_the_old_one(tmp_path):
    path = tmp_path / "r.json"
    document = results.load(path)
    results.merge(document, [record(), record("prefill"), record(commit="new")])
    results.save(document, path)
    again = results.load(path)
    assert [(r["cell"], r["commit"] == "new") for r in again["rows"]] == [("decode", True), ("prefill", False)]
    assert again["machine"]["threads"] >= 1


def test_a_decode_of_more_steps_is_the_same_cell_and_a_longer_prompt_is_not(tmp_path):
    document = results.load(tmp_path / "r.json")
    results.merge(document, [record(params={"context": 0, "tokens": n}) for n in (16, 28)])
    results.merge(document, [record(cell, params={"tokens": n}) for cell in ("prefill", "attention of a prompt") for n in (32, 512)])
    assert [r["params"].get("tokens") for r in document["rows"]] == [28, 32, 512, 32, 512]


def test_measurements_with_other_options_stand_beside_each_other(tmp_path):
    document = results.load(tmp_path / "r.json")
    results.merge(document, [record(), record(options={"threads": 1})])
    assert len(document["rows"]) == 2


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"suite": None}, "suite"),
        ({"limit": "x"}, "limit"),
        ({"value": [1, 2]}, "value"),
        ({"value": None}, "neither or both"),
        ({"reason": "why"}, "neither or both"),
    ],
)
def test_a_row_that_is_none_is_found(change, wrong):
    assert any(wrong in text for text in results.check({"schema": 1, "machine": {}, "rows": [record() | change]}))
    assert results.check({"schema": 1, "machine": {}, "rows": [record(), record(reason="why")]}) == []


def test_a_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema is not 1"):
        results.load(path)


def test_tables_show_medians_quartiles_ratios_and_reasons():
    ours = Spread.of([4.0, 6.0, 8.0])
    row = Row("decode", {"context": 0, "tokens": 24}, "tok/s", Spread.of([2.0, 3.0, 4.0]), ratio=Spread.of([2.0, 2.0, 2.0]))
    text = results.table([results.record("peers", "m", "other", {"threads": 2}, row, ours), record(reason="it | fell")])
    assert "| m | other | decode, context 0 | 3 (2.5 – 3.5) tok/s | fastllm 6 (5 – 7) | 2.00 × |" in text
    assert "| – | it / fell | – |" in text


WORKER = """
import sys, json
for line in sys.stdin:
    message = json.loads(line)
    answer = BODY
    print(json.dumps(answer), flush=True)
"""
WORKS = {
    "load": '{"result": {"version": "7"}}',
    "prefill": '{"result": 2.0}',
    "decode": '{"result": 0.5}',
    "batch": '{"error": "no batches"}',
}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """worker(name, {method: answer}) makes a peer; ours takes 1 s for a prompt and 0.1 s a token."""

    def make(name, answers):
        path = tmp_path / f"{name}.py"
        body = "{" + ", ".join(f"{k!r}: lambda: {v}" for k, v in answers.items()) + "}[message['do']]()"
        path.write_text(WORKER.replace("BODY", body))
        return peers.Peer("", str(path))

    ours = make("ours", {"load": WORKS["load"], "prefill": '{"result": 1.0}', "decode": '{"result": 0.1}', "batch": '{"result": 9.0}'})
    monkeypatch.setattr(peers, "OURS", ours)
    monkeypatch.setattr(peers, "model_path", lambda name: f"/models/{name}")
    return make


def rows_of(names, cells):
    return [(name, row, ours) for name, _, row, ours in peers.peer_rows("llama1b-q4_0", names, cells, 1, 2, {})]


def test_ratios_are_ours_over_theirs(worker, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"other": worker("other", WORKS)})
    (_, prefill, ours), (_, decode, _), (_, batch, none) = rows_of(["other"], ["prefill:512", "decode:0", "batch:8"])
    assert (prefill.value.median, ours.median, prefill.ratio.median) == (256, 512, 2)
    assert (decode.value.median, decode.ratio.median) == (2, 5)
    assert (batch.value, batch.reason, none) == (None, "no batches", None)


def test_a_backend_of_ours_is_measured_in_turns_with_cpu_avx_and_shown_as_its_share(worker, monkeypatch):
    remembers = {
        "load": "(sys.modules.__setitem__('chosen', message['options']['backend']), {'result': {'version': '7', 'threads': 2}})[1]",
        "decode": "{'result': {'cpu_avx': 0.1, 'opencl_generic': 0.4}[sys.modules['chosen']]}",
    }
    monkeypatch.setattr(peers, "OURS", worker("remembers", remembers))
    [(name, found, row, cpu)] = peers.backend_rows("smollm2", ["opencl_generic"], ["decode:0"], 1, 2)
    assert (name, found, row.value.median, cpu.median, row.ratio.median) == ("opencl_generic", {"threads": 2, "ours.threads": 2, "version": "7"}, 2.5, 10, 0.25)
    stored = results.record("backends", "smollm2", name, found, row, cpu)
    monkeypatch.setattr(tables, "rows", lambda suite: [stored] if suite == "backends" else [])
    assert tables.backends().endswith("| smollm2 | opencl_generic | 2 / 2 | decode, context 0 | 2.5 | 10 | 25 % | 0.0 |")
    assert "| cpu_avx 10 | 0.25 × |" in results.table([stored])
    [(_, _, refused, none)] = peers.backend_rows("smollm2", ["nothing"], ["decode:0"], 1, 2)
    assert (refused.cell, bool(refused.reason), none) == ("decode", True, None)


BACKEND = "sys.modules.__setitem__('chosen', message['options']['backend'])"


def test_a_backend_that_computes_with_other_threads_than_asked_for_is_a_reason_and_no_number(worker, monkeypatch):
    """One that takes no number of threads: beside one thread of cpu_avx it would look fast."""
    count = "message['threads'] or 2 if sys.modules['chosen'] == 'cpu_avx' else 2"
    monkeypatch.setattr(peers, "OURS", worker("fixed", {"load": f"({BACKEND}, {{'result': {{'version': '7', 'threads': {count}}}}})[1]", "decode": "{'result': 0.1}"}))
    [(_, _, refused, none)] = peers.backend_rows("smollm2", ["opencl_generic"], ["decode:0"], 1, 1)
    assert (refused.cell, refused.value, none) == ("load", None, None)
    assert refused.reason == "it computes with 2 threads, not the 1 that were asked for; leave --threads out"
    [(_, found, row, _)] = peers.backend_rows("smollm2", ["opencl_generic"], ["decode:0"], 1, 0)
    assert (found["threads"], found["ours.threads"], row.value.median) == (2, 2, 10)


def test_a_backend_measured_with_one_thread_meets_no_target(monkeypatch):
    row = results.record("backends", "smollm2", "opencl_generic", {"threads": 1, "ours.threads": 1}, Row("decode", {"context": 0}, "tok/s", Spread.of([1.0])))
    wanted = ("backends", "smollm2", "decode", {"context": 0})
    assert tables._find([row], wanted, "opencl_generic") is None
    assert tables._find([{**row, "options": {"threads": 2, "ours.threads": 2}}], wanted, "opencl_generic") is not None


def test_cpu_avx_that_fails_ends_the_comparison_and_is_no_fault_of_the_other(worker, monkeypatch):
    dies = "sys.exit(3) if sys.modules['chosen'] == 'cpu_avx' else {'result': 0.1}"
    monkeypatch.setattr(peers, "OURS", worker("dies", {"load": f"({BACKEND}, {{'result': {{'version': '7', 'threads': 2}}}})[1]", "decode": dies}))
    with pytest.raises(peers.WorkerError, match="ended while it was asked to decode"):
        list(peers.backend_rows("smollm2", ["opencl_generic", "ref"], ["decode:0"], 1, 0))


def test_a_peer_that_fails_is_a_row_and_the_next_is_measured(worker, monkeypatch):
    refuses, dies = worker("refuses", {"load": '{"error": "bad file"}'}), worker("dies", {**WORKS, "decode": "sys.exit(3)"})
    monkeypatch.setattr(peers, "PEERS", {"refuses": refuses, "dies": dies, "works": worker("works", WORKS)})
    found = [(name, row.cell, row.reason) for name, row, _ in rows_of(list(peers.PEERS), ["decode:0"])]
    assert found[0] == ("refuses", "load", "bad file")
    assert found[1] == ("dies", "decode", "the engine's process ended while it was asked to decode (exit code 3)")
    assert found[2] == ("works", "decode", "")


def test_a_peer_that_cannot_be_installed_is_a_row(worker, monkeypatch, tmp_path):
    missing = str(tmp_path / "nothing-here.whl")
    monkeypatch.setitem(environments.RECIPES, "gone", lambda: environments.Recipe(((missing,),)))
    monkeypatch.setattr(peers, "PEERS", {"gone": peers.Peer("gone", "x.py")})
    [(_, row, _)] = rows_of(["gone"], ["decode:0"])
    assert row.reason.startswith("pip install")
    assert "nothing-here.whl" in row.reason


def test_an_environment_is_made_once(monkeypatch):
    calls = []
    folder = environments.cache_folder() / "envs" / "x"
    monkeypatch.setitem(environments.RECIPES, "x", lambda: environments.Recipe((("a",), ("b",)), note="n"))
    monkeypatch.setattr(environments, "_call", lambda command, variables, what: (calls.append(what), folder.mkdir(parents=True, exist_ok=True)))
    assert environments.environment("x").note == "n"
    environments.environment("x")
    assert calls == ["no environment for x", "pip install a", "pip install b"]


def test_limits_have_a_row_for_every_instruction_also_those_that_are_missing(monkeypatch):
    monkeypatch.setattr(limits, "SIZES_MB", (1,))
    rows = [row for _, row in limits.limit_rows(1, 1)]
    assert {r.params["instruction"] for r in rows if r.cell == "peak"} >= {"vnni", "amx_int8", "fma256"}
    assert all(bool(r.reason) != (r.value is not None) for r in rows)


def test_the_command_writes_what_it_prints(tmp_path, tiny):
    out = tmp_path / "results" / "r.json"
    arguments = ["engine", "--model", str(tiny), "--cells", "decode:0,sampling", "--repeat", "1", "--threads", "1", "--json", str(out)]
    done = CliRunner().invoke(command.cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(out.read_text())["rows"]
    assert len([line for line in done.output.splitlines() if line.startswith("fastllm ")]) == len(rows) == 4
    assert all(row["others"] >= 0 for row in rows)
    shown = CliRunner().invoke(command.cli, ["show", str(out)], catch_exceptions=False).output
    assert shown.count("| tiny | fastllm | sampling, ") == 3


def test_an_unknown_peer_is_a_usage_error():
    done = CliRunner().invoke(command.cli, ["peers", "--peer", "nobody"])
    assert (done.exit_code, "no peer 'nobody'" in done.output) == (2, True)


def test_workers_speak_the_protocol(tmp_path):
    script = tmp_path / "w.py"
    folder = str(environments.WORKERS)
    script.write_text(
        f"import sys\nsys.path.insert(0, {folder!r})\nfrom protocol import Worker, serve\n"
        "class W(Worker):\n    def load(self, x):\n        print('noise')\n        return x * 2\n"
        "    def decode(self):\n        raise KeyError('k')\nserve(W())\n"
    )
    process = peers.Process(sys.executable, script)
    try:
        assert process.call("load", x=4) == 8
        assert process.call("memory") > 1 << 20
        for do, message in (("decode", "KeyError: 'k'"), ("batch", "cannot measure that")):
            with pytest.raises(peers.WorkerError, match=message):
                process.call(do)
    finally:
        process.close()


SPINS = """
import os, subprocess, sys, threading, time
from pathlib import Path
from protocol import Worker, serve

class Spins(Worker):
    def load(self):
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
        self.child = subprocess.Popen([sys.executable, "-c", f"import os\\nwhile os.getppid() == {os.getpid()}: pass"])  # outlives nobody
        return [os.getpid(), self.child.pid]
    def states(self, pids):
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
    def stopped(self, pids):
        # a child of a stopped process stops when the system next looks at it
        end = time.monotonic() + 10
        while set(found := self.states(pids)) != {"T"} and time.monotonic() < end:
            time.sleep(0.001)
        return found
    def hang(self):
        threading.Event().wait()
    def done(self):
        self.child.kill()
        self.child.wait()

serve(Spins())
"""


@pytest.fixture
def spinning(tmp_path):
    """make() starts a worker with a thread and a child that spin, waits until they do and returns it with the two process ids."""
    script = tmp_path / "spins.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(environments.WORKERS)!r})\n{SPINS}")
    made = []

    def make():
        made.append(peers.Process(sys.executable, script))
        return made[-1], made[-1].call("load")

    yield make
    for process in made:
        process.close()


def wait_for_end(pid: int, trigger) -> bool:
    """Whether a process that is here now ends within ten seconds of `trigger()`."""
    handle = os.pidfd_open(pid)
    try:
        trigger()
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


def test_an_engine_is_stopped_with_its_children_while_another_is_asked(spinning):
    (one, of_one), (other, of_other) = spinning(), spinning()
    for asked, own, resting in ((other, of_other, of_one), (one, of_one, of_other), (other, of_other, of_one)):
        assert asked.call("stopped", pids=resting) == ["T", "T"]
        assert "T" not in asked.call("states", pids=own)
    for process in (one, other):
        process.call("done")


def test_a_stopped_engine_ends_when_it_is_closed(spinning):
    process, (pid, _) = spinning()
    process.call("done")
    assert wait_for_end(pid, process.close)


def test_an_engine_that_hangs_ends_with_its_children(spinning, monkeypatch):
    process, (_, child) = spinning()
    monkeypatch.setattr(process, "patience_s", 0.2)

    def hang():
        with pytest.raises(peers.WorkerError, match=r"did not hang within 0\.2 s"):
            process.call("hang")

    assert wait_for_end(child, hang)


def test_a_stopped_engine_ends_with_a_harness_that_is_killed(tmp_path, spinning):
    script = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks import peers
process = peers.Process(sys.executable, Path({str(tmp_path / "spins.py")!r}))
pid, _ = process.call("load")
process.call("done")
print(pid, flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as harness:
        pid = int(harness.stdout.readline())
        assert wait_for_end(pid, harness.kill)


def test_growth_curves_are_drawn_from_the_rows():
    def ours(cell, params, value, threads=2, model="llama1b-q4_0"):
        row = Row(cell, params, "tok/s", Spread.of([value]), 2 * value)
        return results.record("engine", model, "fastllm", {"threads": threads}, row)

    decodes = [ours("decode", {"context": c, "tokens": 16}, v) for c, v in ((0, 50.0), (2048, 40.0))]
    rows = [*decodes, ours("batch", {"streams": 8, "tokens": 24}, 200.0), ours("decode", {"context": 0, "tokens": 16}, 30.0, threads=1)]
    drawn = plots.figures(rows)
    assert set(drawn) == {"context", "streams", "threads"}  # one size is no curve
    assert [(line["name"], line["x"], line["y"]) for line in drawn["context"]["lines"]] == [
        ("fastllm", [0, 2048], [20, 25]),
        ("read bandwidth", [0, 2048], [10, 12.5]),
    ]
    assert (drawn["streams"]["lines"][0]["x"], drawn["streams"]["lines"][0]["y"]) == ([1, 8], [50, 200])
    assert drawn["threads"]["lines"][0]["y"] == pytest.approx([1, 50 / 30])
    assert plots.figures([]) == {}


def test_the_document_is_made_of_the_committed_results():
    rows = [row for path in sorted(tables.RESULTS.glob("*.json")) for row in results.load(path)["rows"]]
    for suite in ("limits", "engine", "peers"):
        assert all(row["model"] in tables.PARTS[f"performance.{suite}"]() for row in rows if row["suite"] == suite)


def test_containers_have_a_table_and_targets_of_their_rows(monkeypatch):
    monkeypatch.setattr(tables, "rows", lambda suite: [])
    assert "python -m benchmarks containers" in tables.containers()
    measured = Row("decode", {"container": "1.5 cores by cpu.max", "context": 0}, "tok/s", Spread.of([30.0] * 3), 31.0, "1 thread by hand", Spread.of([0.97] * 3))
    row = results.record("containers", tables.ONE, "fastllm", {"threads": 1}, measured)
    refused = results.record("containers", tables.ONE, "fastllm", {}, Row("load", {"container": "1.5 cores by a v1 quota"}, reason="OSError: no | group"))
    monkeypatch.setattr(tables, "rows", lambda suite: [row, refused] if suite == "containers" else [])
    table = tables.containers()
    assert f"| {tables.ONE} | 1.5 cores by cpu.max | decode, context 0 | 1 | 30 (30 – 30) tok/s | 31 (1 thread by hand) | 97 % (97 % – 97 %) |" in table
    assert "OSError: no / group" in table
    found = [t for t in tables.TARGETS if tables._find([row], t.row, t.engine) is row]
    assert [t.what for t in found] == [f"decode of {tables.ONE} in a container with 1.5 cores by cpu.max, of the best hand-set threads"]
