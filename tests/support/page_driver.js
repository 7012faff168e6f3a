// Runs the script of the page with a stub of the document. Sends two messages and prints as JSON what the page shows then.
// Arguments: the file of the script, the server's address, the API key.
"use strict";
const fs = require("fs");
const vm = require("vm");
const [script, base, key] = process.argv.slice(2);

function element() {
  const listeners = {};
  return {
    textContent: "", value: "", className: "", disabled: false, children: [], attributes: {},
    append(child) { this.children.push(child); },
    replaceChildren() { this.children = []; },
    setAttribute(name, value) { this.attributes[name] = value; },
    addEventListener(name, run) { listeners[name] = run; },
    fire(name, event = {}) { listeners[name]({ preventDefault() {}, ...event }); },
  };
}
const elements = {};
const document = { getElementById: (id) => (elements[id] = elements[id] || element()), createElement: element };
const at = (id) => document.getElementById(id);
const asked = [];
const get = (path, options) => { asked.push({ path, body: options.body }); return fetch(`${base}/${path}`, options); };
at("key").value = key || "";
at("most").value = "4";
const timer = (run) => setTimeout(run, 30);
const world = vm.createContext({ document, fetch: get, performance, TextDecoder, AbortController, setTimeout: timer });
vm.runInContext(fs.readFileSync(script, "utf8"), world);

const idle = () => new Promise((done) => {
  const look = () => (at("stop").disabled ? done() : setTimeout(look, 5));
  setTimeout(look, 5);
});
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
(async () => {
  for (const text of ["<b>one</b>", "two"]) {
    at("text").value = text;
    at("text").fire("keydown", { key: "Enter", shiftKey: false });
    await idle();
  }
  await wait(150);
  const shown = Object.fromEntries(Object.entries(elements).map(([id, each]) => [id, each.textContent]));
  const log = at("log").children.map((line) => [line.className, line.textContent]);
  const bodies = asked.filter((each) => each.body).map((each) => JSON.parse(each.body));
  const events = vm.runInContext('takeEvents("data: a\\r\\n\\r\\n: no\\n\\ndata: b\\ndata: c\\n\\ndata: d")', world);
  console.log(JSON.stringify({ shown, log, bodies, events, points: at("steps").attributes.points }));
  process.exit(0);
})();
