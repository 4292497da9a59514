// The dashboard of `t3c serve`. It asks /v1/live once a second and draws what it is told.
// Any figure may be null. Text of the server only ever becomes text nodes, never markup.

const STEPS = 200; // of the slider
const SECONDS = 120; // of the live chart
const QUANTILES = ["p50", "p90", "p99"];
const LIMITS = {
  // A server may add to measured times how far they moved while measured; so do our tick marks.
  latency: { key: "latency_ms", unit: " ms", figure: (p) => latencyOf(p) * (1 + (p.guard ?? 0)) },
  size: { key: "size_mb", unit: " MB", figure: (p) => p.size_mb },
  drift: { key: "drift", unit: "", figure: (p) => p.epsilon },
};

const state = {
  token: null, about: null, version: null, live: null, // about: /v1/profiles
  kind: "none", chosen: null, // what the slider limits, and the profile that serves it
  standing: null, touched: 0, // the budget last seen standing; when the slider was last moved
  exact: null, // the standing limit, where the slider only stands at the step nearest to it
  unsent: false, asked: 0, queue: Promise.resolve(), // moves are settled one after the other
  picture: null, preview: null, inputs: null, pointer: null, seen: Date.now(),
};

// ---- Elements, words, the server ------------------------------------------------------------

const $ = (id) => document.getElementById(id);
const known = (value) => typeof value === "number" && Number.isFinite(value);
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const figure = (value, digits = 3) => (known(value) ? String(Number(value.toPrecision(digits))) : "–");
const withUnit = (value, unit) => (known(value) ? figure(value) + unit : "–");
const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");
const percent = (value) => (known(value) ? `${Number((100 * value).toFixed(1))}%` : "–");

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // strings become text nodes
  return node;
}
const el = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

/** Only what changed is written: a screen reader or a selection is not disturbed every second. */
function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function list(id, items, build = (item) => el("li", {}, item)) {
  const key = JSON.stringify(items);
  if ($(id).dataset.key === key) return;
  $(id).dataset.key = key;
  $(id).replaceChildren(...items.map(build));
}

function table(id, caption, head, rows) {
  list(id, [{ caption, head, rows }], () => el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map(([name, ...cells]) => el("tr", {},
      el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell)))))));
}

