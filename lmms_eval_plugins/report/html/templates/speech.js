// The page of a speech run: a table of all caches, and each prompt's answers with their sound.
const seconds = (value) => (value === null ? "-" : value < 0.01 ? milliseconds(value) : Number(value.toPrecision(3)) + " s");
const plain = (value) => (value === null ? "-" : String(Number(value.toPrecision(3))));
const SIDE = 10, TOP = 24, BOTTOM = 22;

// -- the table

const COLUMNS = [
  { name: "cache", words: true, value: (row) => row.label, show: (row) => row.label },
  { name: "start", words: true, value: (row) => row.start, show: (row) => row.start },
  { name: "first text", rare: true, value: (row) => row.first_text_s, show: (row) => seconds(row.first_text_s) },
  { name: "text", rare: true, value: (row) => row.text_s, show: (row) => seconds(row.text_s) },
  { name: "first codec token", rare: true, value: (row) => row.first_code_s, show: (row) => seconds(row.first_code_s) },
  { name: "first byte", value: (row) => row.first_audio_s, show: (row) => seconds(row.first_audio_s) },
  { name: "whole waveform", rare: true, value: (row) => row.waveform_s, show: (row) => seconds(row.waveform_s) },
  { name: "real-time factor", rare: true, value: (row) => row.real_time_factor, show: (row) => plain(row.real_time_factor) },
  { name: "KV cache", value: (row) => row.kv_bytes, show: (row) => bytes(row.kv_bytes) },
  { name: "talker's", rare: true, value: (row) => row.talker_kv_bytes, show: (row) => bytes(row.talker_kv_bytes) },
].filter(({ value }) => DATA.rows.some((row) => value(row) !== null));
const order = { column: null, descending: false };

function drawTable() {
  drawRows($("rows-table"), COLUMNS, DATA.rows, order, drawTable);
}

// -- a waveform

// Starts when `generate` is called; all answers to a prompt have the same scales. The sound is drawn at the time it is
// heard by somebody who listens from the first byte on.
function drawWave(where, answer, end, loudest, audio) {
  const width = where.clientWidth, height = where.clientHeight;
  const along = (time) => SIDE + ((width - 2 * SIDE) * time) / end;
  const middle = (TOP + height - BOTTOM) / 2, reach = (height - BOTTOM - TOP) / 2;
  const start = answer.first_audio_s;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `waveform, first byte after ${seconds(start)}` });
  for (const tick of ticks(0, end, false)) {
    drawing.append(svg("line", { class: "axis", x1: along(tick), x2: along(tick), y1: TOP, y2: height - BOTTOM }));
    if (along(tick) < width - 16) drawing.append(svg("text", { x: along(tick), y: height - 6, "text-anchor": tick ? "middle" : "start" }, tick ? String(Number(tick.toPrecision(3))) : "0 s"));
  }
  drawing.append(svg("rect", { class: "text", x: along(answer.first_text_s), y: height - BOTTOM - 3, width: Math.max(1, along(answer.text_s) - along(answer.first_text_s)), height: 3 }));
  if (answer.low) {
    const bins = answer.low.length, at = (bin) => along(start + (answer.audio_s * bin) / bins).toFixed(2);
    const y = (sample) => (middle - (reach * sample) / loudest).toFixed(2);
    const above = answer.high.map((sample, bin) => `${at(bin + 0.5)} ${y(sample)}`);
    const below = answer.low.map((sample, bin) => `${at(bin + 0.5)} ${y(sample)}`).reverse();
    drawing.append(svg("path", { class: "sound", d: `M${at(0)} ${middle}L${above.join("L")}L${at(bins)} ${middle}L${below.join("L")}Z` }));
  }
  drawing.append(svg("line", { class: "byte", x1: along(start), x2: along(start), y1: 6, y2: height - BOTTOM }));
  const isRight = along(start) > width - 130;
  drawing.append(svg("text", { class: "byte-name", x: along(start) + (isRight ? -5 : 5), y: 15, "text-anchor": isRight ? "end" : "start" }, `first byte ${seconds(start)}`));
  const now = svg("line", { class: "now", x1: 0, x2: 0, y1: TOP - 6, y2: height - BOTTOM, visibility: "hidden" });
  drawing.append(now);
  where.replaceChildren(drawing);
  if (!audio) return;
  const move = () => {
    const x = along(start + audio.currentTime);
    for (const [name, value] of [["x1", x], ["x2", x], ["visibility", audio.currentTime ? "visible" : "hidden"]]) now.setAttribute(name, value);
    if (!audio.paused && now.isConnected) requestAnimationFrame(move);
  };
  audio.onplay = audio.onseeked = audio.ontimeupdate = move;
  where.onclick = (event) => {
    const time = ((event.clientX - where.getBoundingClientRect().left - SIDE) / (width - 2 * SIDE)) * end - start;
    audio.currentTime = Math.max(0, Math.min(time, answer.audio_s));
  };
}

