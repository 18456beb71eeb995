// ---- head ----------------------------------------------------------------------------------------------------------
function showHealth() {
  const silentMs = performance.now() - answeredAt;
  const isSilent = !paused && !document.hidden && silentMs > SILENT_MS;
  const banner = $("silence");
  banner.hidden = !isSilent;
  document.body.classList.toggle("stale", isSilent && hasAnswered);
  if (isSilent) {
    const shown = status && isNumber(status.unix_s) ? " What you see is from " + clock(status.unix_s, true) + "." : "";
    write(banner, "No answer from " + location.host + " since " + Math.floor(silentMs / 1000) + " s: the server ended, was stopped, or is overloaded." + shown);
  }
  const pill = $("health"), replica = fields(status && status.replica), isFollower = replica.role === "following";
  const [kind, text] = isSilent ? ["bad", "✕ no answer since " + Math.floor(silentMs / 1000) + " s"]
    : paused ? ["", "❚❚ paused"] : !status ? ["", "connecting"]
    : muteText(status) ? ["bad", "✕ " + muteText(status)] : list(status.logs).some((log) => log.is_full) ? ["bad", "✕ log full: nothing is acknowledged"] : replica.is_in_sync === false ? ["bad", "✕ follower not in sync"] : replica.why ? ["bad", "✕ " + replica.role + ": " + replica.why] : isFollower ? ["", "follows"] : lostJobs().length ? ["bad", "✕ lost: job " + lostJobs().join(", ")] : status.is_draining ? ["", "draining: no worker is let in"] : status.healthy ? ["good", "✓ serving"] : ["bad", "✕ a shard does not work"];
  flag(pill, "class", "pill " + kind);
  write(pill, text);
}
const lostJobs = () => Object.entries(fields(status.jobs)).filter(([, job]) => job.lost).map(([name]) => name);
function showFacts() {
  const snapshot = status.snapshot;
  const shards = list(status.shards).filter((shard) => isNumber(shard.memory_bytes));
  const sum = (field) => shards.reduce((total, shard) => total + shard[field], 0);
  const ownsWeights = Object.values(fields(status.jobs)).some((job) => fields(job.rule).name !== "average");
  const durable = !snapshot ? (ownsWeights ? "when this server ends, models are LOST (start it with --snapshot-dir)" : "nothing is kept here that a job would miss")
    : !isNumber(snapshot.generation) ? "no generation yet"
    : "generation " + snapshot.generation + (isNumber(snapshot.age_s) ? ", " + duration(snapshot.age_s) + " old" : ", from before this start");
  const failed = snapshot && snapshot.failures ? " (" + snapshot.failures + " failed: " + snapshot.last_error + ")" : "";
  const facts = [
    ["at", list(status.addresses).join("  ")],
    ["up", duration(status.uptime_s)],
    ["durability", (status.durability || UNKNOWN) + ": " + durable + failed],
    ["memory", shards.length ? bytes(sum("memory_bytes")) + " of " + bytes(sum("max_memory_bytes")) : UNKNOWN],
    ["process", (status.host ? status.host + ":" : "") + status.pid],
    ["version", String(status.software || UNKNOWN)],
  ];
  const logs = list(status.logs), room = logs.map((log) => log.free_bytes).filter(isNumber);
  const replica = status.replica;
  if (replica) facts.push([replica.role, "term " + whole(replica.term) + ", " + (replica.is_in_sync ? "in sync with " : "NOT in sync with ") + (list(replica.peers).join("  ") || "nobody") + (replica.lag_records ? ", " + whole(replica.lag_records) + " records behind" : "") + ", election " + replica.election]);
  if (logs.length) facts.push(["log", bytes(logs.reduce((total, log) => total + log.written_bytes, 0)) + " written, " + (room.length ? bytes(Math.min(...room)) : UNKNOWN) + " free"]);
  if (status.refused_connections) facts.push(["refused connections", whole(status.refused_connections)]);
  sync($("facts"), facts, (fact) => fact[0],
    (fact) => html("div", {}, html("dt", {}, fact[0]), html("dd", {})),
    (row, fact) => write(row.lastChild, fact[1]));
}
function showJobs(names) {
  if (!names.includes(jobName)) jobName = names.length ? names[0] : null;
  $("job-choice").hidden = names.length < 2;
  sync($("job"), names, (name) => name, (name) => { const option = html("option", {}, name); option.value = name; return option; }, () => {});
  if (jobName !== null && $("job").value !== jobName) $("job").value = jobName;
  document.title = jobName === null ? "psengine" : jobName + " · psengine";
}

