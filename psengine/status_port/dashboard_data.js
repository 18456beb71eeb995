"use strict";
// Everything that comes from the server becomes text nodes or numbers, never markup.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const UNKNOWN = "–";
const NOT_FINITE = "nan";  // what the server calls a loss that JSON has no number for
// The server itself waits 3 s for a shard.
const REFRESH_MS = 1000, ANSWER_MS = 5000, SILENT_MS = 4500, GONE_S = 3600, CROWD = 16, SPAN_S = 1800;
const DASHES = ["", "6 3", "2 3"];

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
function write(element, text) { if (element.textContent !== text) element.textContent = text; }
function flag(element, name, value) { if (element.getAttribute(name) !== value) element.setAttribute(name, value); }

/** Make parent's children those of items, keeping elements by key: a selection or a focus survives. */
function sync(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.key, child]));
  items.forEach((item, place) => {
    const key = keyOf(item);
    let child = old.get(key);
    if (!child) { child = make(item); child.key = key; }
    old.delete(key);
    update(child, item);
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] || null);
  });
  for (const child of old.values()) child.remove();
}

// ---- words and numbers ----------------------------------------------------------------------------------------------
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const whole = (value) => isNumber(value) ? Math.round(value).toLocaleString("en") : UNKNOWN;
function number(value, digits = 3) {
  if (!isNumber(value)) return UNKNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}
const fixed = (value) => !isNumber(value) ? UNKNOWN : Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
const loss = (value) => value === NOT_FINITE ? NOT_FINITE : !isNumber(value) ? UNKNOWN : Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : value.toPrecision(4);
const milliseconds = (value) => !isNumber(value) ? UNKNOWN : value >= 10 ? (value).toFixed(1) + " s" : value * 1000 >= 100 ? Math.round(value * 1000) + " ms" : number(value * 1000, value * 1000 < 1 ? 2 : 3) + " ms";
function duration(seconds) {
  if (!isNumber(seconds)) return UNKNOWN;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min" + (s < 600 ? " " + s % 60 + " s" : "");
  if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min";
  return Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h";
}
function bytes(value) {
  if (!isNumber(value)) return UNKNOWN;
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return number(value / size) + " " + unit;
  return whole(value) + " B";
}
const clock = (unix, withSeconds) => new Date(unix * 1000).toLocaleTimeString("en-GB", withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });
const rankName = (rank) => "w" + rank;
const last = (values) => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; };
const list = (value) => Array.isArray(value) ? value : [];
const fields = (value) => value && typeof value === "object" ? value : {};
const mean = (values) => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;

// ---- what the server said ------------------------------------------------------------------------------------------
/** What each /status.json said since the page was opened; of counters, how fast they grew. */
class Track {
  constructor(length) { this.length = length; this.clear(); }
  clear() { this.times = []; this.series = new Map(); this.counts = new Map(); }
  get since() { return this.times.length ? this.times[this.times.length - 1] : 0; }
  static key(...parts) { return JSON.stringify(parts); }
  get(...parts) { return this.series.get(Track.key(...parts)) || this.times.map(() => null); }
  has(...parts) { const found = this.series.get(Track.key(...parts)); return !!found && last(found) !== null; }
  take(said) {
    const fresh = new Map(), counts = new Map(), seconds = said.unix_s - this.since;
    const grown = (count, ...parts) => {
      const key = Track.key(...parts), before = this.counts.get(key);
      counts.set(key, count);
      return count >= before ? count - before : null;
    };
    const rate = (value) => value === null ? null : value / seconds;
    for (const shard of list(said.shards)) for (const name of shard.error ? [] : ["bytes_in", "bytes_out"]) {
      // Payloads, also those in shared memory, of which the socket knows nothing.
      const moved = Object.values(fields(shard.jobs)).reduce((sum, job) => sum + job[name], 0);
      fresh.set(Track.key("shard", shard.index, name + "_per_s"), rate(grown(moved, "shard", shard.index, name)));
    }
    // Without a shard's part a job's counters are too small, and the next rates would be too large.
    for (const [name, job] of muteText(said) ? [] : Object.entries(fields(said.jobs))) {
      fresh.set(Track.key("job", name, "applied_per_s"), rate(grown(job.applied, name, "applied")));
      fresh.set(Track.key("job", name, "refused_per_s"), rate(grown(refusals(job).reduce((sum, [, count]) => sum + count, 0), name, "refused")));
      const pushes = grown(Object.values(fields(job.staleness)).reduce((sum, count) => sum + count, 0), name, "pushes"), age = grown(job.staleness_sum, name, "staleness");
      fresh.set(Track.key("job", name, "staleness_mean"), pushes > 0 && age !== null ? age / pushes : null);
      for (const worker of list(job.workers)) fresh.set(Track.key("worker", name, worker.rank, "loss"), isNumber(worker.loss) ? worker.loss : null);
    }
    for (const key of fresh.keys()) if (!this.series.has(key)) this.series.set(key, this.times.map(() => null));
    const extra = Math.max(0, this.times.length + 1 - this.length);
    for (const [key, values] of this.series) {
      const joined = values.concat([fresh.has(key) ? fresh.get(key) : null]).slice(extra);
      if (last(joined) === null && !fresh.has(key)) this.series.delete(key); else this.series.set(key, joined);
    }
    this.times = this.times.concat([said.unix_s]).slice(extra);
    this.counts = counts;
  }
}
const track = new Track(SPAN_S * 1000 / REFRESH_MS);
let paused = false, status = null, jobName = null, answeredAt = performance.now(), hasAnswered = false;

async function ask(path) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), ANSWER_MS);
  try {
    const response = await fetch(path, { signal: abort.signal, cache: "no-store" });
    return { code: response.status, content: await response.json() };
  } finally { clearTimeout(timer); }
}
async function refresh() {
  const answer = await ask("status.json");
  if (answer.code !== 200) return;
  const fresh = answer.content;
  // Another server, or its clock was set back.
  if ((status && status.epoch !== fresh.epoch) || fresh.unix_s <= track.since) track.clear();
  track.take(fresh);
  // A shard that does not answer takes its jobs along: what was last known of them stays, and the head says so.
  if (status && status.epoch === fresh.epoch && muteText(fresh)) fresh.jobs = { ...fields(status.jobs), ...fields(fresh.jobs) };
  status = fresh;
  answeredAt = performance.now();
  hasAnswered = true;
}
/** Which shards did not answer the server, in words, or "". */
function muteText(said) {
  const mute = list(said.shards).filter((shard) => shard.error).map((shard) => shard.index);
  return mute.length === 0 ? "" : mute.length === 1 ? "shard " + mute[0] + " does not answer" : "shards " + mute.join(", ") + " do not answer";
}
let isRefreshing = false;
async function turn() {
  if (!paused && !isRefreshing && !document.hidden) {
    isRefreshing = true;
    try { await refresh(); } catch (error) { /* the banner says so when it lasts */ } finally { isRefreshing = false; }
    if (!paused) show();
  }
  showHealth();
}
