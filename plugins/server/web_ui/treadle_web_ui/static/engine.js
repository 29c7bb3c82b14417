// The engine while it runs: numbers, two minutes of curves, plugins and memory.

import { request } from "./api.js";
import { byId, element } from "./dom.js";
import { Metrics } from "./metrics.js";

const PERIOD = 1000; // milliseconds
const KEPT = 120; // samples
const SVG = "http://www.w3.org/2000/svg";
const history = [];
let plugins = [];
let timer = null;

export function watchEngine() {
  if (timer === null) update();
}

export function unwatchEngine() {
  clearTimeout(timer);
  timer = null;
}

async function update() {
  timer = setTimeout(() => (document.hidden ? (timer = null, resume()) : update()), PERIOD);
  try {
    const text = await (await request("metrics")).text();
    if (!plugins.length) plugins = (await (await request("plugins")).json()).data;
    history.push(new Metrics(text, performance.now()));
    if (history.length > KEPT) history.shift();
    draw();
  } catch (problem) {
    byId("engine-state").textContent = `No answer: ${problem.message}`;
  }
}

function resume() {
  document.addEventListener("visibilitychange", () => byId("engine").hidden || watchEngine(), { once: true });
}

function draw() {
  const now = history.at(-1);
  const before = history.at(-2) ?? now;
  const oldest = history[0];
  const isUp = now.value("engine_up") === 1;
  const model = now.all("engine_up")[0]?.labels.model_name ?? "";
  byId("engine-state").textContent = `${model}: the engine ${isUp ? "answers" : "does not answer"}.`;
  byId("cards").replaceChildren(...cards(now, before, oldest));
  byId("charts").replaceChildren(
    chart("Tokens a second", [
      ["generated", rates("generation_tokens_total")],
      ["prompt", rates("prompt_tokens_total")],
    ]),
    chart("Requests", [
      ["running", values("num_requests_running")],
      ["waiting", values("num_requests_waiting")],
    ]),
    chart("KV cache in use", [["%", values("kv_cache_usage_perc").map((share) => 100 * share)]], 100),
  );
  const rows = plugins.map((plugin) => pluginRow(plugin, now));
  const rank = ([, , state]) => ["broken", "loaded"].indexOf(state) + 1 || 3; // what is in use comes first
  drawTable("plugins", rows.sort((a, b) => rank(a) - rank(b)));
  drawTable("memory", now.all("process_resident_bytes").map(({ labels, value }) => [labels.process, bytes(value)]));
}

const values = (name) => history.map((sample) => sample.value(name));
const rates = (name) => history.slice(1).map((sample, i) => sample.rate(name, history[i]));

function cards(now, before, oldest) {
  const used = now.value("kv_cache_pages_used");
  const pages = now.value("kv_cache_pages");
  const queries = now.value("prefix_cache_queries_total");
  const hits = now.value("prefix_cache_hits_total");
  const successes = now.all("request_success_total");
  return [
    card("Running", whole(now.value("num_requests_running")), `${whole(now.value("num_requests_waiting"))} waiting`),
    card("Generated tokens/s", whole(now.rate("generation_tokens_total", before)), `${whole(now.value("generation_tokens_total"))} in all`),
    card("Prompt tokens/s", whole(now.rate("prompt_tokens_total", before)), `${whole(now.value("prompt_tokens_total"))} in all`),
    card("KV cache pages", `${whole(used)} of ${whole(pages)}`, element("meter", { max: pages || 1, value: used, "aria-label": "Pages in use" })),
    card("Prefix cache hits", queries ? `${((100 * hits) / queries).toFixed(1)} %` : "–", `${whole(hits)} of ${whole(queries)} tokens`),
    latency("Time to first token", "time_to_first_token_seconds", now, oldest),
    latency("Between tokens", "inter_token_latency_seconds", now, oldest),
    latency("Whole request", "e2e_request_latency_seconds", now, oldest),
    card("Finished", whole(now.value("request_success_total")), successes.filter(({ value }) => value).map(({ labels, value }) => `${labels.finished_reason} ${whole(value)}`).join(", ")),
    card("Preempted", whole(now.value("num_preemptions_total")), `${whole(now.value("engine_steps_total"))} steps`),
  ];
}

function card(name, value, more) {
  return element("div", { className: "card" },
    element("div", { className: "name" }, name),
    element("div", { className: "value" }, value),
    element("div", { className: "more" }, more));
}

function latency(title, name, now, oldest) {
  const [half, most] = [0.5, 0.95].map((share) => now.quantile(name, share, oldest));
  return card(title, time(half), half === null ? "" : `95 %: ${time(most)}`);
}

function chart(title, lines, limit) {
  const highest = limit ?? Math.max(1, ...lines.flatMap(([, points]) => points));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${KEPT} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  lines.forEach(([, points], i) => {
    const line = document.createElementNS(SVG, "polyline");
    const offset = KEPT - points.length;
    line.setAttribute("points", points.map((y, x) => `${x + offset},${(98 - (96 * y) / highest).toFixed(1)}`).join(" "));
    if (i) line.setAttribute("class", "second");
    svg.append(line);
  });
  const legend = lines.map(([name, points], i) =>
    element("span", { className: i ? "second" : "" }, ` ${name} ${whole(points.at(-1) ?? 0)}`));
  return element("div", { className: "chart" },
    element("span", { className: "name legend" }, ...legend),
    element("div", { className: "name" }, title),
    svg);
}

function pluginRow(plugin, now) {
  const name = plugin.id;
  const own = (sample) => sample.labels.plugin === name;
  const sum = (metric, test = () => true) =>
    now.all(metric).filter((sample) => own(sample) && test(sample)).reduce((total, { value }) => total + value, 0);
  const state = now.all("plugin_state").find((sample) => own(sample) && sample.value === 1)?.labels.state ?? plugin.state;
  const count = sum("plugin_seconds_count");
  const calls = sum("plugin_calls_total");
  const failed = sum("plugin_calls_total", ({ labels }) => labels.outcome === "error");
  const mean = count ? time(sum("plugin_seconds_sum") / count) : "";
  return [name, plugin.distribution, state, calls ? whole(calls) : "", mean, failed ? whole(failed) : ""];
}

function drawTable(id, rows) {
  const cells = (row) => row.map((text) => element("td", { className: text === "broken" ? "broken" : "" }, text ?? ""));
  byId(id).tBodies[0].replaceChildren(...rows.map((row) => element("tr", {}, ...cells(row))));
}

const whole = (value) => Math.round(value).toLocaleString("en");
const bytes = (value) => `${(value / 2 ** 20).toFixed(0)} MiB`;

function time(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}