async function ask(path, { patience = 10, ...options } = {}) {
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

const running = () => (state.about?.profiles ?? []).filter((p) => !p.refused);
const quantile = () => state.live?.budget?.quantile ?? "p50";
const latencyOf = (p) => p.latency_ms?.[quantile()] ?? Infinity; // unknown is over any limit

/** The slider's scale for what is limited: step -> value and back; null where nothing is known. */
function scaleOf(kind) {
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
function trialBudget() {
  const budget = { latency_ms: null, size_mb: null, energy_mj: null, drift: null, quantile: quantile() };
  const scale = state.kind === "none" ? null : scaleOf(state.kind);
  if (scale) budget[LIMITS[state.kind].key] = state.exact ?? scale.value($("budget-slider").valueAsNumber);
  return budget;
}

function words(budget) {
  const parts = [
    known(budget?.latency_ms) && `${budget.quantile ?? "p50"} latency at most ${figure(budget.latency_ms, 4)} ms`,
    known(budget?.size_mb) && `size at most ${figure(budget.size_mb, 4)} MB`,
    known(budget?.energy_mj) && `energy at most ${figure(budget.energy_mj, 4)} mJ`,
    known(budget?.drift) && `drift at most ${figure(budget.drift, 4)}`,
  ];
  return parts.filter(Boolean).join(", ") || "no limit";
}

/** The server takes a question without limits for one about the standing budget. */
function trialWords() {
  const own = words(trialBudget());
  return own === "no limit" && !state.token ? "the standing budget" : own;
}

function query(budget) {
  const given = Object.entries(budget).filter(([, value]) => value !== null);
  // A quantile alone limits nothing.
  return new URLSearchParams(given.length > 1 ? given : []).toString();
}

/** Where profiles begin to serve along the slider, by the rule that the server chooses by. */
function beginnings(kind) {
  const { figure: of } = LIMITS[kind];
  const order = kind === "drift"
    ? running().sort((a, b) => latencyOf(a) - latencyOf(b)) // within a cap, the fastest
    : running().reverse(); // within a limit, the largest
  const first = (limit) => order.find((p) => known(of(p)) && of(p) <= limit);
  return order.filter((p) => known(of(p)) && first(of(p)) === p)
    .map((p) => ({ name: p.name, value: of(p) })).sort((a, b) => a.value - b.value);
}

// ---- The budget panel -----------------------------------------------------------------------

function sliderMoved() {
  state.touched = Date.now();
  state.unsent = true;
  state.exact = null;
  showSlider();
  clearTimeout(state.settling);
  state.settling = setTimeout(settle, 150);
}

function kindChosen(kind) {
  state.kind = kind;
  // Start where the profile chosen so far just fits: what is limited changes, the profile does not.
  const profile = running().find((p) => p.name === state.chosen) ?? running().at(-1);
  const scale = kind === "none" ? null : scaleOf(kind);
  const start = scale && LIMITS[kind].figure(profile);
  $("budget-slider").value = known(start) ? Math.ceil(scale.step(start)) : STEPS;
  sliderMoved();
}

function showSlider() {
  const { kind } = state, slider = $("budget-slider"), budget = trialBudget();
  const value = kind === "none" ? null : budget[LIMITS[kind].key];
  const text = known(value) ? `at most ${figure(value, 4)}${LIMITS[kind].unit}` : trialWords();
  document.querySelector(`input[name=limit][value=${kind}]`).checked = true;
  slider.disabled = !known(value);
  slider.setAttribute("aria-valuetext", text);
  write("budget-value", text);
  write("slider-label", {
    none: "Limit", latency: `Latency (${quantile()})`, size: "Size", drift: "Drift",
  }[kind]);
  write("try-budget", trialWords());
  showCurl();
  showTicks();
  drawPareto();
}

/** Names hang from the right to the left, so that no line of a tick runs through another's name. */
function showTicks() {
  const scale = state.kind === "none" ? null : scaleOf(state.kind), width = $("ticks").clientWidth;
  const begins = scale ? beginnings(state.kind) : [], free = []; // per row, where it is still free
  const placed = begins.toReversed().map(({ name, value }) => {
    const left = (scale.step(value) / STEPS) * width, room = 8 * name.length + 12;
    const flip = left + room > width + 20; // past the edge of the panel
    let row = free.findIndex((until) => (flip ? left : left + room) <= until);
    if (row < 0) row = free.length;
    free[row] = flip ? left - room : left;
    return { name, left, row, flip, on: name === state.chosen };
  });
  list("ticks", placed, ({ name, left, row, flip, on }) => {
    const tick = el("span", { class: `tick${flip ? " flip" : ""}${on ? " on" : ""}` }, name);
    tick.style.left = `${left}px`;
    tick.style.paddingTop = `${1.2 * row}rem`; // its line reaches up to the slider from any row
    return tick;
  });
  $("ticks").style.height = `${1.2 * Math.max(1, free.length) + 0.2}rem`;
  write("ticks-text", begins.map((b) => `${b.name} from ${figure(b.value)}${LIMITS[state.kind].unit}`).join(", "));
}

/** Ask what serves the slider's budget; if it was moved and there is a token, let it stand first. */
function settle() {
  const mine = ++state.asked;
  state.queue = state.queue.then(async () => {
    if (mine !== state.asked) return;
    const moved = state.unsent, budget = trialBudget();
    state.unsent = false;
    try {
      const refusal = moved && state.token ? await putBudget(budget) : "";
      const choice = await ask(`v1/certificate?${query(budget)}`);
      if (mine === state.asked) showChoice(choice);
      write("budget-error", refusal);
    } catch (error) {
      write("budget-error", error.message);
    }
    if (moved && $("try-again").checked && $("try-answer").hasChildNodes()) run();
  });
}

/** Make it the standing budget; returns why not, or nothing. */
async function putBudget(budget) {
  const headers = { Authorization: `Bearer ${state.token}`, "Content-Type": "application/json" };
  try {
    const put = await ask("v1/budget", { method: "PUT", headers, body: JSON.stringify(budget) });
    state.live.budget = put.budget ?? budget;
    state.standing = JSON.stringify(state.live.budget);
    showServing({ ...state.live, ...put });
    return "";
  } catch (error) {
    if (error.status === 401) keepToken(null);
    return error.message;
  }
}

function showChoice(choice) {
  const changed = choice.profile !== state.chosen, first = state.chosen === null;
  state.chosen = choice.profile ?? null;
  write("chosen-profile", choice.profile ?? "–");
  write("chosen-reason", choice.reason ?? "");
  write("guarantee", choice.guarantee ?? "");
  list("chosen-warnings", choice.warnings ?? []);
  if (changed && !first) {
    $("announce").textContent = `${choice.profile} ${state.token ? "serves" : "would serve"}: ${trialWords()}`;
    $("chosen-profile").classList.remove("changed");
    requestAnimationFrame(() => $("chosen-profile").classList.add("changed"));
  }
  showTicks();
  drawPareto();
}

/** The slider follows the standing budget: at first, and later if it holds the token. */
function followStanding() {
  const budget = state.live.budget ?? {}, key = JSON.stringify(budget);
  if (key === state.standing || Date.now() - state.touched < 3000) return;
  const first = state.standing === null;
  state.standing = key;
  if (!first && !state.token) return;
  state.kind = Object.keys(LIMITS).find((kind) => known(budget[LIMITS[kind].key]) && scaleOf(kind)) ?? "none";
  state.exact = budget[LIMITS[state.kind]?.key] ?? null;
  if (state.exact !== null) $("budget-slider").value = Math.round(scaleOf(state.kind).step(state.exact));
  showSlider();
  settle();
}

function keepToken(token) {
  state.token = token || null;
  if (state.token) sessionStorage.setItem("t3c-token", state.token);
  else sessionStorage.removeItem("t3c-token");
  $("token").value = "";
  $("token").placeholder = state.token ? "held for this tab" : "";
  $("token-forget").hidden = !state.token;
  write("budget-mode", state.token
    ? "Moving the slider replaces the standing budget, which serves the requests that name none."
    : "Without the admin token the slider asks what would serve, and sets the budget of “Try it”; " +
      "the standing budget stays as it is.");
  write("chosen-label", state.token ? "Serves this budget" : "Would serve this budget");
  if (state.about) showSlider();
}

/** The token comes in the fragment, which no server sees, and leaves the address bar at once. */
function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given !== null) history.replaceState(null, "", location.pathname + location.search);
  keepToken(given ?? state.token ?? sessionStorage.getItem("t3c-token"));
}

