// The engine's figures, read each second while the page is in sight.
const READ_MS = 1000, GIVE_UP_MS = 10000, LANE = 15, MAX_LANES = 40;
let before = null; // the answer that was read last

const number = (value) => value.toLocaleString("en");
const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "-");
const milliseconds = (value) => `${value.toFixed(value < 10 ? 2 : 1)} ms`;
const show = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };

function drawn(name, attributes, title) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (title) made.append(drawnText("title", {}, title));
  return made;
}

function drawnText(name, attributes, text) {
  const made = drawn(name, attributes);
  made.textContent = text;
  return made;
}

// The value that a share of the sorted values does not exceed.
function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

function showAbout(about) {
  show("model", about.model);
  show("facts", `${about.architecture}, ${about.dtype} on ${about.device}, contexts up to ${number(about.max_model_len)} `
    + `tokens, version ${about.version}`);
  at("attach").disabled = !about.sees_images;
  at("attach").title = about.sees_images ? "" : "This model takes no images.";
}

function showFigures(now) {
  show("running", `${number(now.running)} of ${number(now.rows)}`);
  show("waiting", number(now.waiting));
  show("hits", percent(now.prefix_cache.hit, now.prefix_cache.asked));
  const seconds = before ? now.seconds - before.seconds : 0;
  if (seconds <= 0) return;
  show("output-rate", ((now.tokens.output - before.tokens.output) / seconds).toFixed(1));
  show("prompt-rate", ((now.tokens.computed - before.tokens.computed) / seconds).toFixed(1));
}

function showMemory(id, shares) {
  const other = Math.max(shares.total - shares.used - shares.cached - shares.free, 0);
  const parts = [shares.used, shares.cached, other, shares.free];
  [...at(`${id}-bar`).children].forEach((part, i) => { part.style.flexGrow = parts[i]; });
  show(id, shares.total
    ? `${number(shares.used)} in use, ${number(shares.cached)} cached, ${number(shares.free)} free`
    : "none: no layer of this model needs them");
}

function showSteps(now) {
  const steps = now.view ? now.view.steps : { total: 0, milliseconds: [], prompt_tokens: [] }, times = steps.milliseconds;
  const most = Math.max(...times, 0), width = at("steps").clientWidth || 400, high = 80;
  const bars = [drawn("line", { class: "rule", x1: 0, x2: width, y1: high - 0.5, y2: high - 0.5 })];
  times.forEach((time, i) => {
    const height = Math.max((high - 2) * time / most, 1), kind = steps.prompt_tokens[i] ? "other" : "used";
    bars.push(drawn("rect", { class: kind, x: width * i / 240, y: high - height, width: width / 240 * 0.8, height }));
  });
  at("steps").setAttribute("viewBox", `0 0 ${width} ${high}`);
  at("steps").replaceChildren(...bars);
  show("step", times.length ? milliseconds(quantile(times, 0.5)) : "-");
  show("steps-text", times.length
    ? `The last ${times.length} of ${counted(steps.total, "step")}: median ${milliseconds(quantile(times, 0.5))}, `
      + `p99 ${milliseconds(quantile(times, 0.99))}, longest ${milliseconds(most)}. Grey: with tokens of prompts.`
    : now.view ? "No step has run yet." : "Replicas keep their steps.");
}

function showRows(now) {
  const rows = now.view ? now.view.rows : [], end = now.view && now.view.ring_end;
  at("row-list").replaceChildren(...rows.map((row) => {
    const whole = row.computed >= row.prompt;
    const cells = [row.row, row.slot || "-", whole ? "decode" : "prompt",
      whole ? number(row.prompt) : `${number(row.computed)} of ${number(row.prompt)}`, number(row.cached),
      `${number(row.output)} of ${number(row.most)}`, number(row.pages)];
    if (end !== null) cells.push(`${row.ring} of ${end}`);
    return element("tr", {}, ...cells.map((text) => element("td", { textContent: text })));
  }));
  at("ring-title").hidden = end === null;
  at("rows").hidden = rows.length === 0;
  const hidden = now.running - rows.length;
  show("rows-text", !now.view ? "Replicas keep their rows." : rows.length === 0 ? "No request runs."
    : hidden > 0 ? `${number(hidden)} more rows run.` : "");
}

