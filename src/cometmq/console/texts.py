"""Every text that the console shows, by key, in English and Chinese.

The texts lie in `texts/*.toml`, a file for each part: `title = ["Topics", "主题"]` in `topics.toml` is the
key `topics.title`. `{name}` in a text is filled in when it is shown. A test finds what is missing, differs
between the languages, or is used by nobody.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

from cometmq.errors import CometError

LANGUAGES = {"en": "English", "zh": "中文"}
DEFAULT = "en"
_NAME = re.compile(r"\{(\w+)\}")
_ORDER = tuple(LANGUAGES)


class UnknownText(CometError):
    """A key without a text: a mistake in a page."""

    key: str

    def __str__(self) -> str:
        return f"there is no text {self.key!r} in cometmq/console/texts"


@cache
def table() -> dict[str, dict[str, str]]:
    """Key -> language -> text, of all files."""
    found: dict[str, dict[str, str]] = {}
    for file in resources.files("cometmq.console").joinpath("texts").iterdir():
        part, _, kind = file.name.rpartition(".")
        if kind == "toml":
            for key, texts in tomllib.loads(file.read_text("utf-8")).items():
                found[f"{part}.{key}"] = dict(zip(_ORDER, texts, strict=False))
    return found


def text(language: str, key: str, **values: object) -> str:
    """The text of a key with its values filled in. Raises UnknownText."""
    texts = table().get(key)
    if texts is None:
        raise UnknownText(key)
    said = texts.get(language) or texts[DEFAULT]
    # At once: a value may hold "{n}".
    return _NAME.sub(lambda found: str(values.get(found[1], found[0])), said)


def language_of(accepted: str) -> str:
    """The language that a browser's Accept-Language asks for first, of those that there are."""
    for part in accepted.lower().split(","):
        word = part.split(";")[0].strip().split("-")[0]
        if word in LANGUAGES:
            return word
    return DEFAULT