// ---- Charts ---------------------------------------------------------------------------------

const linear = (a, b, from, to) => (value) => from + ((value - a) / (b - a || 1)) * (to - from);
const text = (x, y, kind, content) => svg("text", { x, y, class: kind }, content);
const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });

/** About `wanted` round values from low to high. */
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough);
  const first = Math.ceil(low / step - 1e-9), n = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: n }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}

/** Sized in CSS pixels, so that letters stay as large on a phone. */
function canvas(id, height, label) {
  const root = $(id), width = Math.max(260, root.parentElement.clientWidth - 36);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("height", height);
  root.setAttribute("aria-label", label);
  root.replaceChildren();
  return { root, width };
}

function drawPareto() {
  const points = running().filter((p) => known(latencyOf(p)) && known(p.epsilon));
  const active = state.live?.profile, height = points.length ? 320 : 40, q = quantile();
  const facts = points.map((p) => `${p.name} ${figure(latencyOf(p))} ms and ${figure(p.epsilon)}`).join("; ");
  const { root, width } = canvas("pareto-chart", height, points.length
    ? `Certified drift against ${q} latency: ${facts}. ${active ?? "none"} serves now; ` +
      `standing budget: ${words(state.live?.budget)}.`
    : "No profile has both a latency and a certificate here.");
  paretoTable(q, active);
  root.nextElementSibling.hidden = !points.length; // the legend
  if (!points.length) return void root.append(text(0, 24, "soft", "Not measured or not certified on this device."));
  const left = 46, right = width - 12, top = 22, floor = height - 40;
  const times = points.map(latencyOf), low = 0.85 * Math.min(...times), high = 1.15 * Math.max(...times);
  const most = 1.18 * Math.max(...points.map((p) => p.epsilon), 1e-6);
  const x = linear(low, high, left, right), y = linear(0, most, floor, top);
  drawAxes(root, { x, y, left, right, floor, xs: ticks(low, high, width / 90), ys: ticks(0, most, 4) });
  root.append(text((left + right) / 2, height - 4, "soft mid", `${q} latency, ms`),
    text(0, 11, "soft", "certified drift, epsilon"));
  drawLimits(root, { x, y, left, right, top, floor, high, most });
  const spots = points.map((p) => ({ p, h: x(latencyOf(p)), v: y(p.epsilon) }));
  root.append(svg("polyline", { class: "chain", points: spots.map((s) => `${s.h},${s.v}`).join(" ") }));
  const taken = spots.map((s) => [s.h - 12, s.v - 8, s.h + 12, s.v + 8]);
  for (const { p, h, v } of spots) {
    if (p.name === state.chosen) root.append(svg("circle", { class: "ring", cx: h, cy: v, r: 12 }));
    const on = p.name === active;
    root.append(svg("circle", { class: on ? "mark active" : "mark", cx: h, cy: v, r: on ? 8 : 5 }));
    const [a, b] = freeSpot(p.name, h, v, taken, { left, right, top, floor });
    root.append(text(a, b, on ? "name strong" : "name", p.name));
  }
}

