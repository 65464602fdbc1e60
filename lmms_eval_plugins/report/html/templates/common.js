"use strict";
// Shared by the pages: small helpers, a sortable table, a plot, a legend. Each page sets `group`, the data it shows
// (`cells`, the names of their `series` with their `labels`, `metric`, its `scale` and `is_lower_better`), and defines
// `barOf`, which returns both ends of a cell's error bar (null for none), and `errorText`, which returns them as text.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const MANY = 12; // with more methods, only those on a front are coloured
const SAME = 0.03; // gains that differ by less count as equal: report/metrics.py, on_front
let group = null;
let hidden = new Set();
const furtherPlots = []; // functions that draw the plots only one page has

// -- small helpers

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "style") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function fill(select, options, keep) {
  const before = keep ? select.value : null;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value, textContent: text })));
  if (before !== null && options.some(([value]) => String(value) === before)) select.value = before;
}

// With no more digits than needed: 100 %, 14.7 %.
const percent = (share, digits = 1) => (share === null ? "-" : Number((100 * share).toFixed(digits)) + " %");
const milliseconds = (s) => (s === null ? "-" : (1000 * s).toFixed(1) + " ms");
function bytes(value) {
  if (value === null) return "-";
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return (unit === "B" ? value.toFixed(0) : value.toFixed(1)) + " " + unit;
    value /= 1024;
  }
  return value.toFixed(2) + " GiB";
}
// Scores where more is better: 1 is right, 0 is wrong.
const rightness = (score) => (group.is_lower_better ? 1 - score : score);
const scoreText = (cell) => (cell.score === null ? "-" : (group.scale * cell.score).toFixed(1));
// The method's name alone where it identifies the series.
const label = (series) => group.labels.get(series);
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Colour and marker come with the cells (report/appearance.py): the full cache, however it is run, is black. `all`: the
// cells before a page filters them.
const cellOf = (series) => group.all.find((cell) => cell.series === series) ?? {};
const colour = (series) => (cellOf(series).method === "full" ? ink("--ink") : cellOf(series).colour ?? ink("--faint"));
// matplotlib's markers, as paths around (0, 0) within a circle of radius 1.
const around = (count, turn, radius = 1) => [...Array(count).keys()].map((k) => [turn + (2 * Math.PI * k) / count, radius]).map(([angle, r]) => [r * Math.sin(angle), -r * Math.cos(angle)]);
const path = (points) => `M${points.map((point) => point.map((value) => value.toFixed(3)).join(" ")).join("L")}Z`;
const star = (count, inner) => path(around(2 * count, 0).map(([x, y], k) => (k % 2 ? [x * inner, y * inner] : [x, y])));
const MARKERS = {
  o: "M-0.9 0a0.9 0.9 0 1 0 1.8 0a0.9 0.9 0 1 0 -1.8 0Z", s: path(around(4, Math.PI / 4, 1.1)), D: path(around(4, 0, 1.1)), d: path([[0, -1.2], [0.7, 0], [0, 1.2], [-0.7, 0]]),
  "^": path(around(3, 0, 1.15)), v: path(around(3, Math.PI, 1.15)), "<": path(around(3, -Math.PI / 2, 1.15)), ">": path(around(3, Math.PI / 2, 1.15)),
  p: path(around(5, 0, 1.05)), h: path(around(6, 0, 1.05)), P: "M-0.35 -1h0.7v0.65h0.65v0.7h-0.65v0.65h-0.7v-0.65h-0.65v-0.7h0.65Z", X: star(4, 0.45), "*": star(5, 0.45),
};
function marker(series, attributes) {
  const { x = 0, y = 0, size = 5, fill = colour(series), ...more } = attributes;
  return svg("path", { d: MARKERS[cellOf(series).marker] ?? MARKERS.o, transform: `translate(${x} ${y}) scale(${size})`, fill, ...more });
}
const dot = (series) => svg("svg", { class: "dot", viewBox: "-6 -6 12 12", "aria-hidden": "true" }, marker(series, {}));
const named = (series) => make("span", { className: "series" }, dot(series), make("span", {}, label(series)));
// The cells on the Pareto front of score and gain, as in report/metrics.py; `hindsight`, which knows the answer, is on
// none.
function onFront(cells, gain) {
  const front = [];
  for (const cell of cells.filter(({ method }) => method !== "hindsight").sort((a, b) => rightness(b.score) - rightness(a.score) || gain(b) - gain(a))) {
    const beaten = (other) => (rightness(other.score) > rightness(cell.score) ? gain(other) >= gain(cell) * (1 - SAME) : gain(other) * (1 - SAME) > gain(cell));
    if (!front.some(beaten)) front.push(cell);
  }
  return front;
}
const shownSeries = () => group.series.filter((series) => !hidden.has(series));