// -- the answers

const FACTS = [
  ["first text", (answer) => seconds(answer.first_text_s)],
  ["text", (answer) => `${seconds(answer.text_s)}, ${answer.text_tokens} tokens`],
  ["first codec token", (answer) => answer.first_code_s === null ? null : seconds(answer.first_code_s)],
  ["first byte", (answer) => answer.first_audio_s === null ? null : seconds(answer.first_audio_s)],
  ["whole waveform", (answer) => answer.waveform_s === null ? null : `${seconds(answer.waveform_s)}, of ${seconds(answer.audio_s)} of sound`],
  ["underruns", (answer) => answer.underruns === null ? null : String(answer.underruns)],
  ["KV cache", (answer) => bytes(answer.kv_bytes) + (answer.realised_ratio === null ? "" : `, ${percent(answer.realised_ratio)} of the prompt kept`)],
  ["talker's KV cache", (answer) => answer.talker_kv_bytes === null ? null : bytes(answer.talker_kv_bytes)],
];
const waves = [];

function card(answer, end, loudest) {
  const body = make("div", { className: "body" }, make("h3", { textContent: answer.label }));
  if (answer.error) {
    body.append(make("p", { className: "note", textContent: answer.error }));
    return make("article", { className: "card" }, body);
  }
  const audio = answer.audio && make("audio", { controls: true, preload: "metadata", src: answer.audio });
  if (audio) {
    audio.addEventListener("play", () => document.querySelectorAll("audio").forEach((other) => other !== audio && other.pause()));
    body.append(audio);
  } else if (answer.audio_s !== null) body.append(make("p", { className: "note", textContent: "No sound was saved: run with --html or --save-audio." }));
  const facts = FACTS.map(([name, text]) => [name, text(answer)]).filter(([, text]) => text !== null);
  body.append(make("p", { className: "said answer", textContent: answer.text }));
  body.append(make("dl", { className: "facts" }, ...facts.flatMap(([dt, dd]) => [make("dt", { textContent: dt }), make("dd", { textContent: dd })])));
  if (answer.first_audio_s === null) return make("article", { className: "card" }, body);
  const wave = make("div", { className: "wave" });
  waves.push(() => drawWave(wave, answer, end, loudest, audio));
  return make("article", { className: "card" }, wave, body);
}

function drawPrompt(prompt) {
  const spoken = prompt.answers.filter((answer) => !answer.error && answer.first_audio_s !== null);
  const end = Math.max(...spoken.map((answer) => answer.first_audio_s + answer.audio_s));
  const loudest = Math.max(1e-4, ...spoken.flatMap((answer) => [...(answer.high ?? []), ...(answer.low ?? [])].map(Math.abs)));
  const media = [prompt.image && "with a picture", prompt.audio_s && `with ${seconds(prompt.audio_s)} of sound`].filter(Boolean);
  const asked = make("p", { className: "asked" }, prompt.text, media.length ? make("span", { textContent: ` (${media.join(", ")})` }) : null);
  return make("div", { className: "prompt" }, asked, make("div", { className: "cards" }, ...prompt.answers.map((answer) => card(answer, end, loudest))));
}

$("speech-lead").textContent = DATA.how;
$("answers-lead").textContent = "The last warm round. Each picture starts when generate was called: the line marks the first byte of sound, the bar below it when the text was written. All pictures of a prompt have the same scales."
  + (DATA.all_prompts > DATA.prompts.length ? ` The first ${DATA.prompts.length} of ${DATA.all_prompts} prompts.` : "");
drawTable();
$("prompts").replaceChildren(...DATA.prompts.map(drawPrompt));
const drawWaves = () => waves.forEach((draw) => draw());
drawWaves();
addEventListener("resize", drawWaves);
$("note").replaceChildren(make("code", { textContent: DATA.command }), ` Made on ${DATA.made}.`);
