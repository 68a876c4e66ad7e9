"use strict";
// The page's charts, switches and lists. Text from a run is set by textContent, never innerHTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // Charts

  const charts = [];

  class Chart extends Plot {
    constructor(place) {
      super(data.figures[place.dataset.figure]);
      this.area = place.querySelector(".chart");
      this.legend = place.querySelector(".legend");
      this.remark = make("p", { className: "remarks" });
      this.area.after(this.remark);
      this.drawn = 0; // the width at the last drawing
      this.fillControls(place.querySelector(".controls"));
      this.fillLegend();
    }

    has(x) {
      return this.figure.lines.some((line) => line.panels.some((p) => p && p[x] && p[x].at(-1) > 0));
    }

    fillControls(place) {
      const figure = this.figure;
      const axes = figure.kind === "curves" ? Object.keys(AXES).filter((x) => this.has(x)) : [];
      if (axes.length > 1) {
        const options = axes.map((x) => {
          const input = make("input", { type: "radio", name: `x-${figure.place}`, value: x });
          input.checked = x === this.x;
          input.addEventListener("change", () => this.set({ x }));
          return make("label", {}, input, x);
        });
        const legend = make("legend", { textContent: "x axis" });
        place.append(make("fieldset", { className: "switch x" }, legend, ...options));
      }
      const log = make("button", { type: "button", className: "state log", textContent: "log y" });
      log.setAttribute("aria-pressed", this.log);
      log.addEventListener("click", () => {
        this.set({ log: !this.log });
        log.setAttribute("aria-pressed", this.log);
      });
      const saves = ["svg", "png"].map((format) => {
        const button = make("button", { type: "button", textContent: format.toUpperCase() });
        button.className = format;
        button.title = `Save the figure as ${format.toUpperCase()}`;
        button.addEventListener("click", () => this.save(format));
        return button;
      });
      place.append(log, make("span", { className: "save" }, ...saves));
    }

    fillLegend() {
      this.legend.replaceChildren();
      this.figure.lines.forEach((line, k) => {
        const button = make("button", { type: "button" }, sample(line), line.name);
        button.setAttribute("aria-pressed", !this.hidden.has(k));
        button.addEventListener("click", () => {
          this.hidden.has(k) ? this.hidden.delete(k) : this.hidden.add(k);
          button.setAttribute("aria-pressed", !this.hidden.has(k));
          this.draw();
        });
        this.legend.append(button);
      });
    }

    set(change) {
      Object.assign(this, change);
      this.draw();
    }

    tell() {
      const missing = this.figure.kind === "curves" && this.x !== "rounds"
        ? this.figure.lines.filter((line) => !line.panels.some((_, p) => this.isOn(line, p))) : [];
      const names = missing.map((line) => line.name).join(", ");
      this.remark.textContent = names && `Not shown, as no ${this.x} are counted: ${names}`;
    }

    async draw(width = this.area.clientWidth) {
      const { traces, layout } = this.plot(width, isDark(), false);
      this.drawn = width;
      this.tell();
      await Plotly.react(this.area, traces, layout, {
        displayModeBar: false, displaylogo: false, showLink: false, plotlyServerURL: "",
        scrollZoom: false, responsive: false,
      });
      this.area.style.minHeight = "0";
    }

    async save(format) {
      const { traces, layout } = this.plot(1000, false, true);
      for (const trace of traces) if (trace.visible !== true) trace.showlegend = false;
      layout.title = undefined;
      const url = await Plotly.toImage({ data: traces, layout }, {
        format, width: layout.width, height: layout.height, scale: format === "png" ? 2 : 1,
      });
      const [head, body] = [url.slice(0, url.indexOf(",")), url.slice(url.indexOf(",") + 1)];
      const content = head.endsWith("base64")
        ? Uint8Array.from(atob(body), (c) => c.charCodeAt(0)) : decodeURIComponent(body);
      const type = format === "svg" ? "image/svg+xml" : "image/png";
      save(content, type, `${fileName(this.figure.label || this.figure.title)}.${format}`);
    }
  }

  // Charts are drawn when scrolled near, and again when their width changes.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((c) => c.area === entry.target);
      if (entry.isIntersecting && !chart.drawn) chart.draw();
    }
  }, { rootMargin: "600px" });
  const sizes = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((c) => c.area === entry.target);
      if (!printing && chart.drawn && chart.drawn !== chart.area.clientWidth) {
        requestAnimationFrame(() => chart.draw());
      }
    }
  });
  for (const place of document.querySelectorAll("[data-figure]")) {
    const chart = new Chart(place);
    charts.push(chart);
    near.observe(chart.area);
    sizes.observe(chart.area);
  }

  // Light and dark

  const themed = onTheme(() => {
    for (const chart of charts) {
      chart.fillLegend();
      if (chart.drawn) chart.draw();
    }
  });

  // For printing, draw everything in light colors and open the evidence.
  let opened = [];
  addEventListener("beforeprint", () => {
    printing = true;
    opened = [...document.querySelectorAll(".verdicts details:not([open])")];
    for (const details of opened) details.open = true;
    for (const chart of charts) {
      chart.fillLegend();
      chart.draw(680);
    }
  });
  addEventListener("afterprint", () => {
    printing = false;
    for (const details of opened) details.open = false;
    themed();
  });

  // The list of runs, filled when it is opened

  const list = document.getElementById("all-runs");
  list.addEventListener("toggle", () => {
    if (!list.open || list.children.length > 1) return;
    for (const run of data.runs) {
      const status = make("span", { className: "status", textContent: run.status });
      const details = make("details", {}, make("summary", {}, run.name, status));
      details.addEventListener("toggle", () => {
        if (!details.open || details.children.length > 1) return;
        details.append(
          make("pre", { className: "command", textContent: run.command }),
          make("pre", { className: "config", textContent: run.config }),
        );
      });
      list.append(details);
    }
  });

  // Saving

  const fileName = (text) => text.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|-+$/g, "").slice(0, 80) || "figure";
  function save(content, type, name) {
    const url = URL.createObjectURL(new Blob([content], { type }));
    const link = make("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }
  document.getElementById("json").addEventListener("click", () =>
    save(JSON.stringify(data), "application/json", `${fileName(data.title)}.json`));
  document.getElementById("csv").addEventListener("click", () => {
    const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))];
    const cell = (v) => {
      const text = v === null || v === undefined ? "" : String(v);
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const rows = [["run", "status", "algorithm", "seed", ...keys]];
    for (const run of data.runs) {
      (run.metrics.round || []).forEach((_, i) => rows.push(
        [run.name, run.status, run.algorithm, run.seed, ...keys.map((k) => run.metrics[k]?.[i])]));
    }
    save(rows.map((row) => row.map(cell).join(",") + "\r\n").join(""), "text/csv", `${fileName(data.title)}.csv`);
  });
})();
