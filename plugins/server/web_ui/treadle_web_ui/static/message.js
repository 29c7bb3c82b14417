// One message of the conversation, as it is shown and as it is sent.

import { element } from "./dom.js";
import { markdown } from "./markdown.js";

export function sent(message) {
  const { role, content, tool_calls, tool_call_id } = message;
  const result = { role, content };
  if (tool_calls?.length) {
    result.tool_calls = tool_calls;
    result.content = content || null;
  }
  if (tool_call_id) result.tool_call_id = tool_call_id;
  return result;
}

const NAMES = { user: "You", assistant: "Model", tool: "Result of a tool" };

// Shows a message and redraws it, at most once a frame, while it grows. `actions` are buttons below it.
export class MessageView {
  constructor(message, actions = []) {
    this.message = message;
    this.body = element("div", { className: "body" });
    this.meta = element("div", { className: "meta" });
    this.reasoning = element("div");
    this.summary = element("summary", {}, "Reasoning");
    this.details = element("details", { className: "reasoning" }, this.summary, this.reasoning);
    this.calls = element("div");
    this.error = element("p", { className: "error", role: "alert" });
    this.actions = actions;
    this.isStreaming = false;
    this.isDrawn = true;
    this.node = element(
      "article",
      { className: `message ${message.role}` },
      element("span", { className: "who" }, NAMES[message.role]),
      this.details,
      this.body,
      this.calls,
      this.error,
      this.meta,
    );
    this.draw();
  }

  redraw(after = () => {}) {
    if (!this.isDrawn) return;
    this.isDrawn = false;
    requestAnimationFrame(() => {
      this.isDrawn = true;
      this.draw();
      after();
    });
  }

  draw() {
    const { message } = this;
    this.details.hidden = !message.reasoning;
    this.reasoning.textContent = message.reasoning ?? "";
    this.summary.textContent = this.isStreaming && !message.content ? "Reasoning …" : "Reasoning";
    const isPlain = message.role !== "assistant";
    this.body.replaceChildren(isPlain ? message.content : markdown(message.content));
    this.body.hidden = !message.content;
    this.calls.replaceChildren(...(message.tool_calls ?? []).map(call));
    this.error.textContent = message.error ?? "";
    this.node.classList.toggle("waiting", this.isStreaming && !message.content && !message.reasoning);
    const notes = [...(message.notes ?? [])].map((note) => element("span", {}, note));
    this.meta.replaceChildren(...notes, ...(this.isStreaming ? [] : this.actions));
  }
}

function call({ function: { name, arguments: text } }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is not complete yet, or not JSON: shown as it is.
  }
  return element("div", { className: "call" }, element("strong", {}, name), element("pre", {}, element("code", {}, shown)));
}
