const SHARE_OF_HEADS = -1;
const PAGE = 20;
let shown = PAGE;
let order = {};

const errorText = (cell) => (cell.stderr === null ? "" : " ± " + (group.scale * cell.stderr).toFixed(1));
const barOf = (cell) => (cell.stderr ? [cell.score - cell.stderr, cell.score + cell.stderr] : null);

// Cells of one size, and the full cache in front.
const cellsOf = (size) => group.cells.map((cell, index) => [cell, index]).filter(([cell]) => cell.method === "full" || cell.size === size);
// -- the table

const COLUMNS = [
  { name: "method", value: (cell) => cell.series, words: true, show: (cell) => named(cell.series) },
  { name: "kept (asked)", value: (cell) => cell.realised ?? cell.ratio, show: (cell) => cell.kept },
  { name: "score", value: (cell) => cell.score, show: (cell) => [scoreText(cell), make("small", { textContent: errorText(cell) }), meter((cell.score ?? 0) / group.most)] },
  { name: "headroom", value: (cell) => cell.headroom?.[0] ?? null, show: (cell) => (cell.headroom ? `${percent(cell.headroom[0], 0)} [${cell.headroom.slice(1).map((end) => (100 * end).toFixed(0)).join(", ")}]` : "-"), rare: true },
  ...TESTS,
  { name: "same as full", value: (cell) => cell.same, show: (cell) => percent(cell.same, 0), rare: true },
  { name: "TTFT", value: (cell) => cell.ttft_s, show: (cell) => milliseconds(cell.ttft_s), rare: true },
  { name: "per token", value: (cell) => cell.tpot_s, show: (cell) => milliseconds(cell.tpot_s), rare: true },
  { name: "answers/s", value: (cell) => cell.answers_per_s, show: (cell) => decimal(cell.answers_per_s), rare: true },
  { name: "tokens/correct", value: (cell) => cell.tokens_per_correct, show: (cell) => decimal(cell.tokens_per_correct), rare: true },
  { name: "answer tokens", value: (cell) => cell.tokens_out, show: (cell) => decimal(cell.tokens_out), rare: true },
  { name: "KV cache", value: (cell) => cell.kv_bytes, show: (cell) => bytes(cell.kv_bytes), rare: true },
  { name: "samples", value: (cell) => cell.samples, show: (cell) => String(cell.samples), rare: true },
];

function drawTable() {
  // Headroom needs the cells of `random` and `hindsight`.
  const columns = COLUMNS.filter(({ name }) => name !== "headroom" || group.cells.some((cell) => cell.headroom));
  drawRows($("cells-table"), columns.map((column) => (column.name === "score" ? { ...column, title: group.metric } : column)), group.cells, order, drawTable);
}

