// Charts: SVG drawn from what /v1/profiles and /v1/live say, each with a table beside it.

import { SECONDS, QUANTILES, state, $, known, clock, figure, withUnit, count, percent, svg,
  write, table, running, quantile, latencyOf, trialBudget, words } from "./kit.js";

// ---- Charts ---------------------------------------------------------------------------------

const linear = (a, b, from, to) => (value) => from + ((value - a) / (b - a || 1)) * (to - from);
export const text = (x, y, kind, content) => svg("text", { x, y, class: kind }, content);
export const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });

/** About `wanted` round values from low to high. */
export function ticks(low, high, wanted) {
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

export function drawPareto() {
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
    ["profile", `${q} ms`, "epsilon", "mean drift", "quality", "drop", "MB", "mJ"],
    all.map((p) => [p.name + (p.name === active ? " (serves now)" : p.refused ? " (refused)" : ""),
      figure(p.latency_ms?.[q]), figure(p.epsilon), figure(p.mean_drift),
      known(p.quality) ? `${p.metric} ${figure(p.quality, 4)}` : "–", figure(p.drop), figure(p.size_mb), figure(p.energy_mj)]));
}

// ---- Live -----------------------------------------------------------------------------------

export function drawLive() {
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

export function showTiles({ latency_ms: ms, load, totals }) {
  for (const q of QUANTILES) write(`tile-${q}`, figure(ms?.[q]));
  write("tile-rps", figure(load?.requests_per_s));
  write("tile-utilization", percent(load?.utilization));
  write("tile-waiting", count(load?.waiting));
  for (const name of ["answered", "refused", "late", "errors"]) write(`tile-${name}`, count(totals?.[name]));
}

/** As it is when it is opened: a table that moves every second cannot be read. */
export function liveTable() {
  if (!$("live-details").open || !state.live) return;
  table("live-table", `As of ${clock(1000 * state.live.now)}; close and open to read it anew`,
    ["time", "profile", "requests", "refused", "late", ...QUANTILES.map((q) => `${q} ms`)],
    [...(state.live.series ?? [])].reverse().map((s) => [clock(1000 * s.t), s.profile ?? "–",
      count(s.requests), count(s.refused), count(s.late), ...QUANTILES.map((q) => figure(s[q]))]));
}

// ---- Drift ----------------------------------------------------------------------------------

export function drawDrift() {
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
