"""Texts of the console by key, in English and Chinese.

The texts are in `console/texts/*.toml`, one file per page: `title = ["Topics", "主题"]` in `topics.toml` has
the key `topics.title`. A placeholder such as `{name}` is replaced by a value. tests/console/test_texts.py
reports missing and unused texts, and texts whose languages have different placeholders.
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


class UnknownText(CometError):
    """A page uses a key that has no text."""

    key: str

    def __str__(self) -> str:
        return f"there is no text {self.key!r} in cometmq/console/texts"


@cache
def table() -> dict[str, dict[str, str]]:
    """Return the texts of all files, by key and language."""
    texts: dict[str, dict[str, str]] = {}
    for file in resources.files("cometmq.console").joinpath("texts").iterdir():
        part, _, suffix = file.name.rpartition(".")
        if suffix == "toml":
            for key, translations in tomllib.loads(file.read_text("utf-8")).items():
                texts[f"{part}.{key}"] = dict(zip(LANGUAGES, translations, strict=False))
    return texts


def text(language: str, key: str, **values: object) -> str:
    """Return a text in a language, with `values` in place of its placeholders. Raises UnknownText."""
    translations = table().get(key)
    if translations is None:
        raise UnknownText(key)
    template = translations.get(language) or translations[DEFAULT]
    # All placeholders are replaced in one step, so that a "{n}" inside a value is not replaced.
    return _NAME.sub(lambda match: str(values.get(match[1], match[0])), template)


def preferred_language(accepted: str) -> str:
    """Return the first language of an Accept-Language header in which the console has texts.

    If there is none, return the default language.
    """
    for part in accepted.lower().split(","):
        language = part.split(";")[0].strip().split("-")[0]
        if language in LANGUAGES:
            return language
    return DEFAULT
