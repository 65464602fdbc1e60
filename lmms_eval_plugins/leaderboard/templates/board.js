const ALL = "";
const FILTERS = [
  ["model", "all models", (cell) => cell.model],
  ["size", "all sizes", (cell) => (cell.method === "full" ? ALL : cell.size), sizeName],
  ["device", "all devices", (cell) => cell.environment.device ?? "not said"],
  ["submission", "all submissions", (cell) => cell.submission],
];
let board = null;
let order = {};
const opened = new Set();

const points = (share) => (group.scale * share).toFixed(1);
const between = (ends) => `[${ends.map(points).join(", ")}]`;
const barOf = (cell) => cell.interval;
const errorText = (cell) => (cell.interval === null ? "" : " " + between(cell.interval));

// -- the table

function nameOf(cell) {
  const more = [cell.model, cell.revision].filter(Boolean).join("@");
  const button = make("button", { className: "name", type: "button", title: "what made this row" }, dot(cell.series), make("span", {}, cell.variant, make("small", { textContent: more })));
  button.setAttribute("aria-expanded", opened.has(cell));
  button.addEventListener("click", () => {
    opened.has(cell) ? opened.delete(cell) : opened.add(cell);
    drawTable();
  });
  return button;
}

const P = "p (Holm)"; // stands with the details: the table is wide enough
const COLUMNS = [
  { name: "method", value: (cell) => cell.series, words: true, show: nameOf },
  { name: "kept (asked)", value: (cell) => cell.realised ?? cell.ratio, show: (cell) => cell.kept },
  { name: "score", value: (cell) => cell.score, show: (cell) => [scoreText(cell), make("small", { textContent: errorText(cell) }), meter(Math.max(0, cell.score) / board.most)] },
  ...TESTS.filter(({ name }) => name !== P),
  { name: "same as full", value: (cell) => cell.same, show: (cell) => percent(cell.same, 0), rare: true },
  { name: "KV cache", value: (cell) => cell.kv_bytes, show: (cell) => bytes(cell.kv_bytes), rare: true },
  { name: "TTFT", value: (cell) => cell.ttft_s, show: (cell) => milliseconds(cell.ttft_s), rare: true },
  { name: "per token", value: (cell) => cell.tpot_s, show: (cell) => milliseconds(cell.tpot_s), rare: true },
  { name: "answers/s", value: (cell) => cell.answers_per_s, show: (cell) => decimal(cell.answers_per_s), rare: true },
];

function details(cell) {
  const copy = make("button", { className: "copy", type: "button", textContent: "copy", hidden: !navigator.clipboard });
  copy.addEventListener("click", () => navigator.clipboard.writeText(cell.command).then(() => (copy.textContent = "copied")));
  const pairs = (object) => Object.entries(object).map(([key, value]) => `${key} ${value}`).join(", ");
  // Columns that do not fit on a phone are listed here.
  const elsewhere = COLUMNS.filter(({ rare }) => rare).map((column) => [column.name, make("span", {}, ...[column.show(cell)].flat()), "narrow"]);
  const facts = [
    ["made by", make("span", {}, make("code", { textContent: cell.command }), copy)],
    ...elsewhere,
    [P, TESTS.find(({ name }) => name === P).show(cell)],
    ["tokens/s", decimal(cell.tokens_per_s)],
    ["on", pairs(cell.environment)],
    ["versions", pairs(cell.versions) + (cell.code ? `, code ${cell.code}` : "")],
    ["submission", [cell.submission, cell.date].filter(Boolean).join(", ")],
  ];
  return make("tr", { className: "more" }, make("td", { colSpan: COLUMNS.length }, make("dl", {}, ...facts.flatMap(([term, said, where]) => [make("dt", { textContent: term, className: where ?? "" }), make("dd", { className: where ?? "" }, said)]))));
}

function drawTable() {
  const columns = COLUMNS.map((column) => (column.name === "score" ? { ...column, title: group.metric } : column));
  const rows = drawRows($("rows-table"), columns, group.cells, order, drawTable);
  [...$("rows-table").tBodies[0].rows].forEach((row, place) => opened.has(rows[place]) && row.after(details(rows[place])));
}

// -- which method

// The board of each regime, model and kind of ratio that has most methods to choose from.
function choices() {
  const found = new Map();
  for (const each of DATA.boards.filter(({ choice }) => choice)) {
    const key = [each.regime, each.cells[0].model, each.protocol.ratio_of].join("\n");
    if ((found.get(key)?.choice.methods ?? 0) < each.choice.methods) found.set(key, each);
  }
  return [...found.values()];
}

