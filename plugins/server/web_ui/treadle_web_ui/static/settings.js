// The settings of the chat, kept in the browser, and the fields of a request that they become.

import { byId } from "./dom.js";

const STORED = "treadle-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"];
const form = byId("settings-form");
const error = byId("settings-error");

export function restoreSettings() {
  const values = JSON.parse(localStorage.getItem(STORED) ?? "{}");
  for (const [name, value] of Object.entries(values)) if (form.elements[name]) form.elements[name].value = value;
  showSchema();
  form.addEventListener("input", () => {
    localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(new FormData(form))));
    showSchema();
    error.textContent = "";
  });
  form.addEventListener("reset", () => {
    localStorage.removeItem(STORED);
    error.textContent = "";
    setTimeout(showSchema); // after the fields have been reset
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}

function showSchema() {
  byId("schema-label").hidden = form.elements.format.value !== "json_schema";
}

export const systemPrompt = () => form.elements.system.value.trim();

// Returns the fields of a request, or null if a setting is wrong, which is then shown beside it.
export function requestFields() {
  error.textContent = "";
  if (!form.reportValidity()) return null;
  try {
    return fields();
  } catch (problem) {
    error.textContent = problem.message;
    document.getElementById("settings").classList.add("open");
    return null;
  }
}

function fields() {
  const values = Object.fromEntries(new FormData(form));
  const result = {};
  for (const name of NUMBERS) if (values[name] !== "") result[name] = Number(values[name]);
  if (values.reasoning_effort) result.reasoning_effort = values.reasoning_effort;
  const stop = values.stop.split("\n").filter((line) => line !== "");
  if (stop.length) result.stop = stop;
  if (values.format === "json_object") result.response_format = { type: "json_object" };
  if (values.format === "json_schema") {
    result.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", schema: parsed("The JSON schema", values.schema) },
    };
  }
  if (values.tools.trim()) result.tools = parsed("The list of tools", values.tools);
  return result;
}

function parsed(what, text) {
  try {
    return JSON.parse(text);
  } catch (problem) {
    throw new Error(`${what} is not JSON: ${problem.message}`);
  }
}
