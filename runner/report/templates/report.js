"use strict";
(() => {
const byId = (id) => document.getElementById(id);
const list = byId("list"), served = document.body.dataset.served !== undefined;
const rows = [...document.querySelectorAll("details.e")];
const make = (name, kind, text) => { const made = document.createElement(name); if (kind) made.className = kind; if (text !== undefined) made.textContent = text; return made; };

// --- filters, in a page that holds all episodes; in the viewer, the server filters episodes
function filterInPage() {
  const cells = new Map(rows.map((row) => {
    // The shown figures are rounded; these figures are exact. "None" becomes NaN.
    const [reward, turns, sampled, seconds] = row.dataset.figures.split(" ").map(Number);
    const outcome = row.firstElementChild.children[1].textContent;
    return [row, { task: row.dataset.task, number: Number(row.dataset.number), outcome, reward, turns, sampled, seconds }];
  }));
  const texts = new Map();
  const textOf = (row) => { if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase()); return texts.get(row); };
  function apply() {
    const find = byId("find").value.toLowerCase(), outcome = byId("outcome").value, task = byId("task").value;
    const low = parseFloat(byId("low").value), high = parseFloat(byId("high").value);
    let shown = 0;
    for (const row of rows) {
      const its = cells.get(row);
      const keep = (!outcome || its.outcome === outcome) && (!task || its.task === task)
        && (Number.isNaN(low) || its.reward >= low) && (Number.isNaN(high) || its.reward <= high)
        && (!find || textOf(row).includes(find));
      row.hidden = !keep;
      shown += keep;
    }
    const sort = byId("sort").value, name = sort.replace("-", ""), sign = sort.startsWith("-") ? -1 : 1;
    const order = [...rows].sort((a, b) => {
      const x = cells.get(a), y = cells.get(b);
      if (name === "task") return x.task < y.task ? -1 : x.task > y.task ? 1 : x.number - y.number;
      if (!name) return x.number - y.number;
      const missing = Number.isNaN(x[name]) - Number.isNaN(y[name]);
      return missing || sign * (x[name] - y[name]) || x.number - y.number;
    });
    list.append(...order);
    list.classList.toggle("side", byId("side").checked);
    byId("shown").textContent = `${shown} of ${rows.length} shown`;
  }
  const form = byId("controls");
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("side").addEventListener("change", () => {
    if (byId("side").checked && byId("task").value) rows.forEach((row) => { if (!row.hidden) row.open = true; });
  });
  apply();
}
if (!served) filterInPage();

// --- keys: / finds, j and k go to the next and the previous episode
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "/" && byId("find")) { event.preventDefault(); byId("find").focus(); }
  if (event.key !== "j" && event.key !== "k") return;
  const other = !list && document.querySelector(`a[rel=${event.key === "j" ? "next" : "prev"}]`);
  if (other) { location.assign(other.href); return; }
  const visible = [...document.querySelectorAll("details.e")].filter((row) => !row.hidden);
  const at = visible.indexOf(event.target.closest && event.target.closest("details.e"));
  const next = visible[at < 0 ? 0 : at + (event.key === "j" ? 1 : -1)];
  if (next) { next.firstElementChild.focus(); next.scrollIntoView({ block: "nearest" }); }
});
function openTarget() {
  let name = location.hash.slice(1);
  try { name = decodeURIComponent(name); } catch { /* not encoded */ }
  const target = name && byId(name);
  if (target && target.tagName === "DETAILS") { target.hidden = false; target.open = true; target.scrollIntoView(); }
}
window.addEventListener("hashchange", openTarget);
openTarget();

