"""The words of a web page, without its menus and scripts: for licences that come as a page. Used by `licences.readable`."""

from __future__ import annotations

import html.parser
import re

__all__ = ["PageText"]


class PageText(html.parser.HTMLParser):
    """The words of a page's article, without its menus and scripts."""

    SKIPPED = frozenset({"script", "style", "nav", "header", "footer", "template", "svg", "devsite-footer-linkboxes"})
    BLOCKS = frozenset({"p", "div", "li", "h1", "h2", "h3", "h4", "br", "tr", "section", "article"})

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Counts skipped elements, breaks lines at blocks."""
        self.skipped += tag in self.SKIPPED
        if tag in self.BLOCKS:
            self.out.append("\n")

    def handle_endtag(self, tag: str) -> None:
        """Leaves a skipped element."""
        if tag in self.SKIPPED and self.skipped:
            self.skipped -= 1

    def handle_data(self, data: str) -> None:
        """Keeps the text."""
        if not self.skipped:
            self.out.append(re.sub(r"\s+", " ", data))
