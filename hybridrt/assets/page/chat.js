"use strict";
// The chat. A turn that fails or is stopped does not become part of the conversation.
const at = (id) => document.getElementById(id);
const MAX_IMAGES = 8, MAX_IMAGE_BYTES = 8 << 20;
let conversation = [];
let running = null; // an AbortController while an answer comes
let images = []; // data: URLs that the next message brings
let asked = []; // calls of the last answer whose results are missing: {id, field}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Cuts whole events off the front of a stream's text: [their data, the rest].
function takeEvents(text) {
  const parts = text.replaceAll("\r\n", "\n").split("\n\n");
  const rest = parts.pop();
  const data = parts.map((part) => part.split("\n").filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart()).join("\n")).filter((each) => each);
  return [data, rest];
}

class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// Sends a request with the key that is typed in. Raises Refused with the server's words.
async function ask(path, options = {}) {
  const key = at("key").value.trim();
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...options.headers };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  let text = `status ${answer.status}`;
  try { text = (await answer.json()).error.message; } catch { /* no JSON: the status says it */ }
  throw new Refused(answer.status, text);
}

// Keeps the end of the log in sight, unless the reader has scrolled up.
function follow(change) {
  const log = at("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const found = change();
  if (atEnd) log.scrollTop = log.scrollHeight;
  return found;
}

function addTurn(kind, title) {
  return follow(() => {
    const turn = element("article", { className: kind, ariaLabel: title }, element("h3", { textContent: title }));
    at("log").append(turn);
    return turn;
  });
}

function addText(turn, kind, text) {
  follow(() => turn.append(element("p", { className: kind, textContent: text })));
}

// Writes an answer into a turn as it comes, and collects the message.
class Answer {
  constructor(turn) {
    this.turn = turn;
    this.texts = {}; // text nodes of the paragraphs
    this.calls = [];
    this.usage = this.reason = null;
    this.began = performance.now();
    this.first = this.last = null;
  }

  write(kind, text) {
    if (!this.texts[kind]) {
      this.texts[kind] = document.createTextNode("");
      this.turn.append(element("p", { className: kind }, this.texts[kind]));
    }
    this.texts[kind].appendData(text);
  }

  read(event) {
    if (event.error) throw new Error(event.error.message);
    this.usage = event.usage || this.usage;
    const choice = event.choices && event.choices[0];
    if (!choice) return;
    this.reason = choice.finish_reason || this.reason;
    const delta = choice.delta || {}, reasoning = delta.reasoning_content || delta.reasoning;
    if (reasoning) this.write("reasoning", reasoning);
    if (delta.content) this.write("assistant", delta.content);
    for (const part of delta.tool_calls || []) this.readCall(part);
    if (reasoning || delta.content || delta.tool_calls) {
      this.last = performance.now();
      this.first = this.first || this.last;
    }
  }

  readCall(part) {
    const call = this.calls[part.index] || (this.calls[part.index] = { id: "", name: "", arguments: "", box: null });
    call.id = part.id || call.id;
    call.name = (part.function && part.function.name) || call.name;
    call.arguments += (part.function && part.function.arguments) || "";
    if (!call.box) {
      call.box = element("div", { className: "call" }, element("code"));
      this.turn.append(call.box);
    }
    call.box.firstChild.textContent = `${call.name}(${call.arguments})`;
  }

  message() {
    const found = { role: "assistant", content: this.texts.assistant ? this.texts.assistant.data : null };
    if (this.calls.length) {
      found.tool_calls = this.calls.map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    } else if (found.content === null) found.content = "";
    return found;
  }

  figures() {
    const used = this.usage, facts = [];
    if (used) {
      const cached = (used.prompt_tokens_details && used.prompt_tokens_details.cached_tokens) || 0;
      facts.push(`prompt ${used.prompt_tokens} tokens, ${cached} of them cached`, `answer ${used.completion_tokens} tokens`);
      if (used.completion_tokens > 1 && this.last > this.first) {
        facts.push(`${((used.completion_tokens - 1) / (this.last - this.first) * 1000).toFixed(1)} tokens/s`);
      }
    }
    if (this.first) facts.push(`first token after ${(this.first - this.began).toFixed(0)} ms`);
    if (this.reason) facts.push(`ended by ${this.reason}`);
    return facts.join(" · ");
  }
}

async function stream(response, answer) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "", data;
  for (;;) {
    const { done, value } = await reader.read();
    [data, rest] = takeEvents(rest + (done ? decoder.decode() + "\n\n" : decoder.decode(value, { stream: true })));
    follow(() => data.filter((each) => each !== "[DONE]").forEach((each) => answer.read(JSON.parse(each))));
    if (done) return;
  }
}