// ---- tiles ---------------------------------------------------------------------------------------------------------
function showTiles(job) {
  const workers = list(job.workers), live = workers.filter((worker) => worker.state === "live");
  const losses = live.map((worker) => worker.loss).filter(isNumber), lost = diverged(job);
  const refused = refusals(job).reduce((sum, [, count]) => sum + count, 0);
  const across = (field) => {
    const columns = list(status.shards).map((shard) => track.get("shard", shard.index, field));
    return track.times.map((_, i) => columns.some((column) => column[i] !== null) ? columns.reduce((sum, column) => sum + (column[i] || 0), 0) / 1e6 : null);
  };
  const bound = fields(job.rule).max_staleness;
  const staleness = track.get("job", jobName, "staleness_mean"), applied = track.get("job", jobName, "applied_per_s");
  const push = across("bytes_in_per_s"), pull = across("bytes_out_per_s");
  const others = ["joining", "silent"].map((state) => [workers.filter((worker) => worker.state === state).length, state]).filter(([count]) => count).map(([count, state]) => count + " " + state);
  const rates = live.map((worker) => worker.samples_per_s).filter(isNumber);
  const tiles = [
    ["Workers", String(live.length), "live", others.join(", ") || (job.expected_workers > live.length ? job.expected_workers + " expected" : (job.rule_text || ""))],
    ["Samples per second", rates.length ? whole(rates.reduce((a, b) => a + b, 0)) : UNKNOWN, "", rates.length ? "all workers together" : "known once workers report"],
    ["Updates", fixed(last(applied.slice(-5))), "/s", whole(job.applied) + " so far" + (refused ? ", " + whole(refused) + " refused" : "")],
    ["Staleness", fixed(last(staleness.slice(-5))), "mean", "largest " + whole(job.max_staleness) + (isNumber(bound) ? ", bound " + bound + " steps" : "")],
    ["Loss", lost ? NOT_FINITE : loss(mean(losses)), "mean", lost || (losses.length ? loss(Math.min(...losses)) + " to " + loss(Math.max(...losses)) : "model.report(loss=…) tells it"), !!lost],
    ["Push", fixed(last(push.slice(-5))), "MB/s", "pull " + fixed(last(pull.slice(-5))) + " MB/s"],
  ];
  sync($("tiles"), tiles, (tile) => tile[0],
    (tile) => html("div", { class: "tile" }, html("dt", {}, tile[0]), html("dd", { class: "value number" }, "", html("small", {})), html("dd", { class: "more number" })),
    (node, [, value, unit, more, isAlarm]) => {
      flag(node, "class", isAlarm ? "tile alarm" : "tile");
      const [, shown, about] = node.children;
      if (shown.dataset.value !== value + unit) { shown.dataset.value = value + unit; shown.replaceChildren(value + " ", html("small", {}, unit)); }
      write(about, more);
      flag(about, "title", more);
    });
}

// ---- workers -------------------------------------------------------------------------------------------------------
const COLUMNS = [["Rank", "rank"], ["Host", "host"], ["State", "state"], ["Step", "right"], ["Lag", "right"], ["Staleness p50 / p99", "right"], ["Heartbeat", "right"],
  ["Steps/s", "right"], ["Samples/s", "right"], ["Loss", "right"], ["Refused", "right"], ["Waits for", "waits"]];
const color = (rank) => "var(--s" + rank % 8 + ")";