function drawAxes(root, { x, y, left, right, floor, xs, ys }) {
  for (const value of ys) {
    root.append(line(left, y(value), right, y(value), value ? "grid" : "axis"),
      text(left - 6, y(value) + 4, "soft end", figure(value)));
  }
  for (const value of xs) root.append(text(x(value), floor + 17, "soft mid", figure(value)));
}

/** The standing budget as the shaded side of its lines, the slider's as a dashed line. */
function drawLimits(root, { x, y, left, right, top, floor, high, most }) {
  const standing = state.live?.budget ?? {}, trial = trialBudget();
  const edge = known(standing.latency_ms) ? Math.min(right, Math.max(left, x(standing.latency_ms))) : right;
  const roof = known(standing.drift) ? y(Math.min(standing.drift, most)) : top;
  if (edge < right || roof > top) {
    root.append(svg("rect", { class: "allowed", x: left, y: roof, width: edge - left, height: floor - roof }));
    if (edge < right) root.append(line(edge, roof, edge, floor, "limit"));
    if (roof > top) root.append(line(left, roof, edge, roof, "limit"));
  }
  if (trial.latency_ms !== standing.latency_ms && trial.latency_ms <= high && known(trial.latency_ms)) {
    root.append(line(x(trial.latency_ms), top, x(trial.latency_ms), floor, "trial"));
  }
  if (trial.drift !== standing.drift && trial.drift <= most && known(trial.drift)) {
    root.append(line(left, y(trial.drift), right, y(trial.drift), "trial"));
  }
}

/** Where a name goes beside its mark: over no other mark or name, if there is such a place. */
function freeSpot(name, h, v, taken, { left, right, top, floor }) {
  const w = 8 * name.length, spots = [[14, -9], [14, 19], [-w - 14, -9], [-w - 14, 19], [16, 5],
    [-w - 16, 5], [-w / 2, -18], [-w / 2, 28], [24, -26], [24, 38], [-w - 24, -26], [-w - 24, 38]];
  const boxOf = ([dx, dy]) => [h + dx, v + dy - 12, h + dx + w, v + dy + 4];
  const free = (box) => box[0] >= left && box[2] <= right && box[1] >= top - 12 && box[3] <= floor &&
    !taken.some((t) => box[0] < t[2] && t[0] < box[2] && box[1] < t[3] && t[1] < box[3]);
  const spot = spots.find((s) => free(boxOf(s))) ?? spots[0];
  taken.push(boxOf(spot));
  return [h + spot[0], v + spot[1]];
}

function paretoTable(q, active) {
  const all = state.about?.profiles ?? [], out = all.filter((p) => p.refused);
  const size = state.live?.budget?.size_mb;
  write("pareto-note", [
    ...out.map((p) => `${p.name} does not run here: ${p.refused}.`),
    known(size) ? `The standing budget allows ${figure(size, 4)} MB: ` +
      `${running().filter((p) => p.size_mb <= size).map((p) => p.name).join(", ") || "no profile"}.` : "",
    state.about?.note ?? "",
  ].filter(Boolean).join(" "));
  table("pareto-table", "Profiles, the smallest first",
    ["profile", `${q} ms`, "epsilon", "mean drift", "MB", "mJ"],
    all.map((p) => [p.name + (p.name === active ? " (serves now)" : p.refused ? " (refused)" : ""),
      figure(p.latency_ms?.[q]), figure(p.epsilon), figure(p.mean_drift), figure(p.size_mb), figure(p.energy_mj)]));
}

// ---- Live -----------------------------------------------------------------------------------

function drawLive() {
  const { live, about } = state, series = live.series ?? [], names = (about?.profiles ?? []).map((p) => p.name);
  const top = 22, tall = 190, rail = top + tall + 34, pitch = 20, deep = pitch * Math.max(1, names.length - 1);
  const bars = rail + deep + 38, high = 46, floor = bars + high;
  const { root, width } = canvas("live-chart", floor + 22, liveFacts(live));
  const left = Math.max(44, ...names.map((name) => 7 * name.length + 14)), right = width - (width > 520 ? 92 : 38);
  const end = (series.at(-1)?.t ?? Math.floor(live.now ?? Date.now() / 1000)) + 1, x = linear(end - SECONDS, end, left, right);
  const frame = { root, series, x, left, right, roomy: width > 520 };
  for (const ago of width > 520 ? [120, 90, 60, 30, 0] : [120, 60, 0]) {
    root.append(line(x(end - ago), top, x(end - ago), floor, "grid"),
      text(x(end - ago), floor + 17, "soft mid", ago ? `−${ago} s` : "now"));
  }
  drawQuantiles(frame, top, top + tall, live.objective_ms);
  drawProfiles(frame, names, rail, rail + deep);
  drawRequests(frame, bars, floor);
  readSecond(frame, end, top, floor);
}