function requestBody(messages) {
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  const tools = at("tools").value.trim(), system = at("system").value.trim();
  body.max_completion_tokens = Number(at("most").value) || 256;
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (system) body.messages = [{ role: "system", content: system }, ...messages];
  if (tools) {
    try { body.tools = JSON.parse(tools); } catch (error) { throw new Error(`The tools are no JSON: ${error.message}`); }
    body.tool_choice = at("choice").value;
  }
  return JSON.stringify(body);
}

// What the form has to say: results of calls, then a message.
function newMessages() {
  const text = at("text").value.trim();
  const found = asked.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.field.value }));
  if (images.length) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    found.push({ role: "user", content: text ? [...parts, { type: "text", text }] : parts });
  } else if (text) found.push({ role: "user", content: text });
  return found;
}

function showMessage(text, pictures) {
  const turn = addTurn("user", "You");
  for (const url of pictures) follow(() => turn.append(element("img", { src: url, alt: "An image of this message" })));
  if (text) addText(turn, "", text);
  return turn;
}

function askForResults(answer) {
  asked = answer.calls.map((call) => {
    const field = element("input", { type: "text", name: "result" });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); send(); }
    });
    call.box.append(element("label", {}, `Result of ${call.name} `, field));
    return { id: call.id, field };
  });
  if (asked.length) asked[0].field.focus();
}

function setRunning(controller) {
  running = controller;
  at("send").disabled = controller !== null;
  at("stop").disabled = controller === null;
  at("log").setAttribute("aria-busy", String(controller !== null)); // read out as a whole
}

async function send() {
  const added = newMessages(), text = at("text").value.trim(), pictures = images;
  if (!added.length || running) return;
  const results = asked, fromResult = results.some((call) => call.field === document.activeElement);
  setRunning(new AbortController());
  const turn = text || pictures.length ? showMessage(text, pictures) : null;
  at("text").value = "";
  setImages([]);
  const reply = addTurn("model", "Model"), answer = new Answer(reply);
  try {
    const messages = [...conversation, ...added];
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal: running.signal };
    await stream(await ask("v1/chat/completions", { ...options, body: requestBody(messages) }), answer);
    results.forEach((call) => { call.field.readOnly = true; });
    conversation = [...messages, answer.message()];
    if (fromResult) at("text").focus();
    askForResults(answer);
    addText(reply, "figures-of-answer", answer.figures());
  } catch (error) {
    drop(error, reply, turn);
    if (!at("text").value) at("text").value = text;
    if (!images.length) setImages(pictures);
  }
  setRunning(null);
}

// The message returns to the form, where it can be changed and sent again.
function drop(error, reply, turn) {
  for (const each of [reply, turn]) if (each) each.classList.add("dropped");
  const stopped = error.name === "AbortError";
  addText(reply, "error", stopped ? "Stopped. This turn is not part of the conversation." : error.message);
  if (error.status === 401) {
    at("settings").open = true;
    at("key").focus();
  }
}

function setImages(found) {
  images = found;
  at("images").replaceChildren(...images.map((url, place) => {
    const remove = element("button", { type: "button", textContent: "Remove" });
    remove.setAttribute("aria-label", `Remove image ${place + 1}`);
    remove.addEventListener("click", () => { setImages(images.filter((_, i) => i !== place)); at("text").focus(); });
    return element("li", {}, element("img", { src: url, alt: `Image ${place + 1}` }), remove);
  }));
}

async function addImages(files) {
  for (const file of files) {
    if (images.length >= MAX_IMAGES || file.size > MAX_IMAGE_BYTES) {
      const text = `${file.name} is left out: a message has up to ${MAX_IMAGES} images of ${MAX_IMAGE_BYTES >> 20} MiB each.`;
      addText(addTurn("model", "This page"), "error", text);
      continue;
    }
    const url = await new Promise((done, fail) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = () => fail(reader.error);
      reader.readAsDataURL(file);
    });
    setImages([...images, url]);
  }
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
at("stop").addEventListener("click", () => { if (running) running.abort(); });
at("clear").addEventListener("click", () => {
  if (running) return;
  conversation = [];
  asked = [];
  setImages([]);
  at("log").replaceChildren();
  at("text").focus();
});
at("attach").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", () => { addImages([...at("file").files]); at("file").value = ""; });
at("text").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (files.length && !at("attach").disabled) { event.preventDefault(); addImages(files); }
});
