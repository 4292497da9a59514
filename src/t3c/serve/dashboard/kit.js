// What the parts of the dashboard share: its state, elements, the server, budgets.
// Any figure may be null. Text of the server only ever becomes text nodes, never markup.

export const STEPS = 200; // of the slider
export const SECONDS = 120; // of the live chart
export const QUANTILES = ["p50", "p90", "p99"];
export const LIMITS = {
  // A server may add to measured times how far they moved while measured; so do our tick marks.
  latency: { key: "latency_ms", unit: " ms", figure: (p) => latencyOf(p) * (1 + (p.guard ?? 0)) },
  size: { key: "size_mb", unit: " MB", figure: (p) => p.size_mb },
  drift: { key: "drift", unit: "", figure: (p) => p.epsilon },
  // A profile that came out better than the original keeps a cap of 0, and none is lower.
  drop: { key: "max_drop", unit: "", figure: (p) => (known(p.drop) ? Math.max(0, p.drop) : null) },
};

export const state = {
  token: null, about: null, version: null, live: null, // about: /v1/profiles
  kind: "none", chosen: null, // what the slider limits, and the profile that serves it
  standing: null, touched: 0, // the budget last seen standing; when the slider was last moved
  exact: null, // the standing limit, where the slider only stands at the step nearest to it
  unsent: false, asked: 0, queue: Promise.resolve(), // moves are settled one after the other
  picture: null, preview: null, inputs: null, pointer: null, seen: Date.now(),
};

// ---- Elements, words, the server ------------------------------------------------------------

export const $ = (id) => document.getElementById(id);
export const known = (value) => typeof value === "number" && Number.isFinite(value);
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
export const figure = (value, digits = 3) => (known(value) ? String(Number(value.toPrecision(digits))) : "–");
export const withUnit = (value, unit) => (known(value) ? figure(value) + unit : "–");
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");
export const percent = (value) => (known(value) ? `${Number((100 * value).toFixed(1))}%` : "–");

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // strings become text nodes
  return node;
}
export const el = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

/** Only what changed is written: a screen reader or a selection is not disturbed every second. */
export function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

export function list(id, items, build = (item) => el("li", {}, item)) {
  const key = JSON.stringify(items);
  if ($(id).dataset.key === key) return;
  $(id).dataset.key = key;
  $(id).replaceChildren(...items.map(build));
}

export function table(id, caption, head, rows) {
  list(id, [{ caption, head, rows }], () => el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map(([name, ...cells]) => el("tr", {},
      el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell)))))));
}

export async function ask(path, { patience = 10, ...options } = {}) {
  const signal = AbortSignal.timeout(1000 * patience);
  const answer = await fetch(path, { cache: "no-store", signal, ...options }).catch(() => {
    throw new Error("no answer from the server");
  });
  const body = await answer.json().catch(() => null); // cut short, or not of this server
  if (answer.ok && body) return body;
  const error = new Error(body?.error ?? `the server answered ${answer.status}`);
  throw Object.assign(error, { status: answer.status });
}

// ---- Budgets --------------------------------------------------------------------------------

export const running = () => (state.about?.profiles ?? []).filter((p) => !p.refused);
export const quantile = () => state.live?.budget?.quantile ?? "p50";
export const latencyOf = (p) => p.latency_ms?.[quantile()] ?? Infinity; // unknown is over any limit

/** The slider's scale for what is limited: step -> value and back; null where nothing is known. */
export function scaleOf(kind) {
  const figures = running().map(LIMITS[kind].figure).filter((value) => known(value) && value > 0);
  if (!figures.length) return null;
  const low = 0.9 * Math.min(...figures), high = 1.1 * Math.max(...figures);
  const bend = high / low > 4 ? [Math.log, Math.exp] : [(v) => v, (v) => v];
  const [from, to] = [low, high].map(bend[0]);
  return {
    value: (step) => Number(bend[1](from + (step / STEPS) * (to - from)).toPrecision(4)),
    step: (value) => Math.min(STEPS, Math.max(0, (STEPS * (bend[0](value) - from)) / (to - from))),
  };
}

/** The budget the slider stands for, as the server takes it. */
export function trialBudget() {
  const budget = { latency_ms: null, size_mb: null, energy_mj: null, drift: null, max_drop: null,
    quantile: quantile() };
  const scale = state.kind === "none" ? null : scaleOf(state.kind);
  if (scale) budget[LIMITS[state.kind].key] = state.exact ?? scale.value($("budget-slider").valueAsNumber);
  return budget;
}

export function words(budget) {
  const parts = [
    known(budget?.latency_ms) && `${budget.quantile ?? "p50"} latency at most ${figure(budget.latency_ms, 4)} ms`,
    known(budget?.size_mb) && `size at most ${figure(budget.size_mb, 4)} MB`,
    known(budget?.energy_mj) && `energy at most ${figure(budget.energy_mj, 4)} mJ`,
    known(budget?.drift) && `drift at most ${figure(budget.drift, 4)}`,
    known(budget?.max_drop) && `measured loss at most ${figure(budget.max_drop, 4)}`,
  ];
  return parts.filter(Boolean).join(", ") || "no limit";
}

/** The server takes a question without limits for one about the standing budget. */
export function trialWords() {
  const own = words(trialBudget());
  return own === "no limit" && !state.token ? "the standing budget" : own;
}

export function query(budget) {
  const given = Object.entries(budget).filter(([, value]) => value !== null);
  // A quantile alone limits nothing.
  return new URLSearchParams(given.length > 1 ? given : []).toString();
}

/** Where profiles begin to serve along the slider, by the rule that the server chooses by. */
export function beginnings(kind) {
  const { figure: of } = LIMITS[kind];
  const capped = kind === "drift" || kind === "drop", largest = running().at(-1);
  const order = capped
    ? running().sort((a, b) => latencyOf(a) - latencyOf(b)) // within a cap, the fastest
      .filter((p) => kind === "drift" || latencyOf(p) <= latencyOf(largest)) // none slower for a loss
    : running().reverse(); // within a limit, the largest
  const first = (limit) => order.find((p) => known(of(p)) && of(p) <= limit);
  return order.filter((p) => known(of(p)) && first(of(p)) === p)
    .map((p) => ({ name: p.name, value: of(p) })).sort((a, b) => a.value - b.value);
}
