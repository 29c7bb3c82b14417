// Requests to the server that this page comes from.

const KEY = "treadle-api-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Paths are relative to the page, so that it also works behind a proxy that adds a prefix.
const url = (path) => new URL(path, document.baseURI);

async function send(path, options) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(url(path), { ...options, headers });
}

let asking = null; // one dialog for all requests that were refused

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    input.value = "";
    dialog.addEventListener(
      "close",
      () => {
        const isGiven = dialog.returnValue === "ok" && input.value.trim() !== "";
        if (isGiven) sessionStorage.setItem(KEY, input.value.trim());
        asking = null;
        resolve(isGiven);
      },
      { once: true },
    );
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

// Returns the response of a request that succeeded; asks for a key where one is needed.
export async function request(path, { body, signal, ask = true } = {}) {
  const options = { signal, headers: {} };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response = await send(path, options);
  while (response.status === 401 && ask && (await askForKey())) response = await send(path, options);
  if (!response.ok) throw new ApiError(response.status, await errorOf(response));
  return response;
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText} ${text.slice(0, 300)}`.trim();
  }
}

// Yields the JSON of each event of a stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      buffered += value;
      const lines = buffered.split("\n");
      buffered = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