function liveFacts({ latency_ms: ms, load, profile, objective_ms: objective }) {
  return `Latency, profile and requests over the last two minutes. Now p50 ${withUnit(ms?.p50, " ms")}, ` +
    `p90 ${withUnit(ms?.p90, " ms")}, p99 ${withUnit(ms?.p99, " ms")}` +
    `${known(objective) ? `, objective ${figure(objective)} ms` : ""}; ` +
    `${figure(load?.requests_per_s)} requests a second, served by ${profile ?? "no profile"}.`;
}

function drawQuantiles({ root, series, x, left, right, roomy }, top, floor, objective) {
  const values = series.flatMap((s) => QUANTILES.map((q) => s[q])).filter(known);
  const most = 1.08 * Math.max(...values, known(objective) ? objective : 0, 1e-3);
  const y = linear(0, most, floor, top);
  drawAxes(root, { x, y, left, right, floor, xs: [], ys: ticks(0, most, 4) });
  root.append(text(0, 11, "soft", `latency, ms${known(objective) ? `; dashed: the objective, ${figure(objective)}` : ""}`));
  const labels = [];
  for (const q of [...QUANTILES].reverse()) {
    // A second without requests breaks the line; "h.1" leaves a dot where a second stands alone.
    const path = series.map((s, i) => (known(s[q])
      ? `${known(series[i - 1]?.[q]) ? "L" : "M"}${x(s.t + 0.5).toFixed(1)} ${y(s[q]).toFixed(1)}h.1` : "")).join("");
    root.append(svg("path", { class: q, d: path }));
    const last = series.findLast((s) => known(s[q]))?.[q];
    if (known(last)) labels.push({ q, v: y(last), content: roomy ? `${q} ${figure(last)}` : q });
  }
  if (known(objective)) root.append(line(left, y(objective), right, y(objective), "objective"));
  let above = -Infinity; // from the top down, pushed apart where they would touch
  for (const { q, v, content } of labels) {
    above = Math.max(v, above + 15);
    root.append(text(right + 6, above + 4, `name ${q}`, content));
  }
}

function drawProfiles({ root, series, x, left, right }, names, top, floor) {
  const y = linear(0, names.length - 1, floor, top), level = (s) => names.indexOf(s?.profile);
  root.append(text(0, top - 14, "soft", "profile"));
  names.forEach((name, i) => root.append(line(left, y(i), right, y(i), "grid"),
    text(left - 6, y(i) + 4, name === state.live.profile ? "end strong" : "soft end", name)));
  const path = series.filter((s) => level(s) >= 0).map((s, i, all) =>
    `${i && all[i - 1].t === s.t - 1 ? "L" : "M"}${x(s.t).toFixed(1)} ${y(level(s))}H${x(s.t + 1).toFixed(1)}`);
  root.append(svg("path", { class: "step", d: path.join("") }));
}

function drawRequests({ root, series, x, left, right, roomy }, top, floor) {
  const most = Math.max(1, ...series.map((s) => s.requests ?? 0)), y = linear(0, most, floor, top);
  const wide = Math.max(1, x(1) - x(0) - 1);
  root.append(text(0, top - 14, "soft", "requests/s; refused are hollow"), line(left, floor, right, floor, "axis"),
    text(left - 6, top + 6, "soft end", count(most)), text(left - 6, floor + 4, "soft end", "0"));
  const bar = (kind, t, from, to) => to > from && root.append(svg("rect",
    { class: kind, x: x(t), y: y(to), width: wide, height: y(from) - y(to) }));
  for (const { t, requests, refused } of series) {
    const served = (requests ?? 0) - (refused ?? 0); // requests are all that came
    bar("served", t, 0, served);
    bar("turned", t, served, requests ?? 0);
  }
  const last = series.at(-1);
  if (last && roomy) root.append(text(right + 6, floor - 2, "", `${count(last.requests)} /s`));
}

function readSecond({ root, series, x, left, right }, end, top, floor) {
  if (state.pointer === null) return write("live-readout", "Point at the chart to read one second of it.");
  const t = Math.floor(end - SECONDS + ((state.pointer - left) / (right - left)) * SECONDS);
  const s = series.find((second) => second.t === t);
  if (!s) return write("live-readout", "no figures for that second");
  root.append(line(x(t + 0.5), top, x(t + 0.5), floor, "cross"));
  write("live-readout", `${clock(1000 * t)}: ${s.profile ?? "no profile"}, ${count(s.requests ?? 0)} requests, ` +
    `${count(s.refused ?? 0)} refused, ${count(s.late ?? 0)} late; ` +
    QUANTILES.map((q) => `${q} ${withUnit(s[q], " ms")}`).join(", "));
}

