"""The licence of a model from a package: its name, its texts, and a web page of terms as text that can be read.

`pypi_source.py` shows the texts before a model is used the first time and keeps them beside it.
"""

from __future__ import annotations

import re

from .wheel import Wheel

__all__ = ["licence_name", "licence_texts", "readable"]

FILE_NAME = re.compile(r"licen[cs]e|copying|notice|terms", re.IGNORECASE)
NO_TEXT = (".py", ".pyc", ".gguf", ".safetensors", ".json")


def licence_name(metadata: dict[str, list[str]]) -> str:
    """The licence that the headers of METADATA name, or "not stated"."""
    for key in ("license-expression", "license"):
        for value in metadata.get(key, []):
            line = value.strip().splitlines()[0][:80] if value.strip() else ""
            if line and line.upper() != "UNKNOWN":
                return line
    return "not stated"


def licence_texts(wheel: Wheel) -> dict[str, str]:
    """File name -> text of every licence, notice or terms file in the wheel; the first of each name."""
    texts: dict[str, str] = {}
    for member in wheel.members:
        name = member.rsplit("/", 1)[-1]
        chosen = ".dist-info/licenses/" in member or FILE_NAME.search(name)
        if (
            chosen
            and name not in texts
            and re.fullmatch(r"[\w.+-]+", name)
            and not name.lower().endswith(NO_TEXT)
            and ".part" not in name
        ):
            texts[name] = wheel.text(member)
    return texts


def readable(name: str, text: str) -> str:
    """`text` for a terminal: of a web page only the words of its article."""
    if not name.lower().endswith((".html", ".htm")):
        return text
    from .page_text import PageText  # its parser takes 3 ms to import, and hardly any licence is a page

    article = re.search(r"<article\b.*?</article>", text, re.DOTALL | re.IGNORECASE)
    reader = PageText()
    reader.feed(article[0] if article else text)
    return re.sub(r"\s*\n\s*", "\n", "".join(reader.out)).strip() + "\n"
