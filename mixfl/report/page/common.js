"use strict";
// What the pages share: making elements, light and dark, samples of lines.

const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
const isDark = () =>
  !printing && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

// The button that switches between light and dark. `redraw` is called after each switch.
function onTheme(redraw) {
  const theme = document.getElementById("theme");
  function themed() {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colors`);
    redraw();
  }
  const kept = (() => {
    try { return localStorage.getItem("mixfl-theme"); } catch { return null; }
  })();
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("mixfl-theme", root.dataset.theme); } catch { /* not kept */ }
    themed();
  });
  system.addEventListener("change", themed);
  themed();
  return themed;
}

// A sample of the line, for the legend.
function sample(line) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  for (const [k, v] of Object.entries({ width: 28, height: 10, "aria-hidden": "true" })) {
    svg.setAttribute(k, v);
  }
  const color = isDark() ? line.dark : line.light;
  const stroke = document.createElementNS(space, "line");
  const dash = line.dash === "solid" ? "none" : line.dash.replaceAll("px", "");
  const looks = { x1: 0, x2: 28, y1: 5, y2: 5, stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash };
  for (const [k, v] of Object.entries(looks)) stroke.setAttribute(k, v);
  svg.append(stroke);
  const shapes = {
    circle: "M10 5a4 4 0 1 0 8 0a4 4 0 1 0-8 0", square: "M10.5 1.5h7v7h-7z",
    diamond: "M14 0l5 5l-5 5l-5-5z", "triangle-up": "M14 0l5 9h-10z", "triangle-down": "M14 10l5-9h-10z",
  };
  if (line.marker in shapes) {
    const mark = document.createElementNS(space, "path");
    mark.setAttribute("d", shapes[line.marker]);
    mark.setAttribute("fill", color);
    svg.append(mark);
  }
  return svg;
}