function tip(event, text) {
  const box = $("tip");
  box.textContent = text;
  box.style.opacity = text ? 1 : 0;
  if (!text) return;
  const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
  box.style.left = Math.max(8, left) + "px";
  box.style.top = Math.max(8, event.clientY - box.offsetHeight - 12) + "px";
}

function hint(element, text) {
  element.addEventListener("pointermove", (event) => tip(event, text));
  element.addEventListener("pointerleave", (event) => tip(event, ""));
}

const sizeName = (size) => (size.startsWith("budget") ? size : percent(Number(size), Number(size) < 0.01 ? 1 : 0));
const decimal = (value) => (value === null ? "-" : value.toFixed(1));

// -- tests against the full cache, in points (report/against.py)

const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(1);

// Red or green where the difference is significant after Holm's correction for the rows of the table.
function difference({ against }) {
  if (!against) return "-";
  const kind = against.holm >= 0.05 ? "" : against.difference < 0 ? "loss" : "gain";
  const safe = against.not_worse ? `, not worse by ${against.margin}` : "";
  return [make("span", { className: kind, textContent: signed(against.difference) }), make("small", { textContent: ` [${signed(against.low)}, ${signed(against.high)}]${safe}` })];
}

const TESTS = [
  { name: "against full", value: (cell) => cell.against?.difference ?? null, show: difference, rare: true },
  { name: "p (Holm)", value: (cell) => cell.against?.holm ?? null, show: ({ against }) => (against ? (against.holm < 0.0001 ? "<0.0001" : against.holm.toFixed(4)) : "-"), rare: true },
  { name: "broken", value: (cell) => cell.against?.broken ?? null, show: ({ against }) => (against && against.broken !== null ? `${against.broken} of ${against.questions}` : "-"), rare: true },
];

// -- a table

// A column has a `name`, and a `title` if its heading differs; `value`, a cell's sort key, and `words` if text;
// `show`, the content of the table cell, text or nodes; `rare` if it is hidden on a phone. `order` holds the current
// sorting; `redraw` is called when it has changed.
function drawRows(table, columns, cells, order, redraw) {
  const head = columns.map(({ name, title, words, rare }) => {
    const th = make("th", { textContent: title ?? name, className: rare ? "rare" : "", tabIndex: 0, scope: "col" });
    if (order.column === name) th.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
    const sort = () => {
      order.descending = order.column === name ? !order.descending : !words;
      order.column = name;
      redraw();
    };
    th.addEventListener("click", sort);
    th.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    return th;
  });
  table.tHead.replaceChildren(make("tr", {}, ...head));
  const rows = [...cells], by = columns.find(({ name }) => name === order.column);
  if (by) {
    rows.sort((a, b) => {
      const [x, y] = [by.value(a), by.value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      const less = typeof x === "string" ? x.localeCompare(y) : x - y;
      return order.descending ? -less : less;
    });
  }
  table.tBodies[0].replaceChildren(...rows.map((cell) => make("tr", {}, ...columns.map(({ show, rare }) => make("td", { className: rare ? "rare" : "" }, ...[show(cell)].flat())))));
  return rows;
}

function meter(share) {
  return make("span", { className: "meter" }, make("i", { style: `width:${100 * share}%` }));
}

// -- plots

// Round numbers from `low` to `high`, at least two where `low` < `high`; `ofBytes`: round in KiB, MiB or GiB.
function ticks(low, high, log, ofBytes = false) {
  if (log) {
    const [base, digits] = ofBytes ? [2, [1]] : [10, [1, 2, 5]], found = [];
    for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high * 1.001; power++)
      for (const digit of digits) found.push(digit * base ** power);
    const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    if (inside.length > 1) return inside;
  }
  const unit = ofBytes ? 1024 ** Math.floor(Math.log(high) / Math.log(1024)) : 1;
  const rough = (high - low) / unit / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough) * unit;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) found.push(tick);
  return found;
}

