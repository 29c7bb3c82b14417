// The conversation: what was said, and an answer that streams in.

import { events, request } from "./api.js";
import { byId, element } from "./dom.js";
import { MessageView, sent } from "./message.js";
import { requestFields, restoreSettings, systemPrompt } from "./settings.js";

const STORED = "treadle-conversation"; // of this tab
const prompt = byId("prompt");
const list = byId("messages");
const sendButton = byId("send");
let messages = JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
let running = null; // the AbortController of the answer that streams

export function startChat() {
  restoreSettings();
  show();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else submit();
  });
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) submit();
    } else if (event.key === "ArrowUp" && prompt.value === "" && !running) {
      event.preventDefault();
      editLast();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    messages = [];
    show();
    prompt.focus();
  });
  byId("export").addEventListener("click", save);
  byId("toggle-settings").addEventListener("click", () => {
    const settings = byId("settings");
    const isShown = getComputedStyle(settings).display !== "none";
    settings.classList.toggle("open", !isShown);
    settings.classList.toggle("closed", isShown);
    byId("toggle-settings").setAttribute("aria-expanded", String(!isShown));
  });
}

function submit() {
  const content = prompt.value.trim();
  const last = messages.at(-1);
  const calls = last?.role === "assistant" ? (last.tool_calls ?? []) : [];
  if (!content) return;
  // What is typed after calls of tools is their result.
  if (calls.length) messages.push(...calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content })));
  else messages.push({ role: "user", content });
  if (!answer()) messages.splice(messages.length - Math.max(1, calls.length));
  else prompt.value = "";
  fit();
}

// Asks for an answer to the messages; returns whether the settings allow it.
function answer() {
  const fields = requestFields();
  if (fields === null) return false;
  const system = systemPrompt();
  const body = {
    model: byId("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages.map(sent)],
    stream: true,
    stream_options: { include_usage: true },
    ...fields,
  };
  show();
  stream(body);
  return true;
}

async function stream(body) {
  const message = { role: "assistant", content: "", reasoning: "", tool_calls: [] };
  const view = new MessageView(message, actionsOf(message));
  const controller = (running = new AbortController());
  const owner = messages; // another chat may begin meanwhile
  owner.push(message);
  list.append(view.node);
  view.isStreaming = true;
  view.draw();
  scroll(true);
  sendButton.textContent = "Stop";
  const times = { start: performance.now() };
  try {
    const response = await request("v1/chat/completions", { body, signal: controller.signal });
    for await (const event of events(response)) {
      take(event, message, times);
      view.redraw(scroll);
    }
  } catch (problem) {
    if (controller.signal.aborted) message.finish = "stopped";
    else message.error = problem.message;
  }
  if (!message.error && !message.finish) message.error = "The answer was cut off.";
  message.notes = notes(message, times);
  view.isStreaming = false;
  view.draw();
  if (running === controller) {
    running = null;
    sendButton.textContent = "Send";
  }
  if (owner === messages) store();
  scroll();
}

function take(event, message, times) {
  if (event.usage) message.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (delta.content || reasoning || delta.tool_calls) {
    times.first ??= performance.now();
    times.last = performance.now();
  }
  message.content += delta.content ?? "";
  message.reasoning += reasoning ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const call = (message.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (piece.id) call.id = piece.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function notes(message, times) {
  const { usage } = message;
  const result = [];
  if (times.first) result.push(`first token ${Math.round(times.first - times.start)} ms`);
  if (usage) {
    const seconds = (times.last - times.first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0.02) {
      result.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    const cached = usage.prompt_tokens_details?.cached_tokens;
    result.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens${cached ? `, ${cached} cached` : ""}`);
  }
  if (message.finish && !["stop", "tool_calls"].includes(message.finish)) result.push(`ended by ${message.finish}`);
  return result;
}

// -- what is shown ----------------------------------------------------------------------

function show() {
  const views = messages.map((message) => new MessageView(message, actionsOf(message)).node);
  list.replaceChildren(...views);
  store();
  scroll(true);
}

function actionsOf(message) {
  const button = (name, call) => element("button", { type: "button", onclick: call }, name);
  const copy = button("copy", () => navigator.clipboard?.writeText(message.content));
  if (message.role === "assistant") return [copy, button("again", () => again(message))];
  return message.role === "user" ? [copy, button("edit", () => edit(message))] : [copy];
}

function again(message) {
  if (running) return;
  const removed = messages.splice(messages.indexOf(message));
  if (!answer()) messages.push(...removed);
}

function edit(message) {
  if (running) return;
  messages.splice(messages.indexOf(message));
  prompt.value = message.content;
  show();
  fit();
  prompt.focus();
}

function editLast() {
  const last = messages.findLast((message) => message.role === "user");
  if (last) edit(last);
}

function scroll(always = false) {
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  if (always === true || isAtEnd) list.scrollTop = list.scrollHeight;
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function store() {
  try {
    sessionStorage.setItem(STORED, JSON.stringify(messages));
  } catch {
    // The browser keeps some megabytes; a longer conversation is lost with the tab.
  }
}

function save() {
  const system = systemPrompt();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages.map(sent)];
  const blob = new Blob([JSON.stringify({ messages: all }, null, 2)], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(blob), download: "conversation.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
