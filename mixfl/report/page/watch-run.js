"use strict";
// How a run is shown in words: times, numbers, differences. Text is set by textContent only.

const STATES = ["starting", "running", "finished", "stopped", "died", "failed", "diverged"];
const SIGNS = {
  starting: "◌", running: "▶", finished: "✓", stopped: "■", died: "✕", failed: "✕", diverged: "↯",
};
// Keys that say how a run is computed, or that every run has of its own.
const APART = new Set(["version", "format", "algorithm_from", "devices", "cohort_chunk",
  "central_chunk", "checkpoint_every"]);
// Okabe and Ito's colors, on light and on dark.
const PALETTE = [["#0072B2", "#5aa9e6"], ["#D55E00", "#f08a4b"], ["#009E73", "#2cc59b"],
  ["#CC79A7", "#e394c1"], ["#8C6D1F", "#d9b34c"], ["#56B4E9", "#93d6ff"], ["#5E4FA2", "#a99bf0"],
  ["#7f7f7f", "#a3a3a3"]];
const DASHES = ["solid", "10px,4px", "2px,3px"];

const isLive = (run) => run.state === "running" || run.state === "starting";
const withoutPrefix = (metric) => metric.replace(/^eval\//, "");

function clock(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const [h, m] = [Math.floor(s / 3600), Math.floor(s / 60) % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

// `now`: the server's clock, in seconds.
function timeLeft(run, now) {
  if (run.state !== "running" || run.left == null) return "";
  return clock(run.left - (now - run.at));
}

function ago(seconds) {
  const s = Math.max(0, seconds);
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 129600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
}

const share = (run) => (run.rounds ? Math.min(1, (run.round + (run.share || 0)) / run.rounds) : 0);

function badge(run) {
  const words = run.stopping ? "stopping" : run.state;
  const sign = make("span", { textContent: SIGNS[run.state] || "?" });
  sign.setAttribute("aria-hidden", "true");
  return make("span", { className: `badge ${run.state}` }, sign, words);
}

// The keys in which configurations differ, in their order.
function differingKeys(configs) {
  const keys = new Set(configs.flatMap((c) => Object.keys(c)));
  return [...keys].filter((k) => !APART.has(k) && new Set(configs.map((c) => c[k])).size > 1);
}

const shortTask = (task) => (task || "").split("/").pop().replace(/^python:/, "");

// Where to cut a panel off, if a few lines go far beyond the others; null if none does.
function cutOff(named) {
  const lines = named.filter(([, values]) => values?.length);
  const tops = lines.map(([, values]) => Math.max(...values));
  const middle = [...tops].sort((a, b) => a - b)[Math.floor((tops.length - 1) / 2)];
  const beyond = lines.filter((_, i) => tops[i] > 20 * middle).map(([name]) => name);
  const below = lines.some(([, values]) => values.some((v) => v < 0));
  if (!beyond.length || !(middle > 0) || below) return { cap: null, words: "" };
  return { cap: 1.5 * middle, words: `beyond: ${beyond.slice(0, 3).join(", ")}${beyond.length > 3 ? ", ..." : ""}` };
}
