"""A secret that was just made, shown once to the one who made it."""

from __future__ import annotations

from nicegui import ui

from cometmq.console.frame.actions import close, dialog
from cometmq.console.frame.page import View, text_element


async def show_secret(view: View, says: str, secret: str) -> None:
    """Show it until the dialog is closed. It is in no feed, log or address, and gone with the dialog."""
    with dialog(view, [says, view.t("secret.once")]) as (box, place), place:
        text_element("code", secret).classes("body secret")
        with ui.row().classes("full-width justify-end"):
            ui.button(view.t("secret.kept"), on_click=lambda: box.submit(True)).props("no-caps")
    await box
    close(box)
