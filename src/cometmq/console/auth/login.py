"""The login page. It is plain HTML, so that the framework cannot be reached without a session."""

from __future__ import annotations

from html import escape

from cometmq.console.base.texts import LANGUAGES, preferred_language, text

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


def login_page(
    *, language: str, accepted: str, dark: bool | None, token: str, where: str, problem: str
) -> bytes:
    """Return the login page as HTML.

    Args:
        language: Value of the language cookie.
        accepted: The Accept-Language header.
        dark: Whether to use the dark theme; None for the setting of the browser.
        token: Token in the form, without which forms of other sites are refused.
        where: Path of the page to show after the login.
        problem: Key of an error text, or "".
    """
    shown_in = language if language in LANGUAGES else preferred_language(accepted)

    def escaped(key: str) -> str:
        return escape(text(shown_in, key))

    return _PAGE.format(
        language=shown_in,
        title=escaped("login.title"),
        dark={True: " dark", False: "", None: " auto"}[dark],
        problem=f'<p class="problem" role="alert">{escaped(problem)}</p>\n' if problem else "",
        token=escape(token),
        where=escape(where),
        name=escaped("login.name"),
        password=escaped("login.password"),
        enter=escaped("login.enter"),
    ).encode()
