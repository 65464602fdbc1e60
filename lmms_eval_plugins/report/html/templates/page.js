"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f00", "#a6611a", "#5a7d9a"];
const SHARE_OF_HEADS = -1;
const PAGE = 20;
let group = null;
let hidden = new Set();
let shown = PAGE;

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
const errorText = (cell) => (cell.stderr === null ? "" : " ± " + (group.scale * cell.stderr).toFixed(1));
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

// Cells of one size, and the full cache in front.
const cellsOf = (size) => group.cells.map((cell, index) => [cell, index]).filter(([cell]) => cell.method === "full" || cell.size === size);
const sizeName = (size) => (size.startsWith("budget") ? size : percent(Number(size), Number(size) < 0.01 ? 1 : 0));

const decimal = (value) => (value === null ? "-" : value.toFixed(1));

// -- the table

const COLUMNS = [
  ["method", (cell) => cell.series, null],
  ["kept", (cell) => cell.ratio ?? cell.budget, (cell) => (cell.ratio === null ? cell.size : percent(cell.ratio, cell.ratio < 0.01 ? 1 : 0))],
  ["score", (cell) => cell.score, null],
  ["headroom", (cell) => cell.headroom?.[0] ?? null, (cell) => (cell.headroom ? `${percent(cell.headroom[0], 0)} [${cell.headroom.slice(1).map((end) => (100 * end).toFixed(0)).join(", ")}]` : "-"), "rare"],
  ["same as full", (cell) => cell.same, (cell) => percent(cell.same, 0), "rare"],
  ["TTFT", (cell) => cell.ttft_s, (cell) => milliseconds(cell.ttft_s), "rare"],
  ["per token", (cell) => cell.tpot_s, (cell) => milliseconds(cell.tpot_s)],
  ["answers/s", (cell) => cell.answers_per_s, (cell) => decimal(cell.answers_per_s), "rare"],
  ["tokens/correct", (cell) => cell.tokens_per_correct, (cell) => decimal(cell.tokens_per_correct), "rare"],
  ["KV cache", (cell) => cell.kv_bytes, (cell) => bytes(cell.kv_bytes), "rare"],
  ["realised", (cell) => cell.realised, (cell) => (cell.realised === null ? "-" : cell.realised.toFixed(3)), "rare"],
  ["samples", (cell) => cell.samples, (cell) => cell.samples, "rare"],
];
// Headroom is known where `random` and `hindsight` are there as well.
const columnsShown = () => COLUMNS.filter(([name]) => name !== "headroom" || group.cells.some((cell) => cell.headroom));
let order = { column: null, descending: false };

