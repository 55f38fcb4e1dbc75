"""Hub repositories: which files are needed, one commit for all of them, errors that say what to do – without a network."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from fastllm.core.errors import DownloadError, ModelNotFound, UnsupportedError, UsageError
from fastllm.formats import list_cached, open_model, resolve
from fastllm.formats.hub_fetch import _at_once
from fastllm.formats.hub_source import FetchOptions, Repo, needed_files, parse_repo

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = Repo("org/name")


def http_error(kind, text="x"):
    """An error of the hub's library without the response it wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


class Hub:
    """The hub as the library shows it: files of one repository, and what was asked."""

    def __init__(self, files: dict[str, bytes]):
        self.files, self.asked, self.sizes, self.error = files, [], {}, None
        self.tokens, self.sha = set(), COMMIT

    def __call__(self, token=None):
        self.tokens.add(token)
        return self

    def model_info(self, repo_id, revision=None, files_metadata=False):
        if self.error:
            raise self.error
        self.asked.append(("info", revision))
        rows = [SimpleNamespace(rfilename=n, size=self.sizes.get(n, len(raw))) for n, raw in self.files.items()]
        return SimpleNamespace(siblings=rows, sha=self.sha)

    def download(self, repo_id, name, revision=None, cache_dir=None, local_dir=None, token=None):
        assert revision == COMMIT  # every file of the one commit
        self.asked.append(name)
        self.tokens.add(token)
        if local_dir is not None:
            path = Path(local_dir) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.files[name])
            return str(path)
        root = Path(cache_dir) / f"models--{repo_id.replace('/', '--')}"
        blob, link = root / "blobs" / name.replace("/", "_"), root / "snapshots" / revision / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(self.files[name])
        link.symlink_to(blob)
        return str(link)


@pytest.fixture
def hub(data, tmp_path, monkeypatch):
    """A repository with a safetensors model, more files than needed, and an empty hub cache."""
    made = Hub(
        {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": (data / "tiny.safetensors").read_bytes(),
            "tokenizer.json": b"{}",
            "tokenizer_config.json": b"{}",
            "LICENSE": b"Be good.",
            "pytorch_model.bin": b"\x80\x04.",
            "modeling_evil.py": b"raise SystemExit",
            "onnx/model.onnx": b"x",
        }
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", made)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    for name in ("HF_HUB_OFFLINE", "FASTLLM_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "home"))
    return made


@pytest.fixture
def gguf(data):
    return (data / "tiny.gguf").read_bytes()