/** Ranks of workers whose loss is no number any more; and they in words, or "". */
const lostRanks = (job) => list(job.workers).filter((worker) => worker.loss === NOT_FINITE).map((worker) => worker.rank);
const diverged = (job) => lostRanks(job).length ? "not finite: " + lostRanks(job).map(rankName).join(", ") : "";
/** Why a live worker stands out, or "". */
function slowness(worker, workers) {
  const live = workers.filter((other) => other.state === "live");
  if (worker.state !== "live" || live.length < 2) return "";
  const fastest = Math.max(0, ...live.map((other) => other.steps_per_s).filter(isNumber));
  if (isNumber(worker.steps_per_s) && fastest > 0 && worker.steps_per_s < 0.6 * fastest) return Math.round(worker.steps_per_s / fastest * 100) + " % of the fastest";
  const others = live.filter((other) => other !== worker).map((other) => other.compute_s).filter(isNumber).sort((a, b) => a - b);
  const middle = others[Math.floor(others.length / 2)];
  if (isNumber(worker.compute_s) && middle > 0 && worker.compute_s > 1.7 * middle && worker.compute_s - middle > 0.002) return "computes " + (worker.compute_s / middle).toFixed(1) + "× as long";
  return "";
}
/** Workers that are gone, as the server remembers them, with the words of the event log. */
function departed(job) {
  const here = new Set(list(job.workers).map((worker) => worker.rank)), found = new Map();
  for (const end of list(job.departed)) if (!here.has(end.rank) && status.unix_s - end.unix_s < GONE_S) found.set(end.rank, end);
  return [...found.values()].map((end) => {
    const event = list(status.events).find((event) => event.job === jobName && event.worker === end.rank && Math.abs(event.unix_s - end.unix_s) < 1);
    const loss = last(track.get("worker", jobName, end.rank, "loss"));
    return { rank: end.rank, state: end.reason, end, host: end.host, step: end.step, loss, text: fields(event).text || end.reason };
  });
}
function stateOf(worker, slow) {
  if (worker.end) return { evicted: ["bad", "✕ evicted"], fenced: ["bad", "✕ fenced"], left: ["", "○ left"] }[worker.state] || ["", "○ gone"];
  if (worker.state === "silent") return ["bad", "✕ silent"];
  if (worker.state === "joining") return ["", "◐ joining"];
  return slow ? ["warn", "▲ slow"] : ["good", "● live"];
}
function showWorkers(job) {
  const workers = list(job.workers), gone = departed(job);
  const fastest = Math.max(0, ...workers.map((worker) => worker.lag).filter(isNumber));
  const rows = [...workers, ...gone].map((worker) => ({ ...worker, slow: slowness(worker, workers) })).sort((a, b) => a.rank - b.rank);
  // In a crowd those who need a look come first.
  const need = (row) => row.state === "silent" ? 0 : row.slow ? 1 : row.end ? 2 : 3;
  if (rows.length > CROWD) rows.sort((a, b) => need(a) - need(b) || a.rank - b.rank);
  sync($("workers-body"), rows, (worker) => worker.rank + (worker.end ? " gone" : ""),
    (worker) => html("tr", {}, ...COLUMNS.slice(0, worker.end ? 4 : undefined).map(([label, kind]) => html("td", { class: kind, "data-label": label })),
      ...(worker.end ? [html("td", { class: "reason", colspan: COLUMNS.length - 4 })] : [])),
    (row, worker) => {
      const slow = worker.slow;
      const isGone = !!worker.end;
      flag(row, "class", isGone ? "gone" : worker.state === "silent" ? "silent" : slow ? "slow" : "");
      const cells = row.children;
      if (!cells[0].firstChild) {
        const swatch = html("span", { class: "swatch", "aria-hidden": "true" });
        swatch.style.background = color(worker.rank);
        cells[0].append(swatch, "" + worker.rank);
      }
      const host = worker.host ? worker.host + (worker.pid ? ":" + worker.pid : "") : UNKNOWN;
      write(cells[1], host);
      flag(cells[1], "title", host);
      const [kind, name] = stateOf(worker, slow);
      if (!cells[2].firstChild) cells[2].append(html("span", {}), html("span", { class: "why" }));
      flag(cells[2].firstChild, "class", "pill " + kind);
      write(cells[2].firstChild, name);
      write(cells[2].lastChild, isGone ? duration(status.unix_s - worker.end.unix_s) + " ago" : slow);
      write(cells[3], whole(worker.step));
      if (isGone) {
        write(cells[4], worker.text + (isNumber(worker.loss) ? " · last loss " + loss(worker.loss) : ""));
        return;
      }
      write(cells[4], whole(worker.lag));
      flag(cells[4], "class", "right" + (fastest >= 5 && worker.lag === fastest ? " warned" : ""));
      write(cells[5], isNumber(worker.staleness_p50) ? number(worker.staleness_p50) + " / " + number(worker.staleness_p99) : UNKNOWN);
      write(cells[6], isNumber(worker.silent_s) ? worker.silent_s.toFixed(1) + " s ago" : UNKNOWN);
      flag(cells[6], "class", "right" + (worker.state === "silent" ? " alarm" : ""));
      write(cells[7], fixed(worker.steps_per_s));
      write(cells[8], isNumber(worker.samples_per_s) ? whole(worker.samples_per_s) : UNKNOWN);
      write(cells[9], loss(worker.loss));
      flag(cells[9], "class", "right" + (worker.loss === NOT_FINITE ? " alarm" : ""));
      write(cells[10], whole(worker.refused));
      write(cells[11], list(worker.waiting_for).map(rankName).join(", ") || UNKNOWN);
      for (const cell of cells) cell.classList.toggle("unknown", cell.textContent === UNKNOWN);
    });
  const empty = $("workers-empty");
  empty.hidden = workers.length + gone.length > 0;
  $("workers-body").parentElement.hidden = !empty.hidden;
  write(empty, job.lost || "No worker is here.");
  const counts = [["slow", rows.filter((row) => row.slow).length], ["silent", rows.filter((row) => row.state === "silent").length], ["gone", gone.length]];
  write($("workers-about"), [...counts.filter(([, count]) => count).map(([name, count]) => count + " " + name), (job.rule_text || ""), whole(job.chunks) + (job.chunks === 1 ? " chunk" : " chunks"), bytes(job.values_bytes), "version " + whole(job.version_max), ...Object.entries(fields(job.table_rows)).map(([name, rows]) => "table " + name + " of " + whole(rows) + " rows, " + bytes(fields(job.table_bytes)[name]))].join(" · "));
}