function drawTable() {
  const columns = columnsShown();
  const head = columns.map(([name, , , rare]) => {
    const th = make("th", { textContent: name === "score" ? group.metric : name, className: rare ?? "", tabIndex: 0, scope: "col" });
    if (order.column === name) th.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
    const sort = () => {
      const numbers = name !== "method";
      order = order.column === name ? { column: name, descending: !order.descending } : { column: name, descending: numbers };
      drawTable();
    };
    th.addEventListener("click", sort);
    th.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    return th;
  });
  $("cells-table").tHead.replaceChildren(make("tr", {}, ...head));
  const rows = [...group.cells];
  const sorting = columns.find(([name]) => name === order.column);
  if (sorting) {
    const value = sorting[1];
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      const less = typeof x === "string" ? x.localeCompare(y) : x - y;
      return order.descending ? -less : less;
    });
  }
  const top = Math.max(...group.cells.map((cell) => cell.score ?? 0)) || 1;
  $("cells-table").tBodies[0].replaceChildren(...rows.map((cell) => make("tr", {}, ...columns.map(([name, , text, rare]) => {
    if (name === "method") return make("td", {}, dot(cell.series), label(cell.series));
    if (name !== "score") return make("td", { textContent: text(cell), className: rare ?? "" });
    const meter = make("span", { className: "meter" }, make("i", { style: `width:${(100 * (cell.score ?? 0)) / top}%` }));
    return make("td", {}, scoreText(cell), make("small", { textContent: errorText(cell) }), meter);
  }))));
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
  const ys = points.flatMap((cell) => [group.scale * (cell.score + (cell.stderr ?? 0))]);
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
      if (cell.stderr) {
        const [a, b] = [cell.score - cell.stderr, cell.score + cell.stderr].map((score) => up(Math.max(0, Math.min(group.scale * score, most))));
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

// -- budgets

function drawMaps() {
  const known = cellsOf($("budget-size").value).map(([cell]) => cell).filter((cell) => cell.method !== "full" && (cell.per_head || cell.per_layer));
  const ofNeeds = $("budget-of").value === "needs";
  const cells = known.filter((cell) => !ofNeeds || cell.needs_kept);
  const shares = cells.map((cell) => (ofNeeds ? cell.needs_kept : cell.per_head ?? cell.per_layer.map((share) => [share])));
  const flat = shares.flat(2);
  const mean = flat.reduce((a, b) => a + b, 0) / (flat.length || 1);
  // Of entries, an even share is half as dark as it could be.
  const most = ofNeeds ? 1 : Math.min(1, Math.max(...flat, 2 * mean, 0.01));
  $("scale-of").textContent = ofNeeds ? "of what the answer attends to on the full cache" : "of a prompt's entries";
  $("scale-end").textContent = percent(most, 0);
  $("maps").replaceChildren(...cells.map((cell, place) => {
    const heads = shares[place][0].length, layers = shares[place].length;
    const grid = make("div", { className: layers > 12 ? "grid tall" : "grid", style: `grid-template-columns:26px repeat(${heads},1fr)` });
    shares[place].forEach((of_layer, layer) => {
      grid.append(make("span", { textContent: layers <= 12 || layer % 4 === 0 ? layer : "" }));
      of_layer.forEach((share, head) => {
        const box = make("i", { style: `background:rgba(${ink("--heat")},${(0.03 + 0.97 * share / most).toFixed(3)})` });
        hint(box, `layer ${layer}${heads > 1 ? `, head ${head}` : ""}: ${percent(share)}`);
        grid.append(box);
      });
    });
    const title = make("h3", { textContent: label(cell.series) });
    return make("div", { className: "map" }, title, grid);
  }));
}

// -- what survives

const inflated = new Map();

async function bits(packed) {
  if (!inflated.has(packed)) {
    const raw = Uint8Array.from(atob(packed.bits), (character) => character.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
    inflated.set(packed, new Uint8Array(await new Response(stream).arrayBuffer()));
  }
  return inflated.get(packed);
}

// The share of the chosen heads and layers that kept each token.
async function keptShares(packed, layer, head) {
  const [layers, heads, tokens] = packed.shape;
  const stored = await bits(packed);
  const total = new Float32Array(tokens);
  const chosenLayers = layer < 0 ? [...Array(layers).keys()] : [layer];
  const chosenHeads = head === SHARE_OF_HEADS ? [...Array(heads).keys()] : [head];
  for (const l of chosenLayers)
    for (const h of chosenHeads) {
      const first = (l * heads + h) * tokens;
      for (let token = 0; token < tokens; token++) {
        const bit = first + token;
        total[token] += (stored[bit >> 3] >> (bit & 7)) & 1;
      }
    }
  return total.map((count) => count / (chosenLayers.length * chosenHeads.length));
}

// Views that belong in one picture: each that shows the whole image is one, all others are tiles of another.
function sheets(layout) {
  const whole = ([left, top, right, bottom]) => left < 0.03 && top < 0.03 && right > 0.97 && bottom > 0.97;
  const result = [], tiles = [];
  const covers = layout.views.filter((view) => whole(view.box));
  for (const view of layout.views) {
    if (covers.includes(view)) {
      const kind = layout.views.length < 2 ? "" : view.start === 0 && covers.length > 1 ? "overview, " : "detail, ";
      result.push({ name: `${covers.length < 2 && layout.views.length > 1 ? "overview, " : kind}${view.rows} × ${view.columns}`, views: [view] });
    } else tiles.push(view);
  }
  if (tiles.length) result.push({ name: `${tiles.length} tiles of ${tiles[0].rows} × ${tiles[0].columns}`, views: tiles });
  return result.reverse(); // the finest first
}

const loaded = new Map();
function picture(file) {
  if (!loaded.has(file)) {
    const image = new Image();
    image.src = DATA.images[file];
    loaded.set(file, image.decode().then(() => image));
  }
  return loaded.get(file);
}

async function paint(canvas, image, layout, views, share) {
  const context = canvas.getContext("2d");
  const drawn = image && image.file && DATA.images[image.file] ? await picture(image.file) : null;
  const evicted = ink("--evicted");
  const width = 640;
  const height = drawn ? Math.round((width * drawn.naturalHeight) / drawn.naturalWidth) : 0;
  const strip = views.length || !layout.tokens ? 0 : 46;
  canvas.width = width;
  canvas.height = height + strip;
  context.imageSmoothingQuality = "high";
  if (drawn) context.drawImage(drawn, 0, 0, width, height);
  for (const view of views) {
    const [left, top, right, bottom] = view.box;
    const stepX = ((right - left) * width) / view.columns, stepY = ((bottom - top) * height) / view.rows;
    for (let row = 0; row < view.rows; row++)
      for (let column = 0; column < view.columns; column++) {
        const kept = share[layout.start + view.start + row * view.stride + column];
        if (kept >= 1) continue;
        const x0 = Math.max(0, Math.round(left * width + column * stepX)), x1 = Math.min(width, Math.round(left * width + (column + 1) * stepX));
        const y0 = Math.max(0, Math.round(top * height + row * stepY)), y1 = Math.min(height, Math.round(top * height + (row + 1) * stepY));
        context.fillStyle = `rgba(${evicted},${(0.84 * (1 - Math.sqrt(kept))).toFixed(3)})`;
        if (x1 > x0 && y1 > y0) context.fillRect(x0, y0, x1 - x0, y1 - y0);
      }
  }
  if (strip) {
    for (let place = 0; place < layout.tokens; place++) {
      context.fillStyle = `rgba(${ink("--heat")},${(0.05 + 0.95 * share[layout.start + place]).toFixed(3)})`;
      const x = (place * width) / layout.tokens;
      context.fillRect(x, height + 4, Math.max(1, width / layout.tokens), strip - 8);
    }
  }
}

function verdict(text, score, differs) {
  const kind = score === null ? "" : score >= 0.999 ? "good" : score <= 0.001 ? "bad" : "part";
  const mark = { good: "✓", bad: "✗", part: "◐", "": "" }[kind];
  return make("span", { className: `answer ${kind}${differs ? " other" : ""}`, title: differs ? "differs from the full cache's answer" : "" }, mark ? make("b", { textContent: mark }) : null, text === null ? "-" : text || "(empty)");
}

let drawing = 0;
async function drawOverlays() {
  const overlay = group.overlays[$("question").value];
  if (!overlay) return;
  const mine = ++drawing;
  const question = group.questions.find((one) => one.key === $("question").value);
  const place = Number($("image").value || 0), head = Number($("head").value), layer = Number($("layer").value) - 1;
  $("layer-name").textContent = layer < 0 ? "all" : overlay.layers[layer];
  $("asked").textContent = question ? question.q : "";
  $("asked-gold").textContent = question && question.gold ? "→ " + question.gold : "";
  const image = overlay.images[place];
  const sheet = image ? sheets(image.layout)[Number($("sheet").value || 0)] : null;
  const cards = [];
  for (const [cell, index] of cellsOf($("survivor-size").value)) {
    const kept = overlay.cells[index];
    if (!kept) continue;
    const [vision, text] = await Promise.all([keptShares(kept.vision, layer, head), keptShares(kept.text, layer, head)]);
    const card = make("article", { className: "card" });
    card.dataset.series = cell.series;
    if (image) {
      const canvas = make("canvas", {});
      canvas.setAttribute("aria-label", `image patches that ${cell.series} kept`);
      await paint(canvas, image, image.layout, sheet ? sheet.views : [], vision);
      card.append(canvas);
    }
    const mean = (shares) => (shares.length ? shares.reduce((a, b) => a + b, 0) / shares.length : null);
    const differs = question && group.cells[0].method === "full" && question.a[0] !== question.a[index];
    const body = make("div", { className: "body" }, make("h3", {}, dot(cell.series), label(cell.series)));
    if (question) body.append(verdict(question.a[index], question.s[index], differs));
    const parts = [["image", mean(vision)], ["text", mean(text)]].filter(([, share]) => share !== null);
    body.append(make("p", { className: "numbers", textContent: "keeps " + parts.map(([name, share]) => `${percent(share)} of the ${name}`).join(", ") }));
    if (image && image.layout.note) body.append(make("p", { className: "note", textContent: image.layout.note }));
    const first = Math.max(0, overlay.pieces.length - 300);
    body.append(make("p", { className: "text" }, first ? "… " : "", ...overlay.pieces.slice(first).map((piece, at) => {
      const span = make("span", { textContent: piece.replaceAll("\n", "↵"), style: `opacity:${(0.22 + 0.78 * text[first + at]).toFixed(2)};background:rgba(${ink("--heat")},${(0.2 * text[first + at]).toFixed(2)})` });
      return span;
    })));
    card.append(body);
    cards.push(card);
  }
  if (mine === drawing) $("overlays").replaceChildren(...cards);
}

function setOverlayPickers(keep) {
  const overlay = group.overlays[$("question").value];
  if (!overlay) return;
  $("layer").max = overlay.layers.length;
  if (!keep) $("layer").value = 0;
  fill($("head"), [[SHARE_OF_HEADS, "share of heads"], ...[...Array(overlay.kv_heads).keys()].map((head) => [head, `head ${head}`])], true);
  fill($("image"), overlay.images.map((_, place) => [place, place + 1]), true);
  $("image-pick").hidden = overlay.images.length < 2;
  const image = overlay.images[Number($("image").value || 0)];
  const names = image ? sheets(image.layout).map((sheet) => sheet.name) : [];
  fill($("sheet"), names.map((name, place) => [place, name]), true);
  $("sheet-pick").hidden = names.length < 2;
}

// -- answers

function differing(question, indices) {
  return indices.filter((index) => question.a[index] !== null && question.a[index] !== question.a[0]);
}

function passes(question, indices) {
  const wanted = $("filter").value, search = $("search").value.trim().toLowerCase();
  const full = group.cells[0].method === "full";
  const wrong = indices.filter((index) => question.s[index] !== null && question.s[index] < 0.999);
  if (wanted === "differs" && !(full && differing(question, indices).length)) return false;
  if (wanted === "wrong" && !wrong.length) return false;
  if (wanted === "lost" && !(full && question.s[0] >= 0.999 && wrong.length)) return false;
  if (wanted === "image" && !group.overlays[question.key]) return false;
  const text = [question.q, question.gold, ...indices.map((index) => question.a[index] ?? "")].join("\n").toLowerCase();
  return !search || text.includes(search);
}

function drawSamples() {
  const cells = cellsOf($("sample-size").value);
  const indices = cells.map(([, index]) => index);
  const found = group.questions.filter((question) => passes(question, indices));
  const full = group.cells[0].method === "full";
  const more = group.all_questions > group.questions.length ? ` (the page holds the first ${group.questions.length} of ${group.all_questions})` : "";
  $("samples-count").textContent = `${found.length} of ${group.questions.length} questions${more}. ✓ right, ✗ wrong, ◐ in part; underlined: not the full cache's answer.`;
  $("sample-list").replaceChildren(...found.slice(0, shown).map((question) => {
    const overlay = group.overlays[question.key];
    const file = overlay && overlay.images.find((image) => image.file)?.file;
    const answers = make("dl", {}, ...cells.map(([cell, index]) => make("div", {}, make("dt", { textContent: label(cell.series) }), make("dd", {}, verdict(question.a[index], question.s[index], full && index > 0 && question.a[index] !== question.a[0])))));
    const text = make("div", {}, make("p", { className: "ask" }, question.q + " ", make("small", { textContent: question.gold ? "→ " + question.gold : "" })), answers);
    const row = make("article", { className: file ? "sample" : "sample plain" }, file ? make("img", { src: DATA.images[file], alt: "the question's image", title: "show what survives of it" }) : null, text);
    if (file) row.firstChild.addEventListener("click", () => {
      $("question").value = question.key;
      $("survivor-size").value = $("sample-size").value;
      setOverlayPickers(true);
      drawOverlays();
      $("survivors").scrollIntoView({ behavior: "smooth" });
    });
    return row;
  }));
  $("more").hidden = found.length <= shown;
}

// -- a group of cells

function show(index) {
  group = DATA.groups[index];
  group.series ??= [...new Set(group.cells.map((cell) => cell.series))].sort((a, b) => (b === "full") - (a === "full"));
  group.labels ??= new Map(group.cells.map(({ series, method }) => {
    const alone = group.cells.every((cell) => cell.method !== method || cell.series === series);
    return [series, alone ? method : series];
  }));
  hidden = new Set();
  order = { column: null, descending: false };
  shown = PAGE;
  const sizes = [...new Set(group.cells.filter((cell) => cell.method !== "full").map((cell) => cell.size))];
  sizes.sort((a, b) => parseFloat(b.replace("budget ", "")) - parseFloat(a.replace("budget ", "")));
  for (const id of ["budget-size", "survivor-size", "sample-size"]) {
    fill($(id), sizes.map((size) => [size, sizeName(size)]));
    if (sizes.length) $(id).value = sizes[Math.floor((sizes.length - 1) / 2)];
    $(id).parentElement.hidden = sizes.length < 2;
  }
  const scored = group.cells.some((cell) => cell.score !== null);
  const heads = group.cells.some((cell) => cell.per_head);
  const keys = Object.keys(group.overlays);
  $("cells").hidden = !group.cells.some((cell) => cell.score !== null || cell.ttft_s !== null);
  $("plots").hidden = !scored;
  $("budgets").hidden = !group.cells.some((cell) => cell.method !== "full" && (cell.per_head || cell.per_layer));
  const foreseen = group.cells.some((cell) => cell.needs_kept);
  $("budget-of").parentElement.hidden = !foreseen;
  if (!foreseen) $("budget-of").value = "entries";
  $("survivors").hidden = !keys.length;
  $("samples").hidden = group.questions.length < 2;
  const options = [...group.labels].filter(([series, name]) => series !== name).map(([series]) => series);
  $("cells-lead").textContent = `${group.cells.length} cells. Choose a column to sort by it.` + (options.length ? ` Options: ${options.join("; ")}.` : "");
  $("cells-warning").textContent = group.warning;
  $("cells-warning").hidden = !group.warning;
  $("budgets-lead").textContent = heads ? `One row per layer, one column per KV head: the mean over ${keys.length} question${keys.length > 1 ? "s" : ""}.` : "One row per layer, the mean over all questions. (Run with --overlays N to see KV heads apart.)";
  $("survivors-lead").textContent = "Patches of the image and words of the prompt that are still in the KV cache when the answer is done; what was evicted is dark or pale.";
  const names = keys.map((key) => [key, (group.questions.find((one) => one.key === key)?.q ?? key).split("\n")[0].slice(0, 90)]);
  fill($("question"), names);
  $("question").parentElement.hidden = keys.length < 2;
  drawTable();
  drawLegend();
  drawPlots();
  drawMaps();
  setOverlayPickers(false);
  drawOverlays();
  drawSamples();
}

fill($("group"), DATA.groups.map((one, index) => [index, one.title]));
$("group").hidden = DATA.groups.length < 2;
if (DATA.groups.length < 2) $("group").after(make("b", { textContent: DATA.groups[0].title }));
$("note").textContent = DATA.note ?? "";
$("group").addEventListener("change", () => show(Number($("group").value)));
for (const id of ["x-size", "x-time"]) $(id).addEventListener("change", drawPlots);
$("budget-size").addEventListener("change", drawMaps);
$("budget-of").addEventListener("change", drawMaps);
$("question").addEventListener("change", () => { setOverlayPickers(true); drawOverlays(); });
$("image").addEventListener("change", () => { setOverlayPickers(true); drawOverlays(); });
for (const id of ["survivor-size", "head", "sheet"]) $(id).addEventListener("change", drawOverlays);
$("layer").addEventListener("input", drawOverlays);
for (const id of ["sample-size", "filter"]) $(id).addEventListener("change", () => { shown = PAGE; drawSamples(); });
$("search").addEventListener("input", () => { shown = PAGE; drawSamples(); });
$("more").addEventListener("click", () => { shown += PAGE; drawSamples(); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawPlots(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(Number($("group").value)));
show(0);
