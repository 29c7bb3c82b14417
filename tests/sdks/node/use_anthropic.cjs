// The official @anthropic-ai/sdk package for Node: messages.
const assert = require("node:assert/strict");
const Anthropic = require("@anthropic-ai/sdk");
const { url, key, model, capital, weather, sum, long, parameters, sumSchema, run } = require("./checks.cjs");

const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const common = { model, temperature: 0, max_tokens: 100 };
const ask = (options) => client.messages.create({ ...common, ...options });
const tools = [{ name: "get_weather", description: "Get the weather for a city", input_schema: parameters }];

run({
  async chat() {
    const answer = await ask({ messages: capital });
    assert.match(answer.content[0].text, /Rome/);
    const { input_tokens } = await client.messages.countTokens({ model, messages: capital });
    assert.equal(input_tokens, answer.usage.input_tokens + (answer.usage.cache_read_input_tokens ?? 0));
  },
  async stream() {
    const stream = client.messages.stream({ ...common, messages: capital });
    let text = "";
    stream.on("text", (piece) => { text += piece; });
    assert.equal((await stream.finalMessage()).content[0].text, text);
    assert.match(text, /Rome/);
  },
  async tools() {
    let asked;
    for (const tool_choice of [{ type: "auto" }, { type: "any" }, { type: "tool", name: "get_weather" }]) {
      asked = await ask({ messages: weather, tools, tool_choice });
      const call = asked.content.at(-1);
      assert.deepEqual([asked.stop_reason, call.name, call.input], ["tool_use", "get_weather", { city: "Paris" }]);
    }
    const result = { type: "tool_result", tool_use_id: asked.content.at(-1).id, content: '{"temperature": 21}' };
    const turns = [...weather, { role: "assistant", content: asked.content }, { role: "user", content: [result] }];
    assert.match((await ask({ messages: turns, tools })).content[0].text, /21/);
  },
  async structured() {
    const output_config = { format: { type: "json_schema", schema: sumSchema } };
    const answer = await ask({ messages: sum, output_config });
    assert.equal(typeof JSON.parse(answer.content[0].text).sum, "number");
  },
  async errors() {
    await assert.rejects(ask({ messages: capital, top_p: 2 }), Anthropic.BadRequestError);
    await assert.rejects(ask({ messages: long }), Anthropic.BadRequestError);
    await assert.rejects(ask({ messages: capital, model: "nobody" }), Anthropic.NotFoundError);
    await assert.rejects(new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 }).models.list(), Anthropic.AuthenticationError);
  },
  async cancel() {
    const endless = { messages: capital, max_tokens: 20_000, ignore_eos: true };
    for await (const _ of await ask({ ...endless, stream: true })) break;
  },
});
