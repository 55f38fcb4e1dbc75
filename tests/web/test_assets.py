"""The page's files without a browser: what is served and how, and that they are built from the sources."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest

from fastllm.server.page import FILES, Page

ROOT = Path(__file__).parents[2]
WEB = ROOT / "interface" / "web"
WAIT_S = 60


def test_files_are_served_with_their_types_and_a_policy_without_exceptions():
    page = Page()
    for path, (name, media, _) in FILES.items():
        status, headers, body = page.answer(path, {})
        assert (status, headers["content-type"]) == (200, media)
        assert path == "/" or body == (WEB / "static" / name).read_bytes()
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["referrer-policy"] == "no-referrer"


def test_the_page_holds_no_script_or_style_of_its_own():
    text = Page().answer("/", {})[2].decode()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", text)


def test_a_file_that_is_known_is_not_sent_again():
    page = Page()
    _, headers, _ = page.answer("/assets/app.js", {})
    status, again, body = page.answer("/assets/app.js", {"if-none-match": f'"other", W/{headers["etag"]}'})
    assert (status, body, again["etag"]) == (304, b"", headers["etag"])
    assert page.answer("/assets/app.js", {"if-none-match": '"other"'})[0] == 200


def test_an_address_that_names_the_content_is_kept_for_ever_and_another_is_not():
    page = Page()
    text = page.answer("/", {})[2].decode()
    version = re.search(r'src="assets/app\.js\?v=(\w+)"', text)[1]
    assert "immutable" in page.answer("/assets/app.js", {}, version)[1]["cache-control"]
    assert page.answer("/assets/app.js", {}, "older")[1]["cache-control"] == "no-cache"
    assert page.answer("/", {})[1]["cache-control"] == "no-cache"


@pytest.mark.parametrize(("accepted", "packs"), [("gzip, br", True), ("GZIP;q=0.5", True), ("br", False), ("gzip;q=0", False), ("", False)])
def test_files_are_compressed_for_those_who_can_read_it(accepted, packs):
    _, headers, body = Page().answer("/assets/app.js", {"accept-encoding": accepted})
    assert headers.get("content-encoding") == ("gzip" if packs else None)
    assert (gzip.decompress(body) if packs else body) == (WEB / "static" / "app.js").read_bytes()


def test_addresses_have_the_prefix_of_a_proxy():
    text = Page('/a"b').answer("/", {})[2].decode()
    assert 'src="/a&quot;b/assets/app.js?v=' in text
    assert 'href="/a&quot;b/assets/app.css?v=' in text


def test_the_bundle_is_what_the_sources_make(tmp_path):
    if not (ROOT / "build" / "web" / ".installed").exists():
        pytest.skip("the page's libraries are not installed: make web (it needs npm)")
    subprocess.run(["node", WEB / "build.mjs", tmp_path], check=True, timeout=WAIT_S)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in (WEB / "static").iterdir()}, "run make web, and commit interface/web/static"


def test_libraries_are_pinned_by_hash_named_in_the_notice_and_name_no_host():
    lock = (WEB / "package-lock.json").read_text()
    assert "http" not in re.sub(r'"funding": \{[^}]*\}|"url": "[^"]*"', "", lock)
    packages = json.loads(lock)["packages"]
    assert all("integrity" in entry for name, entry in packages.items() if name)
    notice = (ROOT / "NOTICE").read_text()
    for name, version in json.loads((WEB / "package.json").read_text())["dependencies"].items():
        assert version == packages[f"node_modules/{name}"]["version"]
        assert f"\n  {name} " in notice


def test_both_languages_have_the_same_texts():
    keys = [re.findall(r"^  (\w+): \"", (WEB / "src" / f"{name}.js").read_text(), re.M) for name in ("en", "zh")]
    assert keys[0] == keys[1]
    assert len(keys[0]) > 100
    used = set(re.findall(r"\bt\(\"(\w+)\"", "".join(path.read_text() for path in (WEB / "src").glob("*.js"))))
    assert used <= set(keys[0])
    places = [dict(re.findall(r"^  (\w+): \"(.*)\"", (WEB / "src" / f"{name}.js").read_text(), re.M)) for name in ("en", "zh")]
    for key in keys[0]:
        assert sorted(re.findall(r"\{\w+\}", places[0][key])) == sorted(re.findall(r"\{\w+\}", places[1][key])), key

