"use strict";
// Ages tick here, so that a page that shows old numbers costs the server nothing.
(() => {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const words = {
    en: { d: " d", h: " h", min: " min", s: " s", old: (span) => `updated ${span} ago`, now: "updated just now" },
    zh: { d: " 天", h: " 小时", min: " 分", s: " 秒", old: (span) => `${span}前更新`, now: "刚刚更新" },
  };
  const said = words[document.documentElement.lang.startsWith("zh") ? "zh" : "en"];
  const came = new WeakMap(); // element -> which answer it told of when it was first seen, and when that was
  const tick = () => {
    for (const each of document.querySelectorAll(".age[data-at]")) {
      const { at, age } = each.dataset; // ms since 1970; how old that was when it was sent, by the server's clock
      if (came.get(each)?.at !== at) came.set(each, { at, seen: performance.now() });
      const span = Math.round(Number(age) + (performance.now() - came.get(each).seen) / 1000);
      const [length, unit] = units.find(([length]) => span >= length) || [1, "s"];
      each.textContent = span < 2 ? said.now : said.old(Math.floor(span / length) + said[unit]);
    }
  };
  setInterval(tick, 1000);
  // A page that nobody sees asks for nothing.
  const seen = () => window.emitEvent?.("page_seen", !document.hidden);
  document.addEventListener("visibilitychange", seen);
  // A session that is over, or a console that was started again: back to the login, and from there to this page.
  const hook = () => {
    if (!window.socket) return setTimeout(hook, 200);
    // A page that was opened behind others has not been seen yet; it is told once its connection is made.
    const behind = () => document.hidden && setTimeout(seen, 500);
    window.socket.connected ? behind() : window.socket.once("connect", behind);
    window.socket.io.on("error", async () => {
      const answer = await fetch(`/alive?page=${encodeURIComponent(window.clientId)}`).catch(() => null);
      if (answer && answer.status === 401) window.location.reload();
    });
  };
  hook();
  // "/" goes to the search of the list, as elsewhere.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input,textarea,[contenteditable]")) return;
    const search = document.querySelector(".list-search input");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  });
})();