function showTiles({ latency_ms: ms, load, totals }) {
  for (const q of QUANTILES) write(`tile-${q}`, figure(ms?.[q]));
  write("tile-rps", figure(load?.requests_per_s));
  write("tile-utilization", percent(load?.utilization));
  write("tile-waiting", count(load?.waiting));
  for (const name of ["answered", "refused", "late", "errors"]) write(`tile-${name}`, count(totals?.[name]));
}

/** As it is when it is opened: a table that moves every second cannot be read. */
function liveTable() {
  if (!$("live-details").open || !state.live) return;
  table("live-table", `As of ${clock(1000 * state.live.now)}; close and open to read it anew`,
    ["time", "profile", "requests", "refused", "late", ...QUANTILES.map((q) => `${q} ms`)],
    [...(state.live.series ?? [])].reverse().map((s) => [clock(1000 * s.t), s.profile ?? "–",
      count(s.requests), count(s.refused), count(s.late), ...QUANTILES.map((q) => figure(s[q]))]));
}

// ---- Drift, events, header ------------------------------------------------------------------

function drawDrift() {
  const rows = state.live.drift ?? [], pitch = 46;
  const seen = ({ epsilon, observed: o }, i) => (known(epsilon) ? "" : "not certified here; ") +
    (known(o?.mean) ? `seen ${figure(o.mean)}, largest ${figure(o.largest)} of ${count(o.rows)}`
      : i === rows.length - 1 ? "what the others are held against" : "not yet observed");
  const facts = rows.map((r, i) => `${r.profile}: epsilon ${figure(r.epsilon)}, mean ${figure(r.mean)}, ${seen(r, i)}`);
  const { root, width } = canvas("drift-chart", pitch * Math.max(1, rows.length), facts.join("; ") || "no drift known yet");
  const left = Math.max(44, ...rows.map((r) => 8 * r.profile.length + 12)), right = width - 60;
  const most = Math.max(...rows.flatMap((r) => [r.epsilon, r.mean, r.observed?.largest]).filter(known), 1e-6);
  const x = linear(0, most, left, right);
  rows.forEach((row, i) => {
    const v = pitch * i + 14, { epsilon, mean, observed: o } = row;
    root.append(text(0, v + 5, row.profile === state.live.profile ? "strong" : "", row.profile),
      line(left, v - 9, left, v + 9, "axis"), text(left + 2, v + 24, "soft", seen(row, i)));
    if (known(epsilon)) {
      root.append(svg("rect", { class: "bound-area", x: left, y: v - 7, width: x(epsilon) - left, height: 14 }),
        line(x(epsilon), v - 9, x(epsilon), v + 9, "bound"), text(x(epsilon) + 7, v + 5, "", figure(epsilon)));
    }
    if (known(mean)) root.append(svg("path", { class: "mean", d: `M${x(mean)} ${v - 7}l7 7l-7 7l-7 -7Z` }));
    if (known(o?.largest)) root.append(svg("path", { class: "seen", d: `M${x(o.mean)} ${v}H${x(o.largest)}m0 -4v8` }));
    if (known(o?.mean)) root.append(svg("circle", { class: "dot", cx: x(o.mean), cy: v, r: 4 }));
  });
  table("drift-table", "Drift relative to the norm of the output",
    ["profile", "epsilon", "mean when certified", "seen live, mean", "largest", "rows"],
    rows.map((r) => [r.profile, figure(r.epsilon), figure(r.mean),
      known(r.observed?.mean) ? figure(r.observed.mean) : "not yet observed",
      figure(r.observed?.largest), count(r.observed?.rows)]));
  const evidence = state.live.monitor?.evidence;
  $("evidence").hidden = !known(evidence);
  $("evidence").value = known(evidence) ? evidence : 0;
  write("evidence-text", known(evidence) ? `${figure(evidence, 2)} of 1` : "not watched");
}

function showEvents(events) {
  const today = new Date().toDateString();
  $("no-events").hidden = events.length > 0;
  list("events", events.slice(0, 100).map((e) => {
    const date = new Date(1000 * e.t), past = date.toDateString() !== today;
    const day = past ? `${date.toLocaleDateString("en-CA").slice(5)} ` : "";
    return { time: known(e.t) ? day + clock(date) : "–", kind: e.event ?? "", text: e.text ?? "" };
  }), (e) => el("li", {}, el("time", {}, e.time), el("b", {}, e.kind), el("span", {}, e.text)));
}

