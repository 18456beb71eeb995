// ---- charts --------------------------------------------------------------------------------------------------------
const charts = [];
function niceStep(span, count) {
  const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= raw * 0.999) || raw;
}
/** Lines over time. data(): { series: [{ name, values, color, dash }], format, fromZero, empty, about }. */
class LineChart {
  constructor(id, data) {
    this.box = $(id); this.data = data; this.cursor = null;
    this.picture = svg("svg", { role: "img", height: "190" });
    this.legend = html("ul", { class: "legend" });
    this.tip = html("div", { class: "tip" });
    this.empty = html("p", { class: "empty" });
    this.tip.hidden = true;
    this.box.append(this.picture, this.tip, this.legend, this.empty);
    this.picture.addEventListener("pointermove", (event) => { this.cursor = event.offsetX; this.draw(); });
    this.picture.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
    // In the next frame: to draw may change the box's height, and an observer whose own call does that is an error.
    new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(this.box);
    charts.push(this);
  }
  draw() {
    if (!status) return;
    const times = track.times;
    const { series, format, fromZero, empty, about } = this.data();
    const isEmpty = times.length < 2 || !series.some((one) => last(one.values) !== null);
    this.picture.toggleAttribute("hidden", isEmpty); this.picture.style.display = isEmpty ? "none" : "";
    this.legend.hidden = isEmpty;
    this.empty.hidden = !isEmpty;
    this.tip.hidden = true;
    if (isEmpty) { if (typeof empty === "string") write(this.empty, times.length >= 2 ? empty : "A few seconds, please."); return; }
    const width = Math.max(240, this.box.clientWidth), height = 190, left = 46, right = 10, top = 8, bottom = 22;
    const end = times[times.length - 1], start = Math.min(end - 60, Math.max(times[0], end - SPAN_S));
    const numbers = [];
    for (const one of series) one.values.forEach((value, i) => { if (value !== null && times[i] >= start) numbers.push(value); });
    let low = fromZero ? 0 : numbers.reduce((a, b) => Math.min(a, b), Infinity), high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!(high > low)) { high = low + (Math.abs(low) || 1); if (!fromZero) low -= Math.abs(low) * 0.1; }
    const step = niceStep(high - low, 4);
    low = Math.floor(low / step) * step; high = Math.ceil(high / step - 1e-9) * step;
    const x = (time) => left + (time - start) / (end - start) * (width - left - right);
    const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
    const parts = [];
    for (let value = low; value <= high + step / 2; value += step) {
      const at = y(value).toFixed(1);
      parts.push(svg("line", { class: "gridline", x1: left, x2: width - right, y1: at, y2: at }));
      parts.push(svg("text", { x: left - 6, y: Number(at) + 4, "text-anchor": "end" }, number(Math.abs(value) < step / 1e6 ? 0 : value)));
    }
    const wish = (end - start) / Math.max(2, Math.floor((width - left) / 95));
    const tick = [10, 15, 30, 60, 120, 300].find((one) => one >= wish) || 600;
    const offset = new Date(end * 1000).getTimezoneOffset() * 60;
    for (let time = Math.ceil((start - offset) / tick) * tick + offset; time <= end; time += tick) {
      const at = x(time);
      if (at > width - 26 || at < left + 14) continue;
      parts.push(svg("text", { x: at.toFixed(1), y: height - 6, "text-anchor": "middle" }, clock(time, tick < 60)));
      parts.push(svg("line", { class: "axis", x1: at.toFixed(1), x2: at.toFixed(1), y1: height - bottom, y2: height - bottom + 4 }));
    }
    parts.push(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    for (const one of series) {
      let path = "", pen = "M", before = 0;
      one.values.forEach((value, i) => {
        if (value === null || times[i] < start) { pen = "M"; return; }
        if (times[i] - before > 3.5 * REFRESH_MS / 1000) pen = "M";
        path += pen + x(times[i]).toFixed(1) + " " + y(value).toFixed(1);
        pen = "L"; before = times[i];
      });
      const trace = svg("path", { class: "trace", d: path, "stroke-dasharray": one.dash || "" });
      trace.style.stroke = one.color;
      parts.push(trace);
    }
    if (this.cursor !== null) this.point(parts, { series, format, times, start, end, x, width, height, top, bottom, left, right });
    this.picture.setAttribute("viewBox", "0 0 " + width + " " + height);
    this.picture.setAttribute("aria-label", about + ": " + series.map((one) => one.name + " " + format(last(one.values.slice(-5)))).join(", "));
    this.picture.replaceChildren(...parts);
    sync(this.legend, series, (one) => one.name,
      (one) => {
        const line = svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-dasharray": one.dash || "" });
        line.style.stroke = one.color;
        return html("li", {}, svg("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" }, line), one.name + " ", html("b", {}));
      },
      (item, one) => write(item.lastChild, one.isLost ? NOT_FINITE : format(last(one.values.slice(-5))) === UNKNOWN ? "last " + format(last(one.values)) : format(last(one.values.slice(-5)))));
  }
  point(parts, { series, format, times, start, end, x, width, height, top, bottom, left, right }) {
    const time = start + (this.cursor - left) / (width - left - right) * (end - start);
    let nearest = 0;
    times.forEach((other, i) => { if (Math.abs(other - time) < Math.abs(times[nearest] - time)) nearest = i; });
    const at = x(times[nearest]);
    if (at < left - 1) return;
    parts.push(svg("line", { class: "cursor", x1: at, x2: at, y1: top, y2: height - bottom }));
    this.tip.replaceChildren(html("div", { class: "soft" }, clock(times[nearest], true)),
      ...series.map((one) => html("div", { class: "number" }, html("span", {}, one.name), html("b", {}, format(one.values[nearest])))));
    this.tip.hidden = false;
    this.tip.style.left = at > width / 2 ? "" : at + 12 + "px";
    this.tip.style.right = at > width / 2 ? width - at + 12 + "px" : "";
  }
}
const MAX_LINES = 10;
new LineChart("loss", () => {
  const job = currentJob();
  const known = [...new Set([...list(job.workers), ...departed(job)].map((worker) => worker.rank))].filter((rank) => track.has("worker", jobName, rank, "loss"));
  const series = known.slice(0, MAX_LINES).map((rank) => ({ isLost: lostRanks(job).includes(rank), name: rankName(rank), values: track.get("worker", jobName, rank, "loss"), color: color(rank), dash: DASHES[Math.floor(rank / 8) % 3] }));
  if (known.length > MAX_LINES) {
    const columns = known.map((rank) => track.get("worker", jobName, rank, "loss"));
    series.push({ name: "mean of " + known.length, values: track.times.map((_, i) => mean(columns.map((column) => column[i]).filter(isNumber))), color: "var(--ink)", dash: "" });
  }
  const lost = diverged(job);
  write($("loss-about"), lost || "as each worker reports it");
  flag($("loss-about"), "class", lost ? "alarm" : "");
  return { series, format: loss, about: "Loss over time", empty: lost ? "No loss was finite." : "No loss yet: call model.report(loss=…) in the training loop." };
});
new LineChart("updates", () => ({
  series: [
    { name: "accepted", values: track.get("job", jobName, "applied_per_s"), color: "var(--s2)" },
    { name: "refused", values: track.get("job", jobName, "refused_per_s"), color: "var(--bad)", dash: "5 3" },
  ], format: fixed, fromZero: true, about: "Updates per second", empty: "No update yet.",
}));
new LineChart("traffic", () => {
  const shards = list(status.shards).map((shard) => shard.index);
  const mega = (values) => values.map((value) => value === null ? null : value / 1e6);
  // A pull mostly answers a push: dashes of another colour show where one lies on the other.
  const lines = (name, columns, place) => ["push", "pull"].map((way, i) => ({ name: way + name, values: mega(columns[i]), color: color(2 * place + i), dash: DASHES[i] }));
  const columns = (index) => ["bytes_in_per_s", "bytes_out_per_s"].map((field) => track.get("shard", index, field));
  let series;
  if (shards.length <= 4) series = shards.flatMap((index, place) => lines(shards.length > 1 ? " " + index : "", columns(index), place));
  else {
    const all = shards.map(columns);
    const total = [0, 1].map((way) => track.times.map((_, i) => all.reduce((sum, one) => one[way][i] === null ? sum : (sum || 0) + one[way][i], null)));
    series = lines(", " + shards.length + " shards", total, 0);
  }
  return { series, format: fixed, fromZero: true, about: "Megabytes per second", empty: "No traffic yet." };
});
function stalenessBars(counts) {
  const known = Object.entries(fields(counts)).map(([key, count]) => [Number(key), count]).filter(([key]) => isNumber(key));
  const largest = Math.max(0, ...known.map(([key]) => key));
  const edges = largest < 12 ? Array.from({ length: Math.max(largest + 1, 4) }, (_, i) => [i, i]) : [[0, 0], [1, 1], [2, 2], [3, 3], [4, 5], [6, 8], [9, 12], [13, 20], [21, 32], [33, 63], [64, Infinity]];
  while (edges.length > 5 && edges[edges.length - 1][0] > largest) edges.pop();
  return edges.map(([from, to]) => ({
    name: to === Infinity ? from + "+" : from === to ? "" + from : from + "–" + to,
    count: known.reduce((sum, [key, count]) => key >= from && key <= to ? sum + count : sum, 0),
  }));
}
const histogram = { picture: svg("svg", { role: "img", height: "190" }), empty: html("p", { class: "empty" }), note: html("p", { class: "soft" }) };
$("staleness").append(histogram.picture, histogram.note, histogram.empty);
function showStaleness() {
  const job = currentJob(), bars = stalenessBars(job.staleness), total = bars.reduce((sum, bar) => sum + bar.count, 0);
  histogram.empty.hidden = total > 0;
  histogram.note.hidden = total === 0;
  histogram.picture.style.display = total ? "" : "none";
  if (!total) { write(histogram.empty, job.kind === "sync-server" ? "This job averages: nothing is stale." : "No update yet."); return; }
  const width = Math.max(240, $("staleness").clientWidth), height = 190, bottom = 22, top = 20, slot = width / bars.length, most = Math.max(...bars.map((bar) => bar.count));
  const parts = [];
  bars.forEach((bar, i) => {
    const tall = bar.count / most * (height - top - bottom), middle = (i + 0.5) * slot, percent = bar.count / total * 100;
    parts.push(svg("rect", { class: "bar", x: (i * slot + slot * 0.12).toFixed(1), width: (slot * 0.76).toFixed(1), y: (height - bottom - tall).toFixed(1), height: Math.max(bar.count ? 1 : 0, tall).toFixed(1), rx: 2 },
      svg("title", {}, bar.name + " updates old: " + whole(bar.count) + " pushes")));
    if (bar.count) parts.push(svg("text", { class: "count", x: middle.toFixed(1), y: (height - bottom - tall - 5).toFixed(1), "text-anchor": "middle" }, percent < 1 ? "<1" : Math.round(percent) + (slot > 34 ? " %" : "")));
    parts.push(svg("text", { x: middle.toFixed(1), y: height - 6, "text-anchor": "middle" }, bar.name));
  });
  parts.push(svg("line", { class: "axis", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }));
  histogram.picture.setAttribute("viewBox", "0 0 " + width + " " + height);
  histogram.picture.setAttribute("aria-label", "Staleness in updates: " + bars.filter((bar) => bar.count).map((bar) => bar.name + ": " + Math.round(bar.count / total * 100) + " %").join(", "));
  histogram.picture.replaceChildren(...parts);
  write(histogram.note, whole(total) + " pushes of chunks, largest staleness " + whole(job.max_staleness));
}