// --- tokens
const unpacked = new Map();
function unpack(id) {
  if (!unpacked.has(id)) {
    const element = byId(id);
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(id, new Response(stream).json());
  }
  return unpacked.get(id);
}
const LEVELS = [-0.05, -0.3, -1, -2, -4];
const level = (logprob) => { const at = LEVELS.findIndex((limit) => logprob >= limit); return `p${at < 0 ? 5 : at}`; };
const MOST = 20000;
function visible(text) { return text.replace(/\n/g, "\u23ce\n"); }
// One object per id that the page has; `place` is its index in the segment.
function factsOf(segment, vocabulary) {
  const facts = [], versions = [...segment.versions], [before, missing] = segment.gap || [Infinity, 0];
  let sampled = 0;
  for (const [source, length] of segment.sources) {
    for (let end = facts.length + length; facts.length < end;) {
      const at = facts.length, id = segment.ids[at], place = at < before ? at : at + missing;
      const logprob = source === "sampled" || source === "retried" ? segment.logprobs[sampled++] : undefined;
      while (versions.length && versions[0][2] <= place) versions.shift();
      const version = versions.length && versions[0][1] <= place ? versions[0][0] : "";
      facts.push({ id, text: vocabulary[id], source, logprob, version, place });
    }
  }
  return facts;
}
function alternatives(segment, place, vocabulary) {
  for (const [start, [count, ids, logprobs]] of Object.entries(segment.top || {})) {
    const from = (place - Number(start)) * count, likely = [];
    if (from < 0 || from >= ids.length) continue;
    for (let each = from; each < from + count; each++) likely.push(`${JSON.stringify(vocabulary[ids[each]] ?? String(ids[each]))} ${logprobs[each] ?? "-inf"}`);
    return likely;
  }
  return [];
}
function segmentTokens(segment, vocabulary, about) {
  const box = make("div", "tokens"), whole = make("div");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Tokens; the arrow keys go from one to the next");
  const facts = factsOf(segment, vocabulary), starts = new Map(segment.turns.map((turn) => [turn[1], turn]));
  const turnOf = (place) => segment.turns.find((each) => each[1] <= place && place < each[2]);
  let first = 0, at = -1;
  const pages = make("p"), words = make("span", "dim");
  const earlier = make("button", "", "Earlier ids"), further = make("button", "", "Further ids");
  for (const [button, step] of [[earlier, -MOST], [further, MOST]]) {
    button.type = "button";
    button.addEventListener("click", () => draw(first + step));
  }
  pages.append(earlier, " ", further, " ", words);
  function draw(from) {
    first = from;
    const drawn = document.createDocumentFragment();
    for (let each = first; each < Math.min(facts.length, first + MOST); each++) {
      const { id, text, source, logprob, place } = facts[each], turn = starts.get(place);
      if (segment.gap && each === segment.gap[0]) {
        const within = turnOf(place);
        drawn.append(make("p", "warn", `${segment.gap[1]} ids are left out here.`));
        if (within && within[1] !== place) drawn.append(make("span", "chip", `turn ${within[0]} continues`));
      }
      if (turn) drawn.append(make("span", "chip", `turn ${turn[0]}${turn[3] ? ": " + turn[3] : ""}`));
      const shown = make("i", source + (typeof logprob === "number" ? " " + level(logprob) : ""), text === undefined ? ` ${id}` : visible(text) || "\u2205");
      shown.dataset.at = each;
      drawn.append(shown);
    }
    box.replaceChildren(drawn);
    box.scrollTop = 0;
    earlier.disabled = first === 0;
    further.disabled = first + MOST >= facts.length;
    words.textContent = `${first + 1} to ${Math.min(facts.length, first + MOST)} of ${facts.length} ids`;
  }
  draw(0);
  function show(next) {
    if (!(next >= 0 && next < facts.length)) return;
    if (next < first || next >= first + MOST) draw(next - next % MOST);
    box.querySelectorAll(".at").forEach((each) => each.classList.remove("at"));
    at = next;
    const it = facts[at], shown = box.querySelector(`i[data-at="${at}"]`);
    shown.classList.add("at");
    shown.scrollIntoView({ block: "nearest" });
    const parts = [`index ${it.place}`, `id ${it.id}`, it.text === undefined ? "" : JSON.stringify(it.text), `source ${it.source}`, `loss mask ${it.source === "sampled" ? 1 : 0}`];
    if (typeof it.logprob === "number") parts.push(`log-probability ${it.logprob}`, `probability ${Math.exp(it.logprob).toPrecision(3)}`);
    if (it.version) parts.push(`weights ${it.version}`);
    about.textContent = parts.filter(Boolean).join(" \u00b7 ");
    const likely = alternatives(segment, it.place, vocabulary);
    if (likely.length) about.append(make("br"), `instead: ${likely.join(", ")}`);
  }
  box.addEventListener("click", (event) => { if (event.target.dataset.at) show(Number(event.target.dataset.at)); });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (step) { event.preventDefault(); show(at < 0 ? 0 : at + step); }
  });
  whole.append(box, ...(facts.length > MOST ? [pages] : []));
  return whole;
}
async function fetched(address, form) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error((await answer.text()).replace(/<[^>]*>/g, " ").trim().slice(-300));
  return form === "json" ? answer.json() : answer.text();
}
async function tokensOf(row) {
  if (row.dataset.tokens) return fetched(row.dataset.tokens, "json");
  const [chunk, vocabulary] = await Promise.all([unpack(`tokens-${row.dataset.chunk}`), unpack("vocabulary")]);
  return { agents: chunk[Number(row.dataset.index)], vocabulary };
}
async function showTokens(row, place) {
  const { agents, vocabulary } = await tokensOf(row);
  const legend = make("p", "legend dim", "sampled ids by probability: ");
  ["above 95%", "74%", "37%", "14%", "2%", "less"].forEach((words, at) => legend.append(make("i", `p${at}`, words)));
  legend.append("; dim ids are prompt, underlined ones bridged, struck ones withdrawn");
  place.replaceChildren(legend);
  for (const [agent, segments] of agents) {
    if (!segments) { place.append(make("p", "warn", `${agent}: no ids.`)); continue; }
    segments.forEach((segment, number) => {
      place.append(make("h5", "", `${agent}, segment ${number}: ${segment.ids.length + (segment.gap ? segment.gap[1] : 0)} ids`));
      const about = make("p", "about");
      about.setAttribute("aria-live", "polite");
      place.append(segmentTokens(segment, vocabulary, about), about);
    });
  }
}
function addTokens(row) {
  const button = make("button", "show-tokens", "Tokens"), place = make("div");
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", async () => {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) { place.replaceChildren(); return; }
    try { await showTokens(row, place); } catch (error) { place.textContent = `The tokens cannot be shown here: ${error}`; }
  });
  row.firstElementChild.after(button, place);
}
async function opened(row) {
  if (!row.open || row.dataset.opened) return;
  row.dataset.opened = "yes";
  if (row.dataset.chunk !== undefined || row.dataset.tokens) addTokens(row);
  if (!row.dataset.body) return;
  const body = row.querySelector(".body");
  // The text in the answer is escaped like the text of the page, and the page's policy runs no scripts of the answer.
  try { body.innerHTML = await fetched(row.dataset.body); } catch (error) { body.textContent = `The episode cannot be shown: ${error}`; delete row.dataset.opened; }
}
function prepare(row) { row.addEventListener("toggle", () => opened(row)); opened(row); }
rows.forEach(prepare);

