// What the scripts beside this file share: the questions, and how their checks are run and named.
const [url, key] = process.argv.slice(2);

async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(name);
    } catch (error) {
      console.error(name, "failed:", error);
      process.exitCode = 1;
    }
  }
}

module.exports = {
  url, key, run,
  model: "demo",
  capital: [{ role: "user", content: "What is the capital of Italy?" }],
  weather: [{ role: "user", content: "What is the weather in Paris?" }],
  sum: [{ role: "user", content: "What is 12 plus 30?" }],
  long: [{ role: "user", content: "word ".repeat(100_000) }],
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  sumSchema: {
    type: "object", properties: { sum: { type: "integer" } }, required: ["sum"], additionalProperties: false,
  },
};