// Gives each leaf a lane, and each other node the lane of its latest child. Parents come first in `nodes`.
function lanes(nodes) {
  const below = nodes.map(() => []), roots = [], found = nodes.map(() => -1);
  nodes.forEach((node, place) => (node.parent < 0 ? roots : below[node.parent]).push(place));
  let next = 0;
  const stack = [...roots].reverse();
  while (stack.length) {
    const place = stack.pop();
    for (let node = place; node >= 0 && found[node] < 0; node = nodes[node].parent) found[node] = next;
    if (below[place].length) stack.push(...[...below[place]].reverse());
    else next += 1;
  }
  return [found, next];
}

function drawEdge(node, y, x, from) {
  const left = x(node.start), width = Math.max(x(node.end) - left, 3);
  const title = `tokens ${number(node.start)} to ${number(node.end)}, ${counted(node.pages, "whole KV page")}, `
    + `${node.state ? "a state" : "no state"}, ${counted(node.readers, "reader")}, ${counted(node.children, "continuation")}`;
  const parts = [drawn("rect", { class: node.readers ? "used" : "cached", x: left, y: y - 4, width, height: 8, rx: 2 }, title)];
  if (from !== null && from !== y) parts.unshift(drawn("path", { class: "link", d: `M${left},${from}V${y}` }));
  if (node.state) parts.push(drawn("circle", { class: "dot", cx: left + width, cy: y, r: 4.5 }, title));
  return parts;
}

function showTree(now) {
  const nodes = now.view ? now.view.nodes : [], [found, count] = lanes(nodes);
  const width = at("tree-frame").clientWidth || 400, most = Math.max(...nodes.map((node) => node.end), 1);
  const x = (tokens) => 6 + (width - 18) * tokens / most, y = (lane) => 22 + LANE * lane;
  const high = nodes.length ? y(Math.min(count, MAX_LANES)) : 0;
  const parts = [drawnText("text", { x: 6, y: 10 }, "0"),
    drawnText("text", { x: width - 12, y: 10, "text-anchor": "end" }, `${number(most)} tokens`)];
  nodes.forEach((node, place) => {
    if (found[place] >= MAX_LANES) return;
    parts.push(...drawEdge(node, y(found[place]), x, node.parent < 0 ? null : y(found[node.parent])));
  });
  at("tree").setAttribute("viewBox", `0 0 ${width} ${Math.max(high, 1)}`);
  at("tree").style.height = `${high}px`;
  at("tree").replaceChildren(...(nodes.length ? parts : []));
  const states = nodes.filter((node) => node.state).length, total = now.view ? now.view.nodes_total : 0;
  const text = !now.view ? "Replicas keep their trees." : !nodes.length ? "No text is cached."
    : `${counted(Math.min(count, MAX_LANES), "text")}, the latest use first; ${counted(states, "state")} on `
      + `${number(nodes.length)} of ${counted(total, "edge")}.`;
  show("tree-text", text);
  at("tree").setAttribute("aria-label", text);
}

function showAll(now) {
  showAbout(now.about);
  showFigures(now);
  showMemory("kv", now.kv_pages);
  showMemory("slots", now.state_slots);
  showSteps(now);
  showRows(now);
  showTree(now);
  before = now;
}

function showState(text, wrong) {
  show("state", text);
  at("state").className = wrong ? "wrong" : "";
}

async function poll() {
  try {
    if (!document.hidden) {
      showAll(await (await ask("engine", { signal: AbortSignal.timeout(GIVE_UP_MS) })).json());
      showState("live", false);
    }
  } catch (error) {
    before = null;
    const known = { TimeoutError: "the engine does not answer", TypeError: "the server cannot be reached" }[error.name];
    showState(error.status === 401 ? "an API key is needed: see Settings" : known || error.message, true);
  }
  setTimeout(poll, READ_MS);
}
poll();
