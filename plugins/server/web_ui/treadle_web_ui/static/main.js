// The two halves of the page, the list of models, and the theme.

import { request } from "./api.js";
import { startChat } from "./chat.js";
import { byId, element } from "./dom.js";
import { unwatchEngine, watchEngine } from "./engine.js";

const THEMES = ["", "light", "dark"];

function route() {
  const page = location.hash === "#engine" ? "engine" : "chat";
  for (const name of ["chat", "engine"]) {
    byId(name).hidden = name !== page;
    if (name === page) byId(`tab-${name}`).setAttribute("aria-current", "page");
    else byId(`tab-${name}`).removeAttribute("aria-current");
  }
  if (page === "engine") watchEngine();
  else {
    unwatchEngine();
    byId("prompt").focus();
  }
}

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("treadle-theme", theme);
  byId("theme").textContent = { "": "Auto", light: "Light", dark: "Dark" }[theme];
}

async function showModels() {
  const select = byId("model");
  try {
    const { data } = await (await request("v1/models")).json();
    select.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
  } catch (problem) {
    select.replaceChildren(element("option", { value: "" }, `No models: ${problem.message}`));
  }
}

startChat();
useTheme(localStorage.getItem("treadle-theme") ?? "");
byId("theme").addEventListener("click", () => {
  const at = THEMES.indexOf(document.documentElement.dataset.theme);
  useTheme(THEMES[(at + 1) % THEMES.length]);
});
addEventListener("hashchange", route);
route();
showModels();
