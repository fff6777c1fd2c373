"""The page to log in: plain HTML without scripts, so that nothing else is open to those who are not in."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from cometmq.console.texts import LANGUAGES, language_of, text

_PAGE = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8"><title>CometMQ · {title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="/static/favicon.svg"><link rel="stylesheet" href="/static/console.css"></head>
<body class="login{dark}"><main><h1>CometMQ</h1>
{problem}<form method="post" action="/login" autocomplete="on">
<input type="hidden" name="csrf" value="{token}"><input type="hidden" name="next" value="{where}">
<label for="name">{name}</label>
<input id="name" name="name" autocomplete="username" required autofocus maxlength="64">
<label for="password">{password}</label>
<input id="password" name="password" type="password" autocomplete="current-password" required maxlength="256">
<button type="submit">{enter}</button></form></main></body></html>
"""


@dataclass(frozen=True)
class LoginPage:
    """What the page shows. language: of the cookie; token: against forms of other sites; where: the page to
    go on to; problem: the key of a text; dark: None as the browser's system has it."""

    language: str
    accepted: str
    dark: bool | None
    token: str
    where: str
    problem: str


def login_page(page: LoginPage) -> bytes:
    """The page as HTML."""
    language = page.language if page.language in LANGUAGES else language_of(page.accepted)

    def said(key: str) -> str:
        return escape(text(language, key))

    problem = f'<p class="problem" role="alert">{said(page.problem)}</p>\n' if page.problem else ""
    return _PAGE.format(
        language=language,
        title=said("login.title"),
        dark={True: " dark", False: "", None: " auto"}[page.dark],
        problem=problem,
        token=escape(page.token),
        where=escape(page.where),
        name=said("login.name"),
        password=said("login.password"),
        enter=said("login.enter"),
    ).encode()