function showHeader({ model, version, state: now, objective_ms: objective, uptime_s: up }) {
  const device = state.about?.device ?? {}, threads = device.threads;
  document.title = `${model ?? "no model"} · T3C`;
  write("model", model ?? "no model");
  write("version", version ? String(version).slice(0, 12) : "–");
  $("version").title = version ?? "";
  write("device", [device.cpu, [device.engine, device.engine_version].filter(Boolean).join(" "),
    known(threads) && `${threads} thread${threads === 1 ? "" : "s"}`].filter(Boolean).join(", ") || "–");
  write("objective", known(objective) ? `${figure(objective)} ms` : "none");
  const minutes = Math.floor(up / 60);
  write("uptime", !known(up) ? "–" : up < 60 ? `${Math.floor(up)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`);
  showState(now ?? "starting");
}

function showState(name) {
  $("server-state").dataset.state = name;
  write("server-state", name === "silent" ? "no answer" : name);
}

function showServing(live) {
  write("active-profile", live.profile ?? "–");
  const back = live.steps > 0 ? `, held back ${live.steps} step${live.steps > 1 ? "s" : ""}` : "";
  write("active-reason", (live.reason ?? "") + back);
  write("standing-budget", words(live.budget));
  list("live-warnings", [...(live.pressures ?? []), ...(live.warnings ?? [])]);
  $("alarm").hidden = !live.alarm;
  write("alarm", live.alarm ? "Inputs are no longer like those of the certificate: its guarantee may not hold." : "");
}

// ---- Try it ---------------------------------------------------------------------------------

async function showTry({ takes, writes }) {
  const numbers = takes !== "image" && takes !== "text";
  $("try-image").hidden = takes !== "image";
  $("try-words").hidden = takes !== "text";
  $("try-length").hidden = !writes;
  $("try-form").hidden = numbers;
  $("try-numbers").hidden = $("try-curl").hidden = !numbers;
  state.inputs = numbers ? (await ask(modelUrl()).catch(() => ({}))).inputs ?? [{}] : null;
  showCurl();
}

const modelUrl = () => new URL(`v2/models/${encodeURIComponent(state.about.model)}`, location.href).href;

/** The request for a model that takes numbers, with zeros for them and the slider's budget. */
function showCurl() {
  if (!state.inputs) return;
  const inputs = state.inputs.map(({ name = "x", datatype = "FP32", shape = [1, 4] }) => {
    const sizes = shape.map((n) => (n > 0 ? n : 1)), total = sizes.reduce((a, b) => a * b, 1);
    return { name, datatype, shape: sizes, data: total > 32 ? [`… ${total} numbers`] : Array(total).fill(0) };
  });
  const parameters = Object.fromEntries(new URLSearchParams(query(trialBudget())));
  for (const name in parameters) if (name !== "quantile") parameters[name] = Number(parameters[name]);
  const body = JSON.stringify({ parameters, inputs });
  write("try-curl", `curl -s ${modelUrl()}/infer \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`);
}

function takePicture(file) {
  if (!file) return;
  URL.revokeObjectURL(state.preview);
  state.picture = file;
  state.preview = URL.createObjectURL(file);
  $("try-preview").src = state.preview;
  $("try-preview").hidden = false;
  // A picture of a few pixels, such as a digit, is shown enlarged and not smoothed.
  $("try-preview").onload = ({ target }) => target.classList.toggle("small", target.naturalWidth < 84);
}

/** The body and type of the request, or an error that says what is missing. */
function tryBody() {
  if (state.about?.takes === "image") {
    if (!state.picture) throw new Error("choose a picture first");
    return { body: state.picture, headers: { "Content-Type": state.picture.type || "image/png" } };
  }
  const asked = { text: $("try-text").value };
  if (!asked.text.trim()) throw new Error("write some text first");
  if (state.about?.writes) asked.tokens = $("try-tokens").valueAsNumber || 32;
  return { body: JSON.stringify(asked), headers: { "Content-Type": "application/json" } };
}

async function run() {
  if ($("try-run").getAttribute("aria-disabled") === "true") return;
  // Not `disabled`, which would take the focus away from who pressed it.
  $("try-run").setAttribute("aria-disabled", "true");
  try {
    showAnswer(await ask(`v1/try?${query(trialBudget())}`, { method: "POST", patience: 120, ...tryBody() }));
  } catch (error) {
    $("try-answer").replaceChildren(el("p", { class: "error" }, error.message));
    $("announce").textContent = error.message;
  }
  $("try-run").setAttribute("aria-disabled", "false");
}