function drawChoice() {
  const all = choices();
  $("choice").hidden = !all.length && board.best.length < 2;
  $("no-choice").hidden = all.length > 0;
  $("choices").replaceChildren(...all.map((each) => {
    const about = [each.regime, each.cells[0].model, each.protocol.ratio_of === "vision" ? "vision tokens dropped" : ""].filter(Boolean).join(", ");
    const button = make("button", { type: "button" }, make("small", { textContent: about }), make("span", { className: each.choice.is_enough ? "" : "none", textContent: each.choice.text }));
    button.setAttribute("aria-pressed", String(each === board));
    button.addEventListener("click", () => {
      for (const [id, key] of PICKS) {
        $(id).value = each[key];
        pick(PICKS.findIndex(([other]) => other === id), false);
      }
      show(each);
    });
    return make("li", {}, button);
  }));
  const best = board.cells.filter((cell) => cell.method === "full" || board.best.includes(cell.variant));
  const whole = group;
  group = { ...whole, cells: best };
  drawPlot($("plot-best"), "ratio", true, (share) => percent(share, 0), "share kept, as asked");
  $("best-names").replaceChildren(...[...new Set(best.map(({ series }) => series))].map(named));
  group = whole;
  const competing = board.cells.filter(({ method }) => method !== "full" && method !== "hindsight");
  $("best-caption").textContent = `${board.regime}: the best of ${new Set(competing.map(({ variant }) => variant.replace(/ seed=\S+/, ""))).size} methods`;
}

// -- which rows

function passes(cell) {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const named = !words.length || words.some((word) => cell.variant.toLowerCase().includes(word));
  // Every size is compared with the full cache, so it is always shown.
  return named && FILTERS.every(([id, , of]) => $(id).value === ALL || of(cell) === $(id).value || (id === "size" && cell.method === "full"));
}

function draw() {
  group.cells = board.cells.filter(passes);
  $("rows-count").textContent = `${group.cells.length} of ${board.cells.length} rows. Click a column to sort by it, or a name to see the command that produced the row.`;
  drawTable();
  drawChoice();
  drawLegend();
  drawPlots();
}

function show(chosen) {
  board = chosen;
  board.most ??= Math.max(...board.cells.map((cell) => cell.score)) || 1;
  const series = [...new Set(board.cells.map((cell) => cell.series))];
  group = { ...board, all: board.cells, series, labels: new Map(series.map((each) => [each, each])) };
  hidden = new Set();
  order = { column: "score", descending: !board.is_lower_better };
  for (const [id, all, of, text] of FILTERS) {
    const values = [...new Set(board.cells.map(of))].filter((value) => value !== ALL);
    if (id === "size") values.sort((a, b) => parseFloat(b.replace("budget ", "")) - parseFloat(a.replace("budget ", "")));
    fill($(id), [[ALL, all], ...values.map((value) => [value, text ? text(value) : value])]);
    $(`${id}-pick`).hidden = values.length < 2;
  }
  $("board-lead").textContent = `${Object.entries(board.protocol).map(([key, value]) => `${key}=${value}`).join(", ")}; ${board.questions} questions. Rows with another protocol are in a separate table.`;
  $("board-warning").textContent = board.warning;
  $("board-warning").hidden = !board.warning;
  draw();
}

// -- which table

const PICKS = [["regime", "regime"], ["task", "task"], ["protocol", "protocol_text"]];

// Each list offers the values left by the lists before it.
function pick(from, isShown = true) {
  let left = DATA.boards;
  for (const [place, [id, key]] of PICKS.entries()) {
    const values = [...new Set(left.map((each) => each[key]))];
    if (place > from) fill($(id), values.map((value) => [value, value]), true);
    left = left.filter((each) => each[key] === $(id).value);
  }
  if (isShown) show(left[0]);
}

PICKS.forEach(([id], place) => $(id).addEventListener("change", () => pick(place)));
for (const [id] of FILTERS) $(id).addEventListener("change", draw);
$("search").addEventListener("input", draw);
for (const id of ["x-size", "x-time"]) $(id).addEventListener("change", drawPlots);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawChoice(); drawPlots(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
pick(-1, false);
const first = choices()[0];
if (first) for (const [place, [id, key]] of PICKS.entries()) { $(id).value = first[key]; pick(place, place === PICKS.length - 1); }
else pick(-1);
