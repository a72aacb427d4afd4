"use strict";
(() => {
  const tip = document.getElementById("tip");
  const number = (x) => (x === null ? "–" : x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4))));
  const signed = (x) => (x === null ? "–" : (x > 0 ? "+" : "") + number(x)).replace("-", "−");
  const share = (x) => (x === null ? "–" : x > 0 && x < 1e-4 ? x.toExponential(1) : (100 * x).toFixed(2) + " %");

  const add = (parent, tag, text, kind) => {
    const node = parent.appendChild(document.createElement(tag));
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };
  const row = (table, cells) => {
    const line = add(table, "tr");
    cells.forEach((cell, i) => add(line, "td", cell, i ? "n" : ""));
    return line;
  };

  const fill = (data, i) => {
    tip.replaceChildren();
    add(add(tip, "div"), "code", data.token[i]);
    const facts = add(tip, "table");
    const w = data.weight[i], A = data.advantage, d = data.credit[i];
    row(facts, ["weight", number(w) + (data.frozen[i] ? " (frozen)" : "")]);
    row(facts, ["advantage of the response", signed(A)]);
    if (A !== null && w !== null) row(facts, ["of this token", signed(A * w)]);
    row(facts, ["credit", signed(d)]);
    row(facts, ["probability", share(data.probability[i])]);
    const found = data.alternatives[i];
    if (!found || !found.length) return;
    const table = add(tip, "table");
    const head = add(table, "tr");
    ["most likely", "probability", "A"].forEach((name, j) => add(head, "th", name, j ? "n" : ""));
    add(head.lastChild, "sub", "v");
    for (const [text, p, a, chosen] of found) {
      const line = row(table, ["", share(p), signed(a)]);
      add(line.firstChild, "code", text);
      if (chosen) line.className = "chosen";
    }
  };

  const place = (token) => {
    const at = token.getClientRects()[0] || token.getBoundingClientRect();
    const room = document.documentElement;
    tip.style.left = Math.max(8, Math.min(at.left, room.clientWidth - tip.offsetWidth - 8)) + "px";
    const below = at.bottom + 8, above = at.top - tip.offsetHeight - 8;
    tip.style.top = (below + tip.offsetHeight <= room.clientHeight || above < 0 ? below : above) + "px";
  };

  let shown = null;
  const hide = () => {
    if (shown) shown.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  };

  for (const box of document.querySelectorAll(".tokens")) {
    const data = JSON.parse(box.nextElementSibling.textContent);
    const tokens = [...box.children];
    const show = (token) => {
      hide();
      shown = token;
      fill(data, tokens.indexOf(token));
      tip.hidden = false;
      token.setAttribute("aria-describedby", "tip");
      place(token);
    };
    box.addEventListener("pointerover", (event) => event.target !== box && show(event.target));
    box.addEventListener("pointerleave", () => (tokens.includes(document.activeElement) ? show(document.activeElement) : hide()));
    box.addEventListener("focusin", (event) => event.target !== box && show(event.target));
    box.addEventListener("focusout", hide);
    box.addEventListener("keydown", (event) => {
      const here = tokens.indexOf(document.activeElement);
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = step ? here + step : event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : -1;
      if (event.key === "Escape") hide();
      if (!tokens[next]) return;
      event.preventDefault();
      tokens[next].focus();
    });
  }
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
  addEventListener("scroll", () => shown && place(shown), { passive: true, capture: true });
})();