function drawPlot(where, x, log, text, name, moreIsBetter) {
  const height = where.clientHeight, width = where.clientWidth;
  const points = group.cells.filter((cell) => !hidden.has(cell.series) && cell.score !== null && cell[x] !== null);
  where.replaceChildren();
  if (!points.length) {
    where.append(make("p", { className: "lead", textContent: "No cell has these measurements." }));
    return;
  }
  const left = 44, right = 14, top = 12, bottom = 40;
  const values = points.map((cell) => cell[x]);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (log) [low, high] = [low / 1.15, high * 1.15];
  else { const room = (high - low || high) * 0.07; [low, high] = [Math.max(0, low - room), high + room]; }
  const ys = points.map((cell) => group.scale * (barOf(cell)?.[1] ?? cell.score));
  const most = group.scale === 100 ? 103 : Math.max(...ys) * 1.05;
  const along = (value) => left + (width - left - right) * (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  const up = (score) => height - bottom - (height - bottom - top) * (score / most);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${group.metric} against ${name}` });
  const allTicks = ticks(low, high, log, text === bytes);
  const shownTicks = allTicks.length * 52 > width ? allTicks.filter((_, place) => place % 2 === 0) : allTicks;
  for (const tick of shownTicks) {
    drawing.append(svg("line", { class: "grid", x1: along(tick), x2: along(tick), y1: top, y2: height - bottom }));
    drawing.append(svg("text", { x: along(tick), y: height - bottom + 17, "text-anchor": "middle" }, text(tick)));
  }
  for (const tick of ticks(0, Math.min(most, group.scale === 100 ? 100 : most), false)) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: up(tick), y2: up(tick) }));
    drawing.append(svg("text", { x: left - 8, y: up(tick) + 4, "text-anchor": "end" }, String(Number(tick.toPrecision(4)))));
  }
  drawing.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, name));
  drawing.append(svg("text", { x: 0, y: 0, transform: `translate(11 ${(height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, group.metric + (group.scale === 100 ? " (%)" : "")));
  const front = onFront(points, (cell) => (moreIsBetter ? cell[x] : 1 / cell[x])).sort((a, b) => a[x] - b[x]);
  const isMany = new Set(points.map((cell) => cell.series)).size > MANY, series_on_front = new Set(front.map((cell) => cell.series));
  const isPale = (series) => isMany && !series_on_front.has(series) && cellOf(series).method !== "full";
  drawing.append(svg("polyline", { class: "front", points: front.map((cell) => `${along(cell[x])},${up(group.scale * cell.score)}`).join(" ") }));
  for (const series of [...group.series].sort((a, b) => isPale(b) - isPale(a))) {
    const own = points.filter((cell) => cell.series === series).sort((a, b) => a.realised - b.realised);
    const paint = isPale(series) ? ink("--front") : colour(series);
    drawing.append(svg("polyline", { fill: "none", stroke: paint, "stroke-width": isPale(series) ? 1 : 1.6, opacity: isPale(series) ? 0.5 : 0.75, points: own.map((cell) => `${along(cell[x])},${up(group.scale * cell.score)}`).join(" ") }));
    for (const cell of own) {
      const [px, py] = [along(cell[x]), up(group.scale * cell.score)];
      const bar = isPale(series) ? null : barOf(cell);
      if (bar) {
        const [a, b] = bar.map((score) => up(Math.max(0, Math.min(group.scale * score, most))));
        drawing.append(svg("path", { stroke: paint, fill: "none", opacity: 0.8, d: `M${px} ${a}V${b}M${px - 3} ${a}h6M${px - 3} ${b}h6` }));
      }
      if (front.includes(cell)) drawing.append(svg("circle", { cx: px, cy: py, r: 8, fill: "none", stroke: paint, "stroke-width": 1.5 }));
      const point = marker(series, { x: px, y: py, size: isPale(series) ? 3.5 : 5, fill: paint, class: "point", stroke: ink("--paper"), "stroke-width": 0.2 });
      hint(point, `${label(cell.series)}\nkept ${cell.kept}\n${group.metric} ${scoreText(cell)}${errorText(cell)}\n${name} ${text(cell[x])}`);
      drawing.append(point);
    }
  }
  nameFront(drawing, front, (cell) => [along(cell[x]), up(group.scale * cell.score)], width);
  where.append(drawing);
}

// Label the points of the front, each where it covers no other label; leave a label out if every place is taken.
function nameFront(drawing, front, at, width) {
  const taken = front.map(at).map(([x, y]) => [x - 7, x + 7, y - 7, y + 7]);
  for (const cell of front) {
    const text = cell.method === "full" ? "full" : `${cell.method} ${cell.realised === null ? cell.size : cell.kept}`, [x, y] = at(cell), long = 6.4 * text.length;
    for (const [dx, dy] of [[10, 15], [10, -10], [-10 - long, 15], [-10 - long, -10], [10, 29], [-10 - long, 29]]) {
      const box = [x + dx, x + dx + long, y + dy - 11, y + dy + 3];
      if (box[0] < 0 || box[1] > width || taken.some((other) => box[0] < other[1] && other[0] < box[1] && box[2] < other[3] && other[2] < box[3])) continue;
      taken.push(box);
      drawing.append(svg("text", { class: "mark named", x: box[0], y: y + dy }, text));
      break;
    }
  }
}

function drawPlots() {
  const size = $("x-size").value, time = $("x-time").value;
  const label = (select) => select.selectedOptions[0].textContent;
  drawPlot($("plot-size"), size, true, size === "kv_bytes" ? bytes : (share) => String(Number((100 * share).toPrecision(2))) + " %", label($("x-size")));
  const isRate = time.endsWith("_per_s");
  const timeText = (value) => (isRate ? String(Number(value.toPrecision(3))) : String(Number((1000 * value).toPrecision(3))) + " ms");
  drawPlot($("plot-time"), time, false, timeText, label($("x-time")), isRate);
  for (const draw of furtherPlots) draw();
}

// Chips: a click hides or shows a series, a double click leaves only it and the full cache; above them all, none and
// a filter by name.
function drawLegend() {
  const choose = (series) => {
    hidden = new Set(group.series.filter((each) => !series.includes(each)));
    drawLegend();
    drawPlots();
  };
  const words = $("legend-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = group.series.filter((series) => !words.length || words.some((word) => label(series).toLowerCase().includes(word)));
  $("legend-all").onclick = () => choose(words.length ? [...shownSeries(), ...found] : group.series);
  $("legend-none").onclick = () => choose(words.length ? shownSeries().filter((series) => !found.includes(series)) : []);
  $("legend-only").onclick = () => choose(found);
  $("legend-only").disabled = !words.length;
  $("legend-filter").oninput = drawLegend;
  $("legend-tools").hidden = group.series.length < 4;
  $("legend").replaceChildren(...found.map((series) => {
    const button = make("button", { type: "button", title: "click: hide or show; double click: show only this one" }, dot(series), label(series));
    button.setAttribute("aria-pressed", String(!hidden.has(series)));
    button.addEventListener("click", () => {
      hidden.has(series) ? hidden.delete(series) : hidden.add(series);
      button.setAttribute("aria-pressed", String(!hidden.has(series)));
      drawPlots();
    });
    button.addEventListener("dblclick", () => choose(group.series.filter((each) => each === series || cellOf(each).method === "full")));
    return button;
  }));
}