// A row for each method, a column for each requested size: the score, and the measured share where it is not close. The
// best is bold.
function drawMatrix(sizes) {
  const at = (series, size) => group.cells.find((cell) => cell.series === series && (cell.size === size || cell.method === "full"));
  $("matrix").tHead.replaceChildren(make("tr", {}, make("th", { textContent: "method", scope: "col" }), ...sizes.map((size) => make("th", { textContent: sizeName(size) + " asked", scope: "col" }))));
  $("matrix").tBodies[0].replaceChildren(...group.series.map((series) => make("tr", {}, make("td", {}, named(series)), ...sizes.map((size) => {
    const cell = at(series, size);
    if (!cell) return make("td", { textContent: "-" });
    const bracket = cell.kept.includes("(") ? ` keeps ${cell.kept.split(" ")[0]}` : "";
    return make("td", {}, make(cell.is_best ? "b" : "span", { textContent: scoreText(cell) }), make("small", { textContent: bracket }));
  }))));
  $("matrix-section").hidden = sizes.length < 2;
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

const DAMAGED = "the page is damaged: what survives cannot be read";
const inflated = new Map();

// Decompress a zlib stream (RFC 1950, 1951) of known decompressed length. Synchronous: the browser's own
// DecompressionStream would finish only after the page has loaded.
function inflate(stream, size) {
  const out = new Uint8Array(size);
  let from = 2, written = 0, hold = 0, held = 0;
  const take = (count) => {
    for (; held < count; held += 8) {
      if (from >= stream.length) throw new Error(DAMAGED);
      hold |= stream[from++] << held;
    }
    const value = hold & ((1 << count) - 1);
    hold >>>= count;
    held -= count;
    return value;
  };
  const codes = (lengths) => [...Array(16).keys()].map((length) => (length ? lengths.flatMap((own, symbol) => (own === length ? [symbol] : [])) : []));
  const read = (symbols) => {
    for (let length = 1, code = 0, first = 0; length < 16; length++) {
      code |= take(1);
      const count = symbols[length].length;
      if (code < first + count) return symbols[length][code - first];
      first = (first + count) << 1;
      code <<= 1;
    }
    throw new Error(DAMAGED);
  };
  const fixed = [[144, 8], [112, 9], [24, 7], [8, 8]].flatMap(([count, length]) => Array(count).fill(length));
  const own = () => {
    const [literals, distances, steps] = [take(5) + 257, take(5) + 1, take(4) + 4], short = Array(19).fill(0), lengths = [];
    for (let step = 0; step < steps; step++) short[[16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15][step]] = take(3);
    const code = codes(short);
    while (lengths.length < literals + distances) {
      const symbol = read(code);
      if (symbol < 16) lengths.push(symbol);
      else {
        const again = symbol === 16 ? lengths.at(-1) : 0;
        lengths.push(...Array(symbol === 16 ? 3 + take(2) : symbol === 17 ? 3 + take(3) : 11 + take(7)).fill(again));
      }
    }
    return [codes(lengths.slice(0, literals)), codes(lengths.slice(literals))];
  };
  for (let isLast = 0; !isLast; ) {
    isLast = take(1);
    const kind = take(2);
    if (kind === 0) {
      const count = stream[(from -= held >> 3)] | (stream[from + 1] << 8); // the rest of a byte is not used
      hold = held = 0;
      if (from + 4 + count > stream.length) throw new Error(DAMAGED);
      out.set(stream.subarray(from + 4, from + 4 + count), written);
      [from, written] = [from + 4 + count, written + count];
      continue;
    }
    const [literals, distances] = kind === 1 ? [codes(fixed), codes(Array(30).fill(5))] : own();
    for (let symbol = read(literals); symbol !== 256; symbol = read(literals)) {
      if (symbol < 256) {
        out[written++] = symbol;
        continue;
      }
      const step = symbol - 257, more = Math.max(0, (step >> 2) - 1);
      const count = step === 28 ? 258 : 3 + (step < 4 ? step : ((4 + (step & 3)) << more) + take(more));
      const far = read(distances), further = Math.max(0, (far >> 1) - 1);
      const distance = 1 + (far < 2 ? far : ((2 + (far & 1)) << further) + take(further));
      for (let end = written + count; written < end; written++) out[written] = out[written - distance];
    }
  }
  return out;
}

function bits(packed) {
  if (!inflated.has(packed)) {
    const stream = Uint8Array.from(atob(packed.bits), (character) => character.charCodeAt(0));
    inflated.set(packed, inflate(stream, Math.ceil(packed.shape.reduce((a, b) => a * b) / 8)));
  }
  return inflated.get(packed);
}

// The share of the chosen heads and layers that kept each token.
function keptShares(packed, layer, head) {
  const [layers, heads, tokens] = packed.shape;
  const stored = bits(packed);
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

// The views grouped into pictures: each view of the whole image is one, and all others are tiles of another.
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

// Call `draw` with the picture, now or once it has loaded; the page's `load` event waits for that.
function withPicture(file, draw) {
  if (!loaded.has(file)) {
    const image = new Image();
    image.src = DATA.images[file];
    loaded.set(file, image);
  }
  const image = loaded.get(file);
  if (image.naturalWidth) draw(image);
  else image.addEventListener("load", () => draw(image));
}

function paint(canvas, drawn, layout, views, share) {
  const context = canvas.getContext("2d");
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
  const kind = score === null ? "" : rightness(score) >= 0.999 ? "good" : rightness(score) <= 0.001 ? "bad" : "part";
  const mark = { good: "✓", bad: "✗", part: "◐", "": "" }[kind];
  return make("span", { className: `answer ${kind}${differs ? " other" : ""}`, title: differs ? "differs from the full cache's answer" : "" }, mark ? make("b", { textContent: mark }) : null, text === null ? "-" : text || "(empty)");
}

function drawOverlays() {
  const overlay = group.overlays[$("question").value];
  if (!overlay) return;
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
    const [vision, text] = [keptShares(kept.vision, layer, head), keptShares(kept.text, layer, head)];
    const card = make("article", { className: "card" });
    card.dataset.series = cell.series;
    if (image) {
      const canvas = make("canvas", {});
      canvas.setAttribute("aria-label", `image patches that ${cell.series} kept`);
      const draw = (drawn) => paint(canvas, drawn, image.layout, sheet ? sheet.views : [], vision);
      if (image.file && DATA.images[image.file]) withPicture(image.file, draw);
      else draw(null);
      card.append(canvas);
    }
    const mean = (shares) => (shares.length ? shares.reduce((a, b) => a + b, 0) / shares.length : null);
    const differs = question && group.cells[0].method === "full" && question.a[0] !== question.a[index];
    const body = make("div", { className: "body" }, make("h3", {}, named(cell.series)));
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
  $("overlays").replaceChildren(...cards);
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
  const wrong = indices.filter((index) => question.s[index] !== null && rightness(question.s[index]) < 0.999);
  if (wanted === "differs" && !(full && differing(question, indices).length)) return false;
  if (wanted === "wrong" && !wrong.length) return false;
  if (wanted === "lost" && !(full && question.s[0] !== null && rightness(question.s[0]) >= 0.999 && wrong.length)) return false;
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
  group.all = group.cells;
  group.series ??= [...new Set(group.cells.map((cell) => cell.series))].sort((a, b) => (b === "full") - (a === "full"));
  group.labels ??= new Map(group.cells.map(({ series, method }) => {
    const alone = group.cells.every((cell) => cell.method !== method || cell.series === series);
    return [series, alone ? method : series];
  }));
  hidden = new Set();
  parts = new Map();
  order = {};
  group.most ??= Math.max(...group.cells.map((cell) => cell.score ?? 0)) || 1;
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
  $("plots").hidden = $("all-settings").hidden = !scored;
  $("budgets").hidden = !group.cells.some((cell) => cell.method !== "full" && (cell.per_head || cell.per_layer));
  const hasNeeds = group.cells.some((cell) => cell.needs_kept);
  $("budget-of").parentElement.hidden = !hasNeeds;
  if (!hasNeeds) $("budget-of").value = "entries";
  $("survivors").hidden = !keys.length;
  $("samples").hidden = group.questions.length < 2;
  const options = [...group.labels].filter(([series, name]) => series !== name).map(([series]) => series);
  $("cells-lead").textContent = `${group.cells.length} cell${group.cells.length === 1 ? "" : "s"}. Click a column to sort by it.` + (options.length ? ` Options: ${options.join("; ")}.` : "") + (group.draws ? ` ${group.draws}` : "");
  $("cells-warning").textContent = group.warning;
  $("cells-warning").hidden = !group.warning;
  $("budgets-lead").textContent = heads ? `One row per layer, one column per KV head: the mean over ${keys.length} question${keys.length > 1 ? "s" : ""}.` : "One row per layer, the mean over all questions. (Run with --overlays N to see each KV head.)";
  $("survivors-lead").textContent = "Patches of the image and words of the prompt that are still in the KV cache when the answer is done; what was evicted is dark or pale.";
  const names = keys.map((key) => [key, (group.questions.find((one) => one.key === key)?.q ?? key).split("\n")[0].slice(0, 90)]);
  fill($("question"), names);
  $("question").parentElement.hidden = keys.length < 2;
  $("made").textContent = group.made;
  drawTable();
  drawMatrix(sizes);
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
