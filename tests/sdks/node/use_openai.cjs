// The official openai package for Node: chats and responses.
const assert = require("node:assert/strict");
const OpenAI = require("openai");
const { url, key, model, capital, weather, sum, long, parameters, sumSchema, run } = require("./checks.cjs");

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const common = { model, temperature: 0, max_tokens: 100 };
const ask = (options) => client.chat.completions.create({ ...common, ...options });
const get_weather = { name: "get_weather", description: "Get the weather for a city", parameters };
const tools = [{ type: "function", function: get_weather }];

run({
  async chat() {
    assert.match((await ask({ messages: capital })).choices[0].message.content, /Rome/);
    const response = await client.responses.create({ model, temperature: 0, input: capital });
    assert.match(response.output_text, /Rome/);
  },
  async stream() {
    const whole = (await ask({ messages: capital })).choices[0].message.content;
    let text = "";
    for await (const chunk of await ask({ messages: capital, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, whole);
    const events = [];
    const stream = await client.responses.create({ model, temperature: 0, input: capital, stream: true });
    for await (const event of stream) events.push(event.type);
    assert.deepEqual([events[0], events.at(-1)], ["response.created", "response.completed"]);
  },
  async tools() {
    const forced = { type: "function", function: { name: "get_weather" } };
    for (const tool_choice of ["auto", "required", forced]) {
      const [call] = (await ask({ messages: weather, tools, tool_choice })).choices[0].message.tool_calls;
      assert.equal(call.function.name, "get_weather");
      assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    }
    const cities = [];
    const runnable = { ...get_weather, parse: JSON.parse, function: ({ city }) => { cities.push(city); return '{"temperature": 21}'; } };
    const runner = client.chat.completions.runTools({ ...common, messages: weather, tools: [{ type: "function", function: runnable }] });
    assert.match(await runner.finalContent(), /21/);
    assert.deepEqual(cities, ["Paris"]);
  },
  async structured() {
    const response_format = { type: "json_schema", json_schema: { name: "sum", strict: true, schema: sumSchema } };
    const answer = await client.chat.completions.parse({ ...common, messages: sum, response_format });
    assert.equal(typeof answer.choices[0].message.parsed.sum, "number");
  },
  async errors() {
    await assert.rejects(ask({ messages: capital, top_p: 2 }), (e) => e instanceof OpenAI.BadRequestError && e.param === "top_p");
    await assert.rejects(ask({ messages: long }), (e) => e instanceof OpenAI.BadRequestError && e.code === "context_length_exceeded");
    await assert.rejects(ask({ messages: capital, model: "nobody" }), OpenAI.NotFoundError);
    await assert.rejects(new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
  },
  async cancel() {
    const endless = { messages: capital, max_tokens: 20_000, ignore_eos: true };
    for await (const _ of await ask({ ...endless, stream: true })) break;
    const signal = AbortSignal.timeout(300);
    await assert.rejects(client.chat.completions.create({ ...common, ...endless }, { signal }), OpenAI.APIUserAbortError);
  },
});
