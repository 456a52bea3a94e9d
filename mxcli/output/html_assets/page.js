"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const { noun, rows, filters, columns, data, charts } = JSON.parse(byId("data").textContent);

  // Columns as arrays of their values; each name is the beginning it shares with the one before, and its rest.
  const names = [];
  let before = "";
  const { shared, rest } = data[0];
  for (let row = 0; row < rows; row++) {
    before = before.slice(0, shared[row]) + rest[row];
    names.push(before);
  }
  const isWord = (at) => columns[at].kind === "word" || columns[at].kind === "shape";
  const value = (column, row) => {
    if (columns[column].kind === "text") return names[row];
    return isWord(column) ? data[column].words[data[column].index[row]] : data[column][row];
  };
  const place = (key) => columns.findIndex((column) => column.key === key);

  // Numbers and names as text.
  const number = (x, isWhole) => {
    if (x === null) return "\u2013";
    if (typeof x !== "number") return x;
    const size = Math.abs(x);
    if (x === 0 || isWhole) return minus(x.toLocaleString("en-US"));
    if (size < 1e-4 || size >= 1e6) return minus(x.toExponential(2));
    const digits = Math.max(0, 2 - Math.floor(Math.log10(Number(size.toPrecision(3)))));
    return minus(Number(x.toPrecision(3)).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  };
  const minus = (text) => text.replace(/^-/, "\u2212");
  const SHOWN = 200;
  const visible = (text) => {
    const points = text.length > SHOWN ? text.slice(0, SHOWN / 2) + "\u2026" + text.slice(-SHOWN / 2) : text;
    return points.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
  };

  // Sort keys: numbers by size with exact ones as infinite, absent ones last; shapes by their elements; words by letter.
  const key = (column) => {
    const { kind, better } = columns[column];
    if (kind === "number" || kind === "whole") {
      const exact = better === "low" ? 0 : Infinity;
      return (row) => { const x = data[column][row]; return x === "exact" ? exact : x; };
    }
    if (kind === "shape") {
      const sizes = data[column].words.map((word) => word.split("x").reduce((n, side) => n * (Number(side) || 1), 1));
      return (row) => sizes[data[column].index[row]];
    }
    if (kind === "word") {
      const ranked = [...data[column].words].sort(natural);
      const ranks = data[column].words.map((word) => ranked.indexOf(word));
      return (row) => ranks[data[column].index[row]];
    }
    ranksOfNames ??= ranking();
    return (row) => ranksOfNames[row];
  };
  const natural = new Intl.Collator("en", { numeric: true }).compare;
  let ranksOfNames = null;
  const ranking = () => {
    const ranks = new Int32Array(rows);
    [...names.keys()].sort((a, b) => natural(names[a], names[b])).forEach((row, rank) => { ranks[row] = rank; });
    return ranks;
  };

  const state = { column: Math.max(place("sqnr_db"), columns.findIndex((c) => c.kind === "number")), down: false, page: 0, size: 50 };
  let found = [];
  let folded = null;

  const filter = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = filters.map((id) => [data[place(id)], byId(id).value]).filter(([, word]) => word)
      .map(([column, word]) => [column.index, column.words.indexOf(word)]);
    if (words.length) folded ??= names.map((name) => name.toLowerCase());
    found = [];
    for (let row = 0; row < rows; row++) {
      if (wanted.every(([index, word]) => index[row] === word) && words.every((word) => folded[row].includes(word))) found.push(row);
    }
    sort();
  };
  const sort = () => {
    const of = key(state.column);
    const sign = state.down ? -1 : 1;
    const keys = new Map(found.map((row) => [row, of(row)]));
    found.sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      if (x === y) return a - b;
      if (x === null || y === null) return x === null ? 1 : -1;
      return x < y ? -sign : sign;
    });
    state.page = 0;
    show();
  };

  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  // A column with one word for all rows is hidden.
  const shown = columns.map((column, at) => at).filter((at) => !isWord(at) || data[at].words.length > 1);

  const isNumeric = (at) => columns[at].kind === "number" || columns[at].kind === "whole";
  // A name that may break after its dots.
  const breaking = (text) => {
    const bdi = element("bdi");
    for (const part of text.split(/(?<=\.)/)) bdi.append(part, document.createElement("wbr"));
    return bdi;
  };

  const head = () => {
    const groups = element("tr"), labels = element("tr");
    const grouped = shown.some((at) => columns[at].group);
    shown.forEach((at, position) => {
      const { label, unit, meaning, group } = columns[at];
      const th = element("th", undefined, isNumeric(at) ? "" : "left " + columns[at].key);
      th.scope = "col";
      const button = element("button");
      button.type = "button";
      button.title = meaning;
      button.append(element("span", label));
      if (unit) button.append(element("small", unit));
      button.addEventListener("click", () => {
        const lowFirst = !isNumeric(at) || columns[at].better !== "low";
        state.down = state.column === at ? !state.down : !lowFirst;
        state.column = at;
        sort();
      });
      th.append(button);
      th.dataset.column = at;
      labels.append(th);
      const isNew = position === 0 || columns[shown[position - 1]].group !== group || !group;
      if (grouped && isNew) {
        const cell = element(group ? "th" : "td", group || undefined, group ? "group" : columns[at].key);
        if (group) {
          cell.scope = "colgroup";
          cell.colSpan = shown.filter((other) => columns[other].group === group).length;
        }
        groups.append(cell);
      }
    });
    byId("table").tHead.replaceChildren(...(grouped ? [groups, labels] : [labels]));
  };

  const show = (all = false) => {
    const pages = Math.max(1, Math.ceil(found.length / state.size));
    const first = all ? 0 : state.page * state.size;
    const slice = found.slice(first, all ? PRINTED : first + state.size);
    const body = document.createDocumentFragment();
    for (const row of slice) {
      const tr = element("tr");
      for (const at of shown) {
        const { kind, key: name } = columns[at];
        if (kind === "text") {
          const th = element("th");
          th.scope = "row";
          th.title = names[row].length > SHOWN ? names[row] : "";
          th.append(breaking(visible(names[row])));
          tr.append(th);
        } else if (isWord(at)) {
          tr.append(element("td", kind === "shape" ? value(at, row).replaceAll("x", "\u00d7") : visible(value(at, row)), "text " + name));
        } else {
          const x = data[at][row];
          tr.append(element("td", number(x, kind === "whole"), x === null ? "none" : ""));
        }
      }
      body.append(tr);
    }
    byId("table").tBodies[0].replaceChildren(body);
    for (const th of byId("table").tHead.querySelectorAll("[data-column]")) {
      if (Number(th.dataset.column) === state.column) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
    const count = found.length.toLocaleString("en-US");
    byId("found").textContent = found.length === rows ? `${count} ${noun}s` : `${count} of ${rows.toLocaleString("en-US")} ${noun}s`;
    const last = Math.min(first + slice.length, found.length);
    byId("page").textContent = found.length ? `${(first + 1).toLocaleString("en-US")}\u2013${last.toLocaleString("en-US")} of ${count}` : "none";
    byId("first").disabled = byId("previous").disabled = state.page === 0;
    byId("next").disabled = byId("last").disabled = state.page >= pages - 1;
  };
  const PRINTED = 2000;
  const turn = (page) => { state.page = page; show(); };

  // CSV as in RFC 4180; numbers as stored, so that they can be read back.
  const quoted = (cell) => {
    const text = cell === null || cell === undefined ? "" : String(cell);
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const download = (name, header, cells) => {
    const lines = [header, ...cells].map((row) => row.map(quoted).join(","));
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv;charset=utf-8" }));
    link.download = name + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  for (const button of document.querySelectorAll("[data-chart]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const { columns: header, cells } = charts[button.dataset.chart];
      const lines = [];
      for (let at = 0; at < cells.length; at += header.length) lines.push(cells.slice(at, at + header.length));
      download(button.dataset.chart, header, lines);
    });
  }
  byId("table-csv").addEventListener("click", () => {
    download(noun + "s", columns.map((column) => column.key), found.map((row) => columns.map((_, at) => value(at, row))));
  });

  // Light and dark: as the system, until the button is used.
  const theme = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const named = () => { theme.textContent = isDark() ? "Light mode" : "Dark mode"; };
  const remembered = (say) => { try { return say(localStorage); } catch { return null; } };
  const stored = remembered((storage) => storage.getItem("mxcli-theme"));
  if (stored === "dark" || stored === "light") document.documentElement.dataset.theme = stored;
  theme.addEventListener("click", () => {
    const chosen = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = chosen;
    remembered((storage) => storage.setItem("mxcli-theme", chosen));
    named();
  });
  system.addEventListener("change", named);
  theme.hidden = false;
  named();

  const form = document.querySelector(".controls");
  form.hidden = document.querySelector(".pager").hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("search").addEventListener("input", filter);
  for (const id of filters) byId(id).addEventListener("change", filter);
  byId("first").addEventListener("click", () => turn(0));
  byId("previous").addEventListener("click", () => turn(state.page - 1));
  byId("next").addEventListener("click", () => turn(state.page + 1));
  byId("last").addEventListener("click", () => turn(Math.ceil(found.length / state.size) - 1));
  byId("size").addEventListener("change", () => { state.size = Number(byId("size").value); turn(0); });
  addEventListener("beforeprint", () => show(true));
  addEventListener("afterprint", () => show());
  head();
  filter();
})();
