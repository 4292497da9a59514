// The dashboard of `t3c serve`. It asks /v1/live once a second and shows what it is told.

import { text, line, ticks, drawPareto, drawLive, showTiles, liveTable, drawDrift } from "./charts.js";
import { STEPS, LIMITS, state, $, known, clock, figure, withUnit, percent, el, write, list, ask,
  running, quantile, scaleOf, trialBudget, words, trialWords, query, beginnings } from "./kit.js";

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
    none: "Limit", latency: `Latency (${quantile()})`, size: "Size", drift: "Drift", drop: "Loss",
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