// ---- where a step's time goes --------------------------------------------------------------------------------------
const PARTS = ["compute", "blocked"];
function showTime(job) {
  const workers = list(job.workers).filter((worker) => isNumber(worker.step_s) && worker.step_s > 0 && isNumber(worker.compute_s));
  const longest = Math.max(0, ...workers.map((worker) => worker.step_s));
  $("time-empty").hidden = workers.length > 0;
  $("time-body").parentElement.hidden = $("time-about").hidden = workers.length === 0;
  sync($("time-body"), workers, (worker) => worker.rank,
    (worker) => html("tr", {}, html("td", { class: "rank" }, rankName(worker.rank)),
      html("td", { class: "bars" }, html("div", { class: "bar-track" }, ...PARTS.map((part) => html("span", { class: part })))),
      ...PARTS.map((part) => html("td", { class: "right part " + part + "-part", "data-label": part }, html("span", {}), html("span", { class: "percent" }))),
      html("td", { class: "right total", "data-label": "step" })),
    (row, worker) => {
      const bar = row.children[1].firstChild;
      bar.style.width = (worker.step_s / longest * 100).toFixed(1) + "%";
      const total = PARTS.reduce((sum, part) => sum + (worker[part + "_s"] || 0), 0) || 1;
      PARTS.forEach((part, i) => {
        const seconds = worker[part + "_s"] || 0, share = seconds / total;
        bar.children[i].style.flex = "0 0 " + (share * 100).toFixed(2) + "%";
        write(bar.children[i], share * worker.step_s / longest > 0.17 ? Math.round(share * 100) + " %" : "");
        write(row.children[2 + i].firstChild, milliseconds(seconds));
        write(row.children[2 + i].lastChild, Math.round(share * 100) + " %");
      });
      write(row.lastChild, milliseconds(worker.step_s));
    });
}

