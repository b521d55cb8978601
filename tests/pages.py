"""Parses an HTML page: tags, text and chart data."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside: list[str] = []
        self.bytes = file.stat().st_size
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        where = self._inside[-1] if self._inside else ""
        (self.scripts if where == "script" else self.words).append(data)

    @property
    def charts(self) -> list[dict[str, Any]]:
        """The data and layouts of the plotly charts."""
        return [json.loads(script) for script in self.scripts if script.startswith('{"data"')]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))
