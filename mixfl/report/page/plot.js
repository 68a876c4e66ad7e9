"use strict";
// A figure as Plotly's traces and layout. Plotly interprets tags and entities in text, so all text
// is escaped.

const plain = (text) =>
  String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const short = (v) =>
  Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));
const faded = (color, alpha) =>
  `rgba(${[1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16)).join(",")},${alpha})`;
const note = (text, x, y, more) =>
  ({ text, x, y, xref: "paper", yref: "paper", showarrow: false, ...more });
const touch = matchMedia("(pointer: coarse)");

const AXES = {
  rounds: { title: "round" },
  bytes: { title: "bytes to and from a client", tickformat: "~s", ticksuffix: "B" },
  seconds: { title: "seconds of training", tickformat: "~s", ticksuffix: "s" },
};

class Plot {
  constructor(figure) {
    this.figure = figure;
    this.x = "rounds";
    this.log = figure.log;
    this.hidden = new Set(); // indices of lines
  }

  // A line without bytes (or seconds), or with unknown ones, can't be drawn on that axis.
  isOn(line, p) {
    const panel = line.panels[p];
    return panel && panel[this.x] && (this.x === "rounds" || panel[this.x].at(-1) > 0);
  }

  columns(width) {
    const panels = this.figure.panels.length;
    return width < 560 ? 1 : width >= 900 && panels % 3 === 0 ? 3 : Math.min(2, panels);
  }

  plot(width, dark, saved) {
    const figure = this.figure;
    const columns = this.columns(width);
    const rows = Math.ceil(figure.panels.length / columns);
    const margin = { l: 60, r: 14, t: 34, b: 48 };
    const tall = saved || columns > 1 ? 250 : Math.min(290, Math.max(210, width * 0.6));
    const between = margin.t + margin.b;
    const legend = saved ? 24 * Math.ceil(figure.lines.length / 3) + 20 : 0;
    const height = rows * (tall + between) + legend;
    const inner = width - margin.l - margin.r;
    const gap = (margin.l + margin.r) / inner;
    const wide = (1 - gap * (columns - 1)) / columns;
    const high = height - between - legend;
    const text = dark ? "#a0a8b4" : "#5b6470";
    const lines = { gridcolor: dark ? "#2a303a" : "#e9ecf0", linecolor: dark ? "#4a5260" : "#b9c0ca" };
    const layout = {
      width, height, margin: { ...margin, b: margin.b + legend }, showlegend: saved,
      paper_bgcolor: saved ? "#fff" : "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: text },
      hovermode: figure.kind === "curves" && this.x === "rounds" ? "x unified" : "closest",
      hoverlabel: {
        bgcolor: dark ? "#1c2027" : "#fff", bordercolor: dark ? "#4a5260" : "#cfd5dd",
        font: { color: dark ? "#e4e7ec" : "#1c2128", size: 12 }, namelength: -1,
      },
      dragmode: touch.matches ? false : "zoom",
      legend: {
        orientation: "h", x: 0, y: -(margin.b + 4) / high, yanchor: "top", font: { size: 12 },
        itemclick: false, itemdoubleclick: false,
      },
      annotations: [],
    };
    const traces = [];
    figure.panels.forEach((panel, p) => {
      const id = p ? String(p + 1) : "";
      const left = (p % columns) * (wide + gap);
      const top = 1 - (Math.floor(p / columns) * (tall + between)) / high;
      const shared = {
        zeroline: false, showline: true, ticks: "outside", ticklen: 4, automargin: false,
        fixedrange: touch.matches, tickcolor: lines.linecolor, ...lines,
      };
      const x = layout["xaxis" + id] = {
        ...shared, domain: [left, Math.min(1, left + wide)], anchor: "y" + id, showgrid: false,
      };
      const y = layout["yaxis" + id] = {
        ...shared, domain: [Math.max(0, top - tall / high), top], anchor: "x" + id,
        showline: false, ticks: "", type: this.log ? "log" : "linear", nticks: 6,
      };
      const values = figure.kind === "curves"
        ? this.curves(p, id, x, dark, traces) : this.sweep(x, dark, traces, layout);
      layout.annotations.push(note(plain(panel.title), left, top, {
        xanchor: "left", yanchor: "bottom", yshift: 8, font: { size: 13, color: dark ? "#e4e7ec" : "#1c2128" },
      }));
      this.range(y, values, panel);
      if (panel.cap && !this.log && y.range?.[1] === panel.cap) {
        layout.annotations.push(note(plain(panel.words), left + wide, top, {
          xanchor: "right", yanchor: "top", font: { size: 11, color: text },
        }));
      }
    });
    return { traces, layout };
  }