// ---- events --------------------------------------------------------------------------------------------------------
const EVENT_LOOKS = { evicted: ["bad", "✕"], fenced: ["bad", "✕"], snapshot_failed: ["bad", "✕"], memory: ["bad", "!"], log_low: ["bad", "!"], log_full: ["bad", "✕"], log_failed: ["bad", "✕"], log_room: ["good", "●"], refused: ["warn", "▲"], lost: ["bad", "!"], stood_still: ["warn", "▲"], draining: ["warn", "▲"], joined: ["good", "●"], started: ["good", "●"], restored: ["good", "●"], left: ["", "○"], snapshot: ["", "▣"] };
function showEvents() {
  const seen = new Map();
  const events = [...list(status.events)].reverse().slice(0, 200).map((event) => {
    const key = Track.key(event.unix_s, event.kind, event.job, event.worker, event.text), count = seen.get(key) || 0;
    seen.set(key, count + 1);
    return { ...event, key: key + count };
  });
  sync($("log"), events, (event) => event.key,
    (event) => {
      const [kind, sign] = EVENT_LOOKS[event.kind] || ["", "·"];
      const isNamed = !isNumber(event.worker) || String(event.text).includes("worker " + event.worker);
      const about = [event.job, isNamed ? "" : rankName(event.worker)].filter(Boolean).join(" · ");
      const moment = html("time", { class: "soft number" }, clock(event.unix_s, true));
      moment.title = new Date(event.unix_s * 1000).toLocaleString("en-GB");
      return html("li", {}, moment, html("span", {}, html("span", { class: "pill " + kind }, sign + " " + String(event.kind).replaceAll("_", " "))),
        html("span", { class: "text" }, about ? html("span", { class: "soft" }, about + "  ") : "", String(event.text)));
    }, () => {});
  if (!events.length) $("log").append(html("li", {}, html("span", { class: "soft" }, "none yet")));
}

// ---- the whole -----------------------------------------------------------------------------------------------------
// A worker that only asked for weights is counted among them; nothing of its was refused.
const refusals = (job) => Object.entries(fields(job.refused)).filter(([reason, count]) => reason !== "abstained" && count);
const currentJob = () => jobName === null ? {} : fields(fields(status.jobs)[jobName]);
function show() {
  if (!status) return;
  showFacts();
  const names = Object.keys(fields(status.jobs)).sort();
  showJobs(names);
  const job = currentJob();
  showTiles(job);
  showWorkers(job);
  if (jobName === null) {
    write($("workers-about"), "");
    if (muteText(status)) $("workers-empty").replaceChildren("Which jobs there are is not known: " + muteText(status) + ".");
    else $("workers-empty").replaceChildren("No job yet. A worker starts one: ", html("code", {}, "PSENGINE_SERVERS=" + list(status.addresses).join(",") + " PSENGINE_STRATEGY=async python train.py"));
  }
  showTime(job);
  for (const chart of charts) chart.draw();
  showStaleness();
  const reasons = refusals(job).map(([reason, count]) => String(reason).replaceAll("_", " ") + " " + whole(count));
  write($("updates-about"), reasons.length ? "refused: " + reasons.join(", ") : "of chunks");
  showEvents();
}
sync($("workers-head"), COLUMNS, ([label]) => label, ([label, kind]) => html("th", { scope: "col", class: kind === "right" ? "right" : "" }, label), () => {});
$("time-head").append(html("th", { scope: "col", class: "who" }, html("span", {}, "")), html("th", { scope: "col" }, ""),
  ...PARTS.map((part) => html("th", { scope: "col", class: "right part" }, html("span", { class: "swatch " + part, "aria-hidden": "true" }), part)), html("th", { scope: "col", class: "right part" }, "step"));
$("job").addEventListener("change", () => { jobName = $("job").value; show(); });
$("pause").addEventListener("click", () => {
  paused = !paused;
  flag($("pause"), "aria-pressed", String(paused));
  write($("pause"), paused ? "Resume" : "Pause");
  answeredAt = performance.now();
  showHealth();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) { answeredAt = performance.now(); turn(); } });
turn();
setInterval(turn, REFRESH_MS);
