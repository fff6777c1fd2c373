"""The web console: pages over `cometmq.admin`, which executes all requests and changes.

How to write a page
===================

A page is a function in a module of `console/pages` or `console/messages`. Its texts are in
`console/texts/<part>.toml`, and `PAGES` in `pages/__init__.py` has an entry for it:

    @page("/topics", "topics.title", menu=40, icon="topic")  # menu: position in the menu
    async def topics_page(view: View) -> None:
        view.title(view.t("topics.title"))
        ...

    @page("/topics/{name:path}", "topics.title", under="/topics")
    async def topic_page(view: View, name: str) -> None: ...

- **Links**: `view.link(text, path_of("topics", name))` quotes any name. `view.query` is the query of the
  address; `view.set_query` stores what the user has chosen, so that the address can be shared.
- **Texts**: `view.t("topics.count", n=3)` with `count = ["{n} topics", "{n} 个"]` in `topics.toml`. Common
  words are in `common.toml` and `list.toml`. tests/console/test_texts.py reports missing and unused texts. If
  code computes a key (`f"topics.{kind}"`), another place must contain each possible key as a whole string.
- **Live values** come from feeds, which all open pages share. A feed requests its value only while a page is
  visible: `feed = view.feeds.feed(("topic", name), lambda: ask(view.admin, name), 10.0)`. The key contains
  everything on which the value depends. `await view.live(feed, draw)` adds an area that `draw(value)` fills
  after each change, with the age of the value or the reason why it is missing. `view.watch` calls a function
  after each change, and adds no area.
- **Lists**: `listing = Listing(view, columns, key)`, then `await listing.follow(feed, pick, notes=...)` or
  `listing.update(rows)`. A `None` value is shown as unavailable, which differs from 0 and "". `actions=` adds
  buttons to each row, `selectable=True` lets the user select rows. Two lists of a page need a `name=`.
- **Single requests**, after a click: `await view.load(place, request, draw)`, or `SearchFields` if the values
  of search fields are to be stored in the address.
- **Changes** are made only by `await Action(...).run(view)`. It checks the permission, asks for confirmation,
  shows the progress and the outcome, and writes the audit log. Add the button only `if view.may_change`.
- **Values that an action needs**: create a `Form(view, title)`, add its fields, `await form.submitted()`.

Rules for every page
====================

- Names, bodies, properties and remarks are hostile. Show them with `text_element`, `ui.label`, `Listing` or
  `view.facts`, which show text. Never use `ui.html`, `ui.markdown` or `add_slot`. Never put a value into the
  string of `.props("...")`: set `element.props["title"] = value`. No dictionary key that is sent to the
  browser may come from outside: the framework executes the value of a key that begins with ":". Put values
  into JavaScript with `json.dumps`.
- No page, link, log line or audit entry contains a secret: `settings.setting_rows` masks them.
- Limit every input (maxlength, counts) and every request: a page of a list, not all messages of a topic.
- Every input has a label, every icon button an aria-label; areas that change by themselves are `live_area()`.
- A page shows something within a second: slower requests run afterwards (`view.live`, `view.load`).

Sub-packages, each of which imports only the previous ones: `base` (texts, feeds, clusters), `auth` (accounts,
sessions, gate; independent of the framework), `widgets` (elements of pages), `messages` and `pages`. app.py
assembles the console.
"""