  // Adds the lines and bands of a panel; returns the visible values.
  curves(p, id, axis, dark, traces) {
    const { title, tickformat, ticksuffix } = AXES[this.x];
    Object.assign(axis, { title: { text: title, standoff: 8 }, type: "linear", rangemode: "tozero" });
    if (tickformat) Object.assign(axis, { tickformat, ticksuffix });
    const seen = [];
    this.figure.lines.forEach((line, k) => {
      if (!this.isOn(line, p)) return;
      const panel = line.panels[p];
      const x = panel[this.x];
      const color = dark ? line.dark : line.light;
      const visible = this.hidden.has(k) ? "legendonly" : true;
      const name = plain(line.name);
      const on = { xaxis: "x" + id, yaxis: "y" + id, visible, legendgroup: String(k), meta: k };
      if (panel.low) {
        const lowest = Math.min(...panel.mean.filter((v) => v > 0)) / 1e3;
        const low = this.log ? panel.low.map((v) => (v > 0 ? v : lowest)) : panel.low;
        traces.unshift({
          ...on, type: "scatter", mode: "lines", name: name + " 95 %", showlegend: false,
          x: [...x, ...[...x].reverse()], y: [...panel.high, ...[...low].reverse()],
          fill: "toself", fillcolor: faded(color, dark ? 0.22 : 0.15), line: { width: 0 },
          hoverinfo: "skip",
        });
      }
      traces.push({
        ...on, type: "scatter", name, x, y: panel.mean, showlegend: p === 0,
        mode: line.marker || x.length < 2 ? "lines+markers" : "lines",
        line: { color: color, width: 2, dash: line.dash },
        marker: {
          symbol: line.marker || "circle", size: 7, color: color,
          maxdisplayed: 8,
        },
        text: panel.mean.map((v, i) =>
          short(v) + (panel.low ? ` (${short(panel.low[i])} to ${short(panel.high[i])})` : "")),
        hovertemplate: "%{text}",
      });
      if (visible === true) seen.push([panel.mean, panel.low, panel.high]);
    });
    return seen;
  }

  sweep(axis, dark, traces, layout) {
    const figure = this.figure;
    const all = figure.lines.flatMap((line) => line.points.map((q) => q[0]));
    const scale = figure.log_x ? Math.log10 : Number;
    const ends = [scale(Math.min(...all)), scale(Math.max(...all))];
    const pad = 0.06 * (ends[1] - ends[0]) || 0.5;
    Object.assign(axis, {
      title: { text: plain(figure.x), standoff: 8 }, type: figure.log_x ? "log" : "linear",
      range: [ends[0] - pad, ends[1] + pad],
    });
    const ticks = [...new Set(all)].sort((a, b) => a - b);
    if (ticks.length < 9) Object.assign(axis, { tickvals: ticks, ticktext: ticks.map(String) });
    const seen = [];
    figure.lines.forEach((line, k) => {
      const color = dark ? line.dark : line.light;
      const visible = this.hidden.has(k) ? "legendonly" : true;
      const kept = line.points.filter((q) => q[1] !== null);
      const [x, y, low, high] = [0, 1, 2, 3].map((i) => kept.map((q) => q[i]));
      traces.push({
        type: "scatter", mode: "lines+markers", name: plain(line.name), x, y, visible, meta: k,
        line: { color: color, width: 2, dash: line.dash },
        marker: { symbol: line.marker || "circle", size: 8, color: color },
        error_y: {
          type: "data", symmetric: false, thickness: 1.3, width: 4, color: color,
          array: high.map((h, i) => (h === null ? 0 : h - y[i])),
          arrayminus: low.map((l, i) => (l === null ? 0 : y[i] - l)),
        },
        text: kept.map(([, v, l, h, words]) => short(v) +
          (l === null ? "" : ` (${short(l)} to ${short(h)})`) + (words ? "<br>" + plain(words) : "")),
        hovertemplate: `${plain(figure.x).replace(/%/g, "&#37;")} = %{x}<br>%{text}`,
      });
      if (visible !== true) return;
      seen.push([y, low.filter((v) => v !== null), high.filter((v) => v !== null)]);
      for (const [at, value, , , words] of line.points) {
        if (value !== null) continue;
        layout.annotations.push({
          x: scale(at), xref: "x", y: 1, yref: "paper", yanchor: "top", yshift: -13 * k,
          text: "✕", showarrow: false, font: { color: color, size: 13 }, captureevents: true,
          hovertext: plain(`${line.name}: ${words || "diverged"}`),
        });
      }
    });
    return seen;
  }

  // Whether the marks at the top need room.
  diverged() {
    return this.figure.kind === "sweep" &&
      this.figure.lines.some((line) => line.points.some((q) => q[1] === null));
  }

  range(axis, seen, panel) {
    const flat = seen.flatMap((columns) => columns.flatMap((column) => column || []));
    const means = seen.flatMap((columns) => columns[0]);
    if (!flat.length) return;
    if (this.log) {
      const positive = flat.filter((v) => v > 0);
      // A band that reaches 0 would take up the whole axis.
      const floor = Math.min(...means.filter((v) => v > 0)) / 10;
      if (!positive.length) return;
      const low = Math.log10(Math.max(Math.min(...positive), floor));
      const high = Math.log10(Math.max(...positive));
      const pad = 0.05 * (high - low) || 0.1;
      axis.range = [low - pad, high + pad];
      const ticks = logTicks(axis.range);
      if (ticks.length) Object.assign(axis, { tickvals: ticks, ticktext: ticks.map(short) });
    } else if (panel.cap && Math.max(...means) > panel.cap) {
      axis.range = [0, panel.cap];
    } else {
      const [low, high] = [Math.min(...flat), Math.max(...flat)];
      const pad = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
      axis.range = [low - pad, high + pad];
    }
    if (this.diverged()) axis.range[1] += 0.12 * (axis.range[1] - axis.range[0]);
  }
}

// Round numbers in a range of logarithms, as many as stay readable.
function logTicks([low, high]) {
  let readable = [];
  for (const digits of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
    const ticks = [];
    for (let k = Math.floor(low); k <= high; k++) {
      for (const d of digits) ticks.push(+(d * 10 ** k).toPrecision(2));
    }
    const inside = ticks.filter((v) => Math.log10(v) >= low && Math.log10(v) <= high);
    if (inside.length > 7) break;
    readable = inside;
  }
  return readable.length > 1 ? readable : [];
}