function showAnswer(answer) {
  const answers = answer.answers ?? [], output = answer.output?.flat(Infinity) ?? [], parts = [];
  if (answers.length) parts.push(el("ol", { class: "answers" }, ...answers.map(answerBar)));
  if (answer.text) parts.push(el("p", { class: "written" }, answer.text));
  if (output.length) {
    const shown = output.slice(0, 12).map((value) => figure(value, 4)).join(", ");
    parts.push(el("p", { class: "written" }, shown + (output.length > 12 ? `, … ${output.length} numbers` : "")));
  }
  const by = `${answer.profile ?? "no profile"}, ${withUnit(answer.latency_ms, " ms")}`;
  parts.push(el("p", { class: "served-by" }, el("strong", {}, by), answer.reason ? `: ${answer.reason}` : ""),
    el("p", { class: "soft" }, answer.guarantee ?? ""),
    el("ul", { class: "warnings" }, ...(answer.warnings ?? []).map((warning) => el("li", {}, warning))));
  $("try-answer").replaceChildren(...parts);
  const best = answers[0] ? `${answers[0].class}, ${percent(answers[0].probability)}` : answer.text ?? "answered";
  $("announce").textContent = `${best}, from ${by}`;
}

function answerBar({ class: name, probability }) {
  const bar = el("div");
  bar.style.width = `${100 * (known(probability) ? probability : 0)}%`;
  return el("li", {}, el("span", {}, el("span", {}, String(name)), percent(probability)),
    el("div", { class: "bar", "aria-hidden": "true" }, bar));
}

// ---- The loop, and what the hands do --------------------------------------------------------

async function poll() {
  clearTimeout(state.timer);
  if (document.hidden || state.polling) return;
  state.polling = true;
  let live, fresh;
  try {
    live = await ask("v1/live", { patience: 5 });
    fresh = !state.about || live.version !== state.version;
    if (fresh) state.about = await ask("v1/profiles");
  } catch (error) {
    return showSilence(error);
  } finally {
    state.polling = false;
    state.timer = setTimeout(poll, 1000);
  }
  state.version = live.version;
  state.seen = Date.now();
  $("banner").hidden = true;
  show(live, fresh);
}

/** One text for one silence, so that it is read out once. */
function showSilence(error) {
  const since = `no answer from the server since ${clock(state.seen)}`;
  write("banner", error.status ? `no figures from the server since ${clock(state.seen)}: ${error.message}` : since);
  $("banner").hidden = false;
  showState("silent");
}

function show(live, fresh) {
  const moved = state.live && state.live.profile !== live.profile;
  state.live = live;
  if (fresh) showProfiles();
  showHeader(live);
  showServing(live);
  followStanding();
  if (moved || fresh) settle();
  drawPareto();
  drawLive();
  drawDrift();
  showTiles(live);
  showEvents(live.events ?? []);
}

function showProfiles() {
  for (const kind of Object.keys(LIMITS)) {
    document.querySelector(`input[name=limit][value=${kind}]`).disabled = !scaleOf(kind);
  }
  if (state.kind !== "none" && !scaleOf(state.kind)) state.kind = "none";
  showSlider();
  showTry(state.about);
}

function listen() {
  addEventListener("hashchange", () => location.hash.startsWith("#token=") && readToken());
  document.addEventListener("visibilitychange", poll);
  new ResizeObserver(() => state.live && (showSlider(), drawLive(), drawDrift())).observe(document.querySelector("main"));
  $("budget-slider").addEventListener("input", sliderMoved);
  document.querySelectorAll("input[name=limit]").forEach((radio) =>
    radio.addEventListener("change", () => kindChosen(radio.value)));
  $("admin").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!$("token").value) return;
    keepToken($("token").value);
    state.standing = null; // the slider goes to the standing budget before it can change it
    if (state.live) followStanding();
  });
  $("token-forget").addEventListener("click", () => { keepToken(null); $("token").focus(); });
  $("live-details").addEventListener("toggle", liveTable);
  $("live-chart").addEventListener("pointermove", (event) => {
    state.pointer = event.clientX - $("live-chart").getBoundingClientRect().left;
    if (state.live) drawLive();
  });
  $("live-chart").addEventListener("pointerleave", () => { state.pointer = null; if (state.live) drawLive(); });
  $("try-form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  $("try-file").addEventListener("change", () => takePicture($("try-file").files[0]));
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    $("try-image").addEventListener(name, (event) => {
      event.preventDefault();
      $("try-image").classList.toggle("over", name === "dragenter" || name === "dragover");
      if (name !== "drop") return;
      $("try-file").files = event.dataTransfer.files;
      takePicture(event.dataTransfer.files[0]);
    });
  }
}

readToken();
listen();
poll();