// --- the viewer: follow a run that is being played
const AGAIN_MILLISECONDS = 2000, SOON_MILLISECONDS = 1000;
let seen = document.body.dataset.served;
async function refreshOverview(version) {
  const box = byId("overview");
  box.innerHTML = await fetched("overview");
  box.dataset.version = version;
}
async function refreshList() {
  const made = document.createElement("template");
  made.innerHTML = await fetched(list.dataset.list);
  const old = new Map([...list.querySelectorAll("details.e")].map((row) => [row.id + row.firstElementChild.textContent, row]));
  const focused = document.activeElement;
  const next = [...made.content.querySelectorAll("details.e")].map((row) => {
    const kept = old.get(row.id + row.firstElementChild.textContent);
    if (!kept) prepare(row);
    return kept || row;
  });
  list.replaceChildren(...next);
  if (list.contains(focused)) focused.focus({ preventScroll: true });
  byId("shown").textContent = made.content.querySelector("#shown").textContent;
}
async function follow() {
  let wait = AGAIN_MILLISECONDS;
  try {
    if (!document.hidden) {
      const now = await fetched("status", "json");
      byId("state").textContent = now.words;
      if (now.seen !== seen) { await refreshList(); seen = now.seen; }
      if (String(now.version) !== byId("overview").dataset.version) await refreshOverview(now.version);
      wait = now.version ? 1000 * now.wait : SOON_MILLISECONDS;
      if (now.settled) return;
    }
  } catch { byId("state").textContent = "The viewer does not answer: it has ended, or the file cannot be read."; }
  setTimeout(follow, wait);
}
if (served && byId("overview")) {
  follow();
  document.querySelectorAll(".script").forEach((each) => { each.hidden = false; });
  byId("side").addEventListener("change", () => {
    list.classList.toggle("side", byId("side").checked);
    if (byId("side").checked && byId("task").value) list.querySelectorAll("details.e").forEach((row) => { row.open = true; });
  });
}
document.documentElement.dataset.ready = "yes";
})();