def test_only_needed_files_are_fetched_and_found_again_without_the_hub(hub):
    seen, licences = [], []
    path = resolve("org/name", progress=lambda *a: seen.append(a), licence=lambda title, text: licences.append((title, text)))
    assert sorted(n for n in hub.asked if isinstance(n, str)) == ["LICENSE", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert licences == [("org/name: LICENSE", "Be good.")]
    total = sum(len(hub.files[n]) for n in hub.asked if isinstance(n, str))
    assert seen[-1][:2] == (total, total)
    open_model(path).close()

    hub.error = RuntimeError("the hub was asked")
    for name in ("org/name", "hf:org/name", f"hf:org/name@{COMMIT}"):
        assert resolve(name) == path
        assert resolve(name, offline=True) == path
    assert resolve("org/name", revision="main") == path
    assert [m.name for m in list_cached()] == ["hf:org/name"]
    with pytest.raises(DownloadError, match="could not be downloaded"):
        resolve("org/name", refresh=True)
    with pytest.raises(DownloadError):
        resolve("org/name@v2")


def test_cache_dir_holds_the_hub_cache_too(hub, tmp_path):
    path = resolve("org/name", cache_dir=tmp_path / "given")
    assert path.is_relative_to(tmp_path / "given" / "hub")
    assert resolve("org/name", cache_dir=tmp_path / "given", offline=True) == path
    with pytest.raises(DownloadError):
        resolve("org/name", offline=True)


def test_shards_come_with_their_index(hub):
    hub.files.pop("model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    for name in index["weight_map"].values():
        hub.files[name] = b"x"
    path = resolve("org/name")
    assert {p.name for p in path.iterdir()} >= set(index["weight_map"].values())
    assert resolve("org/name", offline=True) == path
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DownloadError, match="not complete in the cache"):
        resolve("org/name", offline=True)


def test_a_gguf_repository_needs_the_file_unless_there_is_one(hub, gguf):
    hub.files = {"a-q4.gguf": gguf, "a-q8.gguf": gguf, "README.md": b""}
    with pytest.raises(UsageError, match="2 GGUF files; say which") as caught:
        resolve("hf:org/name")
    assert "a-q4.gguf, a-q8.gguf" in caught.value.why
    path = resolve("hf:org/name:a-q8.gguf")
    assert path.read_bytes() == gguf
    assert resolve("org/name:a-q8.gguf", offline=True) == path
    with pytest.raises(ModelNotFound, match=r"no file 'a-q9.gguf'") as missing:
        resolve("hf:org/name:a-q9.gguf")
    assert "a-q8.gguf" in missing.value.why

    said: list[str] = []
    assert resolve("hf:org/name", notice=said.append) == path  # the one in the cache, but not without a word
    assert "using the one GGUF file in the cache, a-q8.gguf" in said[0]


def test_a_split_gguf_comes_whole(hub, data):
    hub.files = {f"sub/{p.name}": p.read_bytes() for p in data.glob("split-*.gguf")}
    path = resolve("org/name")
    assert path.name == "split-00001-of-00003.gguf"
    open_model(path).close()
    (path.parent / "split-00003-of-00003.gguf").unlink()
    hub.error = RuntimeError("asked")
    with pytest.raises(DownloadError):
        resolve("org/name:sub/split-00001-of-00003.gguf")


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        (["pytorch_model.bin", "config.json"], UnsupportedError, "only pickled weights"),
        (["README.md"], ModelNotFound, "holds no model"),
        (["m-00001-of-00003.gguf", "m-00002-of-00003.gguf"], DownloadError, "lacks 1 of 3 files of the set: m-00003"),
    ],
)
def test_repositories_that_cannot_be_used(files, error, text):
    with pytest.raises(error, match=text):
        needed_files(REPO, files)


def test_other_files_of_a_repository_cannot_be_named():
    with pytest.raises(UsageError, match="no GGUF file"):
        needed_files(Repo("a/b", file="x.bin"), ["x.bin"])


def test_a_file_of_the_wrong_length_is_removed(hub):
    hub.sizes["model.safetensors"] = 10_000
    with pytest.raises(DownloadError, match=r"model.safetensors has \d+ bytes, the hub says 10000"):
        resolve("org/name")
    assert list_cached() == []


