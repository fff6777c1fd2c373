"""The web console: pages over `cometmq.admin`, which is the one way to ask or change anything.

How a page is written
=====================

A module `<part>.py` of `console/pages` or `console/messages` with a function `pages(console)`, its texts in
`console/texts/<part>.toml`, and its line in `pages/__init__.py`:

    def pages(console: Console) -> None:
        @console.page("/topics", "topics.title", menu=40, icon="topic")  # menu=: its place in the menu
        async def topics(view: View) -> None:
            view.title(view.t("topics.title"))
            ...

        @console.page("/topics/{name:path}", "topics.title", under="/topics")
        async def topic(view: View, name: str) -> None: ...

- **Links** are made by `rows.path_of("topics", name)`, whatever the name holds: `view.link(said, href)`. The
  longer path is registered first where two could match (`/topics/{name:path}/send` before
  `/topics/{name:path}`). The page's query is the dict `view.query`; what somebody chose is put into it, and
  `view.note_query()` writes it into the address, so that the link can be shared.
- **Texts**: `view.t("topics.count", n=3)`, each as `count = ["{n} topics", "{n} 个"]` in the file of the
  part. Common words are in `common.toml` and `list.toml`. tests/console/test_texts.py finds missing ones; a
  key that is put together (`f"topics.{kind}"`) needs its keys somewhere as whole texts.
- **Live** values come from feeds, which all open pages share and which ask only while one of them is in
  front: `feed = view.feeds.feed(("topic", name), lambda: ask(view.admin, name), 10.0)`. The key names
  everything the answer depends on. One question a broker and page: what belongs together is one feed.
  `await view.live(feed, draw)` is an area that `draw(value)` fills, again whenever the value has changed; it
  shows its age, that it asks, and why there is no (newer) answer. `view.watch(feed, told)` is the same by
  hand.
- **Lists** of any length: `listing = Listing(view, columns, key)`, then `await listing.follow(feed, pick)` or
  `listing.update(rows)`; search, sort, paging and their address are done there. A `Column` has a name (for
  the address), a title (key of a text), a value, a kind (shown.KINDS: text, number, rate, size, percent,
  time, ago, flag, perm) and perhaps a link. `None` as a value is "unavailable", which is not 0 or "".
  `actions=` are buttons in each row, `choose=True` lets rows be chosen (`listing.chosen`). Two lists of a
  page need a `name=`.
- **Asked once**, by a button: `place = ui.element("div")`, `await view.fill(place, question, draw)`.
- **Changing** anything goes through `await act(view, Action(...))` of frame/actions.py alone: role,
  confirmation with what it will do, the name to be typed where `danger=True`, progress (`work` gets a
  Progress), the audit log, message of success or failure. Show the button only `if view.may_change`; act()
  checks again when it is done. Buttons are made by `view.button(key, do)`: failures of `do` are told, not
  swallowed.
- **Asking for values** first: `dialog(view, [...])` of frame/actions.py, NiceGUI's inputs in it with a label
  each.
- **Headings, facts, tiles, notes, empty states**: `view.title`, `view.section`, `view.facts`, `view.tiles`,
  `view.note`, `view.empty`. Classes are in static/console.css; the framework's Tailwind is switched off, its
  Quasar classes are there.

What every page keeps to
========================

- Names, bodies, properties, remarks are hostile. They are shown by `text_element`, `ui.label`, lists and
  facts, which show text. Never `ui.html`, `ui.markdown`, `add_slot` or `.props("...")` with a value in the
  string: set `element.props["title"] = value`. No key of a dictionary that goes to the browser comes from
  outside: the framework runs the value of a key that begins with ":" as a script (lists of pairs are fine).
  JavaScript is ours alone, values in it by `json.dumps`.
- No secret in a page, link, log or audit entry: settings go through settings.setting_rows.
- What a user gives is bounded at the door (maxlength, counts), and so is what is asked: a page of a list, not
  everything of a topic.
- Every input has a label, every icon button an aria-label; what happens by itself says so (aria-live).
- A page shows something within a second: what takes longer is asked behind (`view.live`, `view.fill`).

Rooms: `door` stands before the framework and knows nothing of it; `frame` is what pages are made of (live and
rows are plain too); `pages` are those of clusters, topics, groups and accounts, `messages` those of messages;
cluster.py is what many pages ask, clusters.py the list of clusters; app.py puts it together.
"""
