"use strict";
// What the pages share: small helpers, a table that is sorted, a plot, a legend. Each page sets `group`, what it shows:
// `cells`, the names of their `series` with their `labels`, `metric` and its `scale`; and says by `barOf` from where to
// where the bar of a cell reaches, null for none, and by `errorText` the same in words.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f00", "#a6611a", "#5a7d9a"];
let group = null;
let hidden = new Set();
const furtherPlots = []; // of a page: functions that draw them

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

// No more digits than it needs: 100 %, 14.7 %.
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
const scoreText = (cell) => (cell.score === null ? "-" : (group.scale * cell.score).toFixed(1));
// The method alone where that says which series is meant.
const label = (series) => group.labels.get(series);
const colour = (series) => COLOURS[group.series.indexOf(series) % COLOURS.length];
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dot = (series) => make("i", { className: "dot", style: `background:${series === "full" ? ink("--ink") : colour(series)}` });

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

// -- a table

// Columns are `name`, and `title` where it is called otherwise; `value` of a cell, to sort by, `words` where that is
// text; `show`, what stands in the table, text or nodes; `rare`: not on a phone. `order` says by what it is sorted;
// `redraw` is called when that has changed.
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

function ticks(low, high, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
    return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  }
  const rough = (high - low) / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) found.push(tick);
  return found;
}

function drawPlot(where, x, log, text, name, moreIsBetter) {
  const height = where.clientHeight, width = where.clientWidth;
  const points = group.cells.filter((cell) => !hidden.has(cell.series) && cell.score !== null && cell[x] !== null);
  where.replaceChildren();
  if (!points.length) {
    where.append(make("p", { className: "lead", textContent: "No cell has these numbers." }));
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
  const allTicks = ticks(low, high, log);
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
  const front = [];
  for (const cell of [...points].sort((a, b) => (moreIsBetter ? b[x] - a[x] : a[x] - b[x]) || b.score - a.score))
    if (!front.length || cell.score > front[front.length - 1].score) front.push(cell);
  drawing.append(svg("polyline", { class: "front", points: front.map((cell) => `${along(cell[x])},${up(group.scale * cell.score)}`).join(" ") }));
  for (const series of group.series) {
    const own = points.filter((cell) => cell.series === series).sort((a, b) => a.realised - b.realised);
    const paint = series === "full" ? ink("--ink") : colour(series);
    drawing.append(svg("polyline", { fill: "none", stroke: paint, "stroke-width": 1.6, opacity: 0.75, points: own.map((cell) => `${along(cell[x])},${up(group.scale * cell.score)}`).join(" ") }));
    for (const cell of own) {
      const [px, py] = [along(cell[x]), up(group.scale * cell.score)];
      const bar = barOf(cell);
      if (bar) {
        const [a, b] = bar.map((score) => up(Math.max(0, Math.min(group.scale * score, most))));
        drawing.append(svg("path", { stroke: paint, fill: "none", opacity: 0.8, d: `M${px} ${a}V${b}M${px - 3} ${a}h6M${px - 3} ${b}h6` }));
      }
      if (front.includes(cell)) drawing.append(svg("circle", { cx: px, cy: py, r: 8, fill: "none", stroke: paint, "stroke-width": 1.5 }));
      const point = svg("circle", { class: "point", cx: px, cy: py, r: 4.5, fill: paint, stroke: ink("--paper"), "stroke-width": 1 });
      hint(point, `${label(cell.series)}\nkept ${sizeName(cell.size)}\n${group.metric} ${scoreText(cell)}${errorText(cell)}\n${name} ${text(cell[x])}`);
      drawing.append(point);
    }
  }
  where.append(drawing);
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

function drawLegend() {
  $("legend").replaceChildren(...group.series.map((series) => {
    const button = make("button", { type: "button" }, dot(series), label(series));
    button.setAttribute("aria-pressed", String(!hidden.has(series)));
    button.addEventListener("click", () => {
      hidden.has(series) ? hidden.delete(series) : hidden.add(series);
      drawLegend();
      drawPlots();
    });
    return button;
  }));
}