def test_too_little_space_is_seen_first(hub, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(DownloadError, match="no space for hf:org/name"):
        resolve("org/name")
    assert hub.asked == [("info", "main")]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (http_error(errors.RepositoryNotFoundError), ModelNotFound, "the hub has no model 'org/name'"),
        (http_error(errors.GatedRepoError), DownloadError, "gated"),
        (http_error(errors.RevisionNotFoundError), ModelNotFound, "no revision 'main'"),
        (ConnectionError("Name or service not known"), DownloadError, "could not be downloaded from hub.example"),
        (TimeoutError("slow\x1b[2J"), DownloadError, "could not be downloaded"),
        (OSError(28, "No space left on device"), DownloadError, "no space for hf:org/name"),
        (PermissionError(13, "Permission denied"), DownloadError, "cannot be written"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(hub, monkeypatch, error, kind, text):
    monkeypatch.setenv("HF_ENDPOINT", "https://user:secret@hub.example")
    hub.error = error
    with pytest.raises(kind, match=text) as caught:
        resolve("org/name")
    assert caught.value.fix
    assert "secret" not in caught.value.render()
    assert "\x1b" not in caught.value.render()


def test_ctrl_c_passes_through(hub):
    hub.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")


def test_the_hubs_own_offline_switch_is_obeyed(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="downloads are off"):
        resolve("org/name")
    assert hub.asked == []


def test_names_are_taken_apart():
    assert parse_repo("a/b") == Repo("a/b", "main", "")
    assert parse_repo("a/b@v1:sub/c d.gguf") == Repo("a/b", "v1", "sub/c d.gguf")
    assert parse_repo("a/b", "dev").label == "hf:a/b@dev"


# what is fetched, and where to -----------------------------------------------------------------------------------------------


def test_patterns_choose_files_and_a_folder_takes_them(hub, tmp_path):
    hub.files |= {"a-Q4.gguf": b"GGUF", "a-Q8.gguf": b"GGUF"}
    how = FetchOptions(include=("*.gguf", "config.json"), exclude=("*Q8*",), local_dir=tmp_path / "here", token="hf_x", jobs=3)
    path = resolve("org/name", how=how)
    assert path == tmp_path / "here"
    assert sorted(p.name for p in path.iterdir()) == ["a-Q4.gguf", "config.json"]
    assert hub.tokens == {"hf_x"}
    assert not (tmp_path / "hf" / "hub" / "models--org--name").exists()
    one = resolve("org/name", how=FetchOptions(include=("*Q8*",), local_dir=tmp_path / "one"))
    assert one == tmp_path / "one" / "a-Q8.gguf"
    with pytest.raises(UsageError, match=r"no file of org/name matches \*\.bin2"):
        resolve("org/name", how=FetchOptions(include=("*.bin2",)))


def test_exclusion_may_decide_which_gguf_is_the_model(hub, gguf):
    hub.files = {"a-Q4.gguf": gguf, "a-Q8.gguf": gguf}
    with pytest.raises(UsageError, match="2 GGUF files"):
        resolve("org/name")
    assert resolve("org/name", how=FetchOptions(exclude=("*Q8*",))).name == "a-Q4.gguf"


@pytest.mark.parametrize("jobs", [1, 4])
def test_the_first_error_ends_a_download_of_several_files(hub, jobs):
    hub.sizes["model.safetensors"] = 5
    with pytest.raises(DownloadError, match=r"model.safetensors has \d+ bytes, the hub says 5"):
        resolve("org/name", how=FetchOptions(jobs=jobs))
    assert list_cached() == []


def test_no_file_is_begun_after_the_first_error():
    gate, fetched = threading.Event(), []

    def fetch(name):
        if name == "bad":
            raise DownloadError("it is gone")
        gate.wait()
        fetched.append(name)
        return 1

    before = set(threading.enumerate())
    with pytest.raises(DownloadError, match="it is gone"):
        list(_at_once(fetch, ["bad", *"abcdefgh"], 2))
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert len(fetched) <= 1  # what was on its way


@pytest.mark.parametrize("name", ["../x.gguf", "sub/../../x.gguf", "/tmp/x.gguf", "..\\x.gguf", "x\0.gguf"])
def test_a_hub_that_names_a_path_is_refused(hub, tmp_path, name):
    hub.files[name] = b"x"
    with pytest.raises(DownloadError, match="which is no file or commit") as caught:
        resolve("org/name", how=FetchOptions(include=("*",), local_dir=tmp_path / "here"))
    assert "HF_ENDPOINT" in caught.value.fix
    assert hub.asked == [("info", "main")]


def test_a_commit_that_is_a_path_is_refused(hub):
    hub.sha = "../../../x"
    with pytest.raises(DownloadError, match="which is no file or commit"):
        resolve("org/name")


@pytest.mark.parametrize("token", ["hf_abc\r", " hf_abc\n"])
def test_blanks_around_a_token_are_left_out(hub, token):
    resolve("org/name", how=FetchOptions(token=token))
    assert hub.tokens == {"hf_abc"}


@pytest.mark.parametrize("token", ["hf_secret\x01x", "hf_secret x", "hf_secret\u00e4"])
def test_a_token_that_is_none_is_not_shown(hub, token):
    with pytest.raises(UsageError, match="the token of the hub") as caught:
        resolve("org/name", how=FetchOptions(token=token))
    assert "secret" not in caught.value.render()
    assert hub.asked == []


@pytest.mark.parametrize(("token", "text"), [("hf_secret", "the proxy does not like hf_secret"), (None, "Illegal header value b'Bearer hf_secret\\x01 secret'")])
def test_no_error_shows_a_token(hub, token, text):
    hub.error = ValueError(text)
    with pytest.raises(DownloadError, match="could not be downloaded") as caught:
        resolve("org/name", how=FetchOptions(token=token))
    assert "secret" not in caught.value.render()


def test_models_that_are_no_repository_have_no_files_to_choose(hub, tmp_path):
    for model in ("smollm2", "pypi:x", str(tmp_path)):
        with pytest.raises(UsageError, match="no files to choose from"):
            resolve(model, how=FetchOptions(include=("*",)))
