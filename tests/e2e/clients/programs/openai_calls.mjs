// What users of the npm package openai do. Argument: the URL of the API.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "baton-bundled";
const messages = [{ role: "user", content: "Write a Python function add." }];
const asked = { model, messages, temperature: 0, max_tokens: 16 };

const models = await client.models.list();
assert.equal(models.data[0].id, model);

const whole = (await client.chat.completions.create(asked)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, whole);

const tools = [
  {
    type: "function",
    function: {
      name: "add",
      strict: true,
      parameters: {
        type: "object",
        properties: { a: { type: "integer", minimum: 0, maximum: 9 } },
        required: ["a"],
        additionalProperties: false,
      },
    },
  },
];
const called = await client.chat.completions.create({
  ...asked,
  max_tokens: 200,
  tools,
  tool_choice: "required",
});
assert.equal(called.choices[0].message.tool_calls[0].function.name, "add");

const response = await client.responses.create({ model, input: "def f(", max_output_tokens: 16 });
assert.ok(["completed", "incomplete"].includes(response.status));
assert.equal((await client.responses.retrieve(response.id)).output_text, response.output_text);

await assert.rejects(
  client.chat.completions.create({ ...asked, temperature: 3 }),
  OpenAI.BadRequestError,
);
