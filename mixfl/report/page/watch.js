"use strict";
// The page of `mixfl watch`. It asks the server every second for what has changed.
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const first = JSON.parse(document.getElementById("shown-first").textContent);
  const $ = (id) => document.getElementById(id);
  const POLL = 1000, HIDDEN_POLL = 5000, AUTO = 8, MOST_SHOWN = 24, COLUMNS = 3;

  const runs = new Map(); // number: run, with its configuration
  let board = null, version = 0, skew = 0; // the server's clock minus ours
  const shown = new Map(); // number: slot (its color)
  let chosenByHand = false, metrics = [], columns = [], lines = new Map();
  let opened = null, asked = null, sort = { by: "changed", down: true }, state = "", listed = [];
  let differing = new Map(); // task: keys
  const plot = new Plot({ kind: "curves", log: false, panels: [], lines: [], notes: [] });
  const now = () => Date.now() / 1000 + skew;

  async function ask(path, body) {
    const answer = await fetch(path, {
      method: body ? "POST" : "GET", headers: { "X-Mixfl-Token": token },
      body: body && JSON.stringify(body), cache: "no-store",
    });
    const content = (answer.headers.get("Content-Type") || "").startsWith("application/json")
      ? await answer.json() : { error: await answer.text() };
    if (!answer.ok) throw Object.assign(new Error(content.error), { told: true });
    return content;
  }

  // What has changed

  async function poll() {
    try {
      const content = await ask(`/api/runs?since=${version}`);
      if (board !== null && content.board !== board) return location.reload();
      board = content.board;
      version = content.version;
      skew = content.now - Date.now() / 1000;
      take(content);
      await updateCurves();
      if (opened !== null && (content.runs.some((r) => r.id === opened) || !runs.has(opened))) {
        await showDetails();
      }
      live(true);
    } catch (error) {
      live(false, error);
    }
    setTimeout(poll, document.hidden ? HIDDEN_POLL : POLL);
  }

  function live(well, error) {
    $("live").className = well ? "" : "lost";
    $("live").textContent = well ? "live" : error.told ? error.message : "not connected";
  }

  function take({ runs: changed, configs, gone }) {
    for (const run of changed) {
      const config = configs[run.id] || runs.get(run.id)?.config || {};
      runs.set(run.id, { ...run, config });
    }
    for (const id of gone) {
      runs.delete(id);
      shown.delete(id);
      lines.delete(id);
    }
    if (Object.keys(configs).length || gone.length) findDifferences();
    if (!chosenByHand) chooseShown();
    chooseMetrics();
    $("empty").hidden = runs.size > 0;
    $("list").hidden = !runs.size;
    fillStates();
    fillTable();
  }

  function findDifferences() {
    const tasks = Map.groupBy ? Map.groupBy(runs.values(), (r) => r.config.task) : grouped();
    differing = new Map([...tasks].map(([task, of]) => [task, differingKeys(of.map((r) => r.config))]));
  }
  function grouped() {
    const found = new Map();
    for (const run of runs.values()) {
      found.set(run.config.task, [...(found.get(run.config.task) || []), run]);
    }
    return found;
  }

  function chooseShown() {
    const order = [...runs.values()].sort((a, b) => isLive(b) - isLive(a) || b.changed - a.changed);
    const wanted = order.slice(0, AUTO).map((r) => r.id);
    for (const id of shown.keys()) if (!wanted.includes(id)) hide(id);
    wanted.forEach(show);
  }
  function show(id) {
    if (shown.has(id) || shown.size >= MOST_SHOWN) return;
    const taken = new Set(shown.values());
    let slot = 0;
    while (taken.has(slot)) slot++;
    shown.set(id, slot);
  }
  function hide(id) {
    shown.delete(id);
    lines.delete(id);
  }
  const color = (slot) => PALETTE[slot % PALETTE.length][isDark() ? 1 : 0];

  function chooseMetrics() {
    const known = new Set();
    for (const run of runs.values()) for (const key of Object.keys(run.values)) known.add(key);
    const order = [...first.filter((k) => known.has(k)),
      ...[...known].filter((k) => !first.includes(k)).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))];
    const judged = order.filter((k) => /^(eval|valid)\//.test(k));
    columns = (judged.length ? judged : order).slice(0, COLUMNS);
    if (!metrics.length) metrics = order.slice(0, 2);
    const more = $("more"), options = order.filter((k) => !metrics.includes(k));
    if (more.dataset.options !== options.join("\n")) {
      more.dataset.options = options.join("\n");
      more.replaceChildren(make("option", { textContent: "+ metric", value: "" }),
        ...options.map((k) => make("option", { textContent: k, value: k })));
    }
    const place = $("metrics");
    if (place.dataset.metrics !== metrics.join("\n")) {
      place.dataset.metrics = metrics.join("\n");
      place.replaceChildren(...metrics.map((k) => {
        const button = make("button", { type: "button", textContent: `${k} ×`, title: "Remove this panel" });
        button.addEventListener("click", () => setMetrics(metrics.filter((m) => m !== k)));
        return button;
      }));
    }
  }
  const rank = (key) => ["eval/", "valid/", "train/"].findIndex((p) => key.startsWith(p)) >>> 0;
  function setMetrics(chosen) {
    metrics = chosen;
    lines = new Map();
    chooseMetrics();
    updateCurves();
  }
  $("more").addEventListener("change", (event) => {
    if (event.target.value) setMetrics([...metrics, event.target.value].slice(-6));
  });

  // Curves

  async function updateCurves() {
    const wanted = [...shown.keys()].map((id) => `${id}.${lines.get(id)?.version || 0}`).join(",");
    if (wanted && metrics.length) {
      const asked = metrics.join("\n");
      const content = await ask(`/api/curves?runs=${wanted}&metrics=${encodeURIComponent(JSON.stringify(metrics))}`);
      if (asked !== metrics.join("\n")) return;
      for (const [id, line] of Object.entries(content.runs)) {
        if (shown.has(+id)) lines.set(+id, line);
      }
    }
    draw();
  }

  function label(run) {
    const keys = (differing.get(run.config.task) || []).filter((k) => k !== "algorithm" && k in run.config);
    return [run.config.algorithm, ...keys.map((k) => `${k} ${run.config[k]}`)].filter(Boolean).join(" · ");
  }

  let drawn = "";
  function draw(again = false) {
    const there = [...shown].filter(([id]) => runs.has(id));
    $("curves").hidden = !runs.size;
    const made = there.map(([id, slot]) => {
      const [light, dark] = PALETTE[slot % PALETTE.length];
      const dash = DASHES[Math.floor(slot / PALETTE.length) % DASHES.length];
      const of = lines.get(id)?.lines || {};
      return { id, name: runs.get(id).name, light, dark, dash, panels: metrics.map((m) => of[m] || null) };
    });
    const state = JSON.stringify([made, metrics, plot.log, isDark()]);
    if (state === drawn && !again) return;
    drawn = state;
    plot.figure.lines = made;
    const used = metrics.map((_, p) => made.some((line) => line.panels[p]?.rounds.length));
    plot.figure.panels = metrics.map((m, p) => ({
      metric: m, title: withoutPrefix(m), ...cutOff(made.map((line) => [line.name, line.panels[p]?.mean])),
    }));
    const area = document.querySelector(".chart");
    $("nothing").hidden = used.some(Boolean);
    area.hidden = !used.some(Boolean);
    fillLegend(made);
    fillDifferences(there.map(([id]) => runs.get(id)));
    if (area.hidden) return;
    const { traces, layout } = plot.plot(area.clientWidth, isDark(), false);
    layout.uirevision = metrics.join("\n"); // what the user zoomed stays
    Plotly.react(area, traces, layout, {
      displayModeBar: false, displaylogo: false, showLink: false, plotlyServerURL: "", responsive: false,
    });
    area.style.minHeight = "0";
  }

  function fillLegend(made) {
    document.querySelector(".legend").replaceChildren(...made.map((line) => {
      const words = make("span", { className: "text", textContent: line.name });
      const button = make("button", { type: "button", title: `Hide ${line.name}` }, sample(line), words);
      button.addEventListener("click", () => tick(line.id, false));
      return button;
    }));
  }

  function fillDifferences(of) {
    const keys = of.length > 1 ? differingKeys(of.map((r) => r.config)) : [];
    const place = $("differences");
    place.hidden = !keys.length;
    place.querySelector("summary").textContent =
      `Differences between the ${of.length} shown runs: ${keys.join(", ")}`;
    const cells = (tag, words) => make("tr", {}, ...words.map((w) => make(tag, { textContent: w ?? "unset" })));
    place.querySelector("thead").replaceChildren(cells("th", ["run", ...keys]));
    place.querySelector("tbody").replaceChildren(
      ...of.map((r) => cells("td", [r.name, ...keys.map((k) => r.config[k])])));
  }

  $("log").addEventListener("click", () => {
    plot.log = !plot.log;
    $("log").setAttribute("aria-pressed", plot.log);
    draw();
  });

  // The table: only rows in sight are made

  const rows = document.querySelector(".rows"), spacer = rows.querySelector(".spacer");
  const elements = new Map(); // number: row
  const narrow = matchMedia("(max-width: 52rem)");
  const tall = () => (narrow.matches ? 74 : 46);

  const value = (run, key) => {
    if (key === "name") return run.name;
    if (key === "state") return STATES.indexOf(run.state);
    if (key === "round") return share(run);
    if (key === "left") return run.state === "running" && run.left != null ? run.left - (now() - run.at) : Infinity;
    return key === "changed" ? run.changed : run.values[key] ?? null;
  };

  function fits(run, words) {
    const text = `${run.name} ${run.state} ${Object.entries(run.config).map(([k, v]) => `${k}=${v}`).join(" ")}`;
    return words.every((word) => text.toLowerCase().includes(word));
  }

  function fillTable() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    listed = [...runs.values()].filter((r) => (!state || r.state === state) && fits(r, words));
    const sign = sort.down ? -1 : 1;
    listed.sort((a, b) => {
      const [x, y] = [value(a, sort.by), value(b, sort.by)];
      if (x === null || y === null) return (x === null) - (y === null) || a.id - b.id;
      return (x < y ? -sign : x > y ? sign : 0) || a.name.localeCompare(b.name, undefined, { numeric: true });
    });
    fillHead();
    spacer.style.height = `${listed.length * tall()}px`;
    const all = `${runs.size} run${runs.size === 1 ? "" : "s"}`;
    const words2 = listed.length === runs.size ? all : `${listed.length} of ${all}`;
    $("count").textContent = `${words2}; ${shown.size} in the chart`;
    place();
  }

  function place() {
    const height = tall();
    // On a phone the whole page scrolls, elsewhere the table does.
    const top = narrow.matches ? Math.max(0, -rows.getBoundingClientRect().top) : rows.scrollTop;
    const sight = narrow.matches ? innerHeight : rows.clientHeight || 700;
    const from = Math.max(0, Math.floor(top / height) - 4);
    const part = listed.slice(from, Math.ceil((top + sight) / height) + 4);
    const kept = new Set(part.map((r) => r.id));
    for (const [id, element] of elements) {
      if (!kept.has(id)) {
        element.remove();
        elements.delete(id);
      }
    }
    part.forEach((run, i) => {
      let element = elements.get(run.id);
      if (!element) {
        element = newRow(run.id);
        elements.set(run.id, element);
        rows.append(element);
      }
      element.style.top = `${(from + i) * height}px`;
      fillRow(element, run);
    });
  }
  rows.addEventListener("scroll", place, { passive: true });
  addEventListener("scroll", () => narrow.matches && place(), { passive: true });
  narrow.addEventListener("change", fillTable);

  function newRow(id) {
    const box = make("input", { type: "checkbox" });
    box.addEventListener("change", () => tick(id, box.checked));
    const name = make("button", { type: "button" });
    const element = make("div", { className: "row" }, box,
      make("span", { className: "name" }, name, make("span", { className: "text" })),
      make("span", { className: "state" }),
      make("span", { className: "progress" }, make("span", { className: "words" }),
        make("span", { className: "bar" }, make("span"))),
      make("span", { className: "left n" }),
      ...Array.from({ length: COLUMNS }, () => make("span", { className: "value n" })),
      make("span", { className: "changed n" }));
    element.setAttribute("role", "row");
    element.addEventListener("click", (event) => {
      if (event.target !== box) open(id);
    });
    return element;
  }

  function fillRow(element, run) {
    const q = (selector) => element.querySelector(selector);
    const slot = shown.get(run.id);
    const box = q("input");
    box.checked = slot !== undefined;
    box.setAttribute("aria-label", `Show ${run.name} in the chart`);
    element.style.setProperty("--slot", slot === undefined ? "" : color(slot));
    element.className = `row ${run.state}${run.id === opened ? " chosen" : ""}`;
    element.dataset.run = run.name;
    q(".name button").textContent = run.name;
    q(".name button").title = run.name;
    q(".name .text").textContent = label(run);
    if (q(".state").dataset.state !== run.state + run.stopping) {
      q(".state").dataset.state = run.state + run.stopping;
      q(".state").replaceChildren(badge(run));
    }
    q(".words").textContent = `${run.round} / ${run.rounds || "?"}`;
    q(".bar span").style.width = `${100 * share(run)}%`;
    q(".left").textContent = timeLeft(run, now());
    element.querySelectorAll(".value").forEach((cell, i) => {
      const number = run.values[columns[i]];
      cell.textContent = number === undefined ? "" : short(number);
    });
    q(".changed").textContent = ago(now() - run.changed);
  }

  function fillHead() {
    const heads = [["name", "run"], ["state", "state"], ["round", "round"], ["left", "time left"],
      ...Array.from({ length: COLUMNS }, (_, i) => [columns[i] || "", withoutPrefix(columns[i] || "")]),
      ["changed", "changed"]];
    const said = JSON.stringify([heads, sort]);
    const head = document.querySelector(".head");
    if (head.dataset.said === said) return;
    head.dataset.said = said;
    head.replaceChildren(make("span"), ...heads.map(([key, words], i) => {
      const button = make("button", { type: "button", textContent: words, title: words });
      button.style.textAlign = i > 2 ? "right" : "left";
      if (key && key === sort.by) button.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      button.addEventListener("click", () => {
        sort = { by: key || "changed", down: sort.by === key ? !sort.down : key === "changed" };
        fillTable();
      });
      return button;
    }));
  }

  function fillStates() {
    const counts = STATES.map((s) => [s, [...runs.values()].filter((r) => r.state === s).length]);
    const said = JSON.stringify([counts, state]);
    if ($("states").dataset.said === said) return;
    $("states").dataset.said = said;
    $("states").replaceChildren(...counts.filter(([s, n]) => n || s === state).map(([s, n]) => {
      const button = make("button", { type: "button", textContent: `${SIGNS[s]} ${n} ${s}` });
      button.setAttribute("aria-pressed", s === state);
      button.addEventListener("click", () => {
        state = state === s ? "" : s;
        fillStates();
        fillTable();
      });
      return button;
    }));
  }
  $("filter").addEventListener("input", fillTable);

  function tick(id, on) {
    chosenByHand = true;
    on ? show(id) : hide(id);
    fillTable();
    updateCurves().catch((error) => live(false, error));
  }

  // One run

  function open(id) {
    opened = id;
    asked = null;
    place();
    showDetails().catch((error) => live(false, error));
  }
  function close() {
    opened = asked = null;
    $("details").hidden = true;
    place();
  }
  addEventListener("keydown", (event) => event.key === "Escape" && close());

  async function showDetails() {
    const run = runs.get(opened);
    if (!run) return close();
    const details = await ask(`/api/run?id=${opened}`);
    if (details.id !== opened) return;
    const place = $("details"), scrolled = place.scrollTop;
    const close_ = make("button", { type: "button", className: "close", textContent: "Close" });
    close_.addEventListener("click", close);
    const left = timeLeft(run, now());
    const bar = make("span", { className: "bar" }, make("span"));
    bar.firstChild.style.width = `${100 * share(run)}%`;
    place.className = run.state;
    place.replaceChildren(close_, make("h2", { textContent: run.name }), badge(run),
      make("div", { className: "progress" },
        make("span", { textContent: `round ${run.round} of ${run.rounds || "?"}${left ? `, ${left} left` : ""}` }), bar),
      ...(run.message ? [make("p", { className: "message", textContent: run.message })] : []),
      ...actions(run, details), ...metricTable(run), ...logList(details.log), ...configTable(run));
    place.hidden = false;
    place.scrollTop = scrolled;
  }

  function actions(run, details) {
    if (isLive(run)) {
      // The details are made anew while the run goes on: what was asked stays asked.
      const words = () => run.stopping ? "Stopping after this round" : asked === run.id ? "Really stop?" : "Stop and save";
      const button = make("button", { type: "button", className: "stop", textContent: words() });
      button.disabled = run.stopping;
      button.addEventListener("click", async () => {
        if (asked !== run.id) {
          asked = run.id;
          button.textContent = words();
          return;
        }
        asked = null;
        button.disabled = true;
        try {
          button.textContent = (await ask("/api/stop", { id: run.id })).said;
        } catch (error) {
          button.textContent = error.message;
        }
      });
      return [make("p", {}, button)];
    }
    if (run.state === "finished" || run.state === "diverged") return [];
    const { command, words } = details.resume;
    return [make("h3", { textContent: "To go on" }),
      ...(command ? [make("pre", { className: "command", textContent: command })] : []),
      ...(words ? [make("p", { className: "about", textContent: words })] : [])];
  }

  const table = (pairs) => make("table", {}, make("tbody", {}, ...pairs.map(([k, v, kind]) =>
    make("tr", { className: kind || "" }, make("td", { textContent: k }), make("td", { textContent: v })))));

  function metricTable(run) {
    const pairs = Object.entries(run.values).map(([k, v]) => [k, short(v)]);
    return pairs.length ? [make("h3", { textContent: "Newest metrics" }), table(pairs)] : [];
  }

  function logList(log) {
    if (!log.length) return [];
    return [make("h3", { textContent: "Log" }), make("ul", { className: "log" }, ...[...log].reverse().map((line) =>
      make("li", { className: line.kind }, make("time", { textContent: new Date(1000 * line.time).toLocaleString() }), line.text)))];
  }

  function configTable(run) {
    const keys = new Set(differing.get(run.config.task) || []);
    const pairs = Object.entries(run.config).map(([k, v]) => [k, v, keys.has(k) ? "differs" : ""]);
    pairs.sort((a, b) => (b[2] !== "") - (a[2] !== ""));
    const words = keys.size ? "Configuration (≠: other runs of this task differ)" : "Configuration";
    return [make("h3", { textContent: words }), table(pairs)];
  }

  onTheme(() => {
    if (runs.size) {
      draw();
      place();
    }
  });
  addEventListener("resize", () => requestAnimationFrame(() => {
    draw(true);
    place();
  }));
  document.addEventListener("visibilitychange", () => !document.hidden && fillTable());
  poll();
})();
