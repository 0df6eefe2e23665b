// Asks a suite by the AI SDK, and prints what it got: node ai.mjs URL PROVIDER.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, provider] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: 'none', name: 'moesaic', supportsStructuredOutputs: true, includeUsage: true };
const model = {
  compatible: () => createOpenAICompatible(settings)('demo'),
  chat: () => createOpenAI(settings).chat('demo'),
  responses: () => createOpenAI(settings)('demo'),
  messages: () => createAnthropic(settings)('demo'),
}[provider]();

const greedy = { model, temperature: 0, maxRetries: 0 };
const story = { ...greedy, prompt: 'Continue this text. The old prince came into the room', maxOutputTokens: 6 };

const whole = await generateText(story);
const stream = streamText(story);
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);

const schema = z.object({ topic: z.enum(['banking', 'travel', 'work']), urgent: z.boolean() });
const sort = { ...greedy, prompt: 'i need to book a flight today', maxOutputTokens: 128 };
const { object } = await generateObject({ ...sort, schema });
const growing = streamObject({ ...sort, schema });
for await (const _ of growing.partialObjectStream);
const { output } = await generateText({ ...sort, output: Output.object({ schema }) });

const cities = [];
const getWeather = tool({
  description: 'The weather of a city',
  inputSchema: z.object({ city: z.enum(['Paris', 'Rome']) }),
  execute: async ({ city }) => {
    cities.push(city);
    return `It rains in ${city}.`;
  },
});
const ask = {
  ...greedy,
  prompt: 'what is the weather in Rome?',
  maxOutputTokens: 64,
  tools: { getWeather },
  stopWhen: stepCountIs(2),
  // The demo model calls only where it must.
  prepareStep: ({ stepNumber }) => ({
    toolChoice: stepNumber === 0 ? { type: 'tool', toolName: 'getWeather' } : 'auto',
  }),
};
const loop = await generateText(ask);
const streamed = streamText(ask);
await streamed.consumeStream();

let refused;
try {
  await generateText({ ...story, prompt: 'a '.repeat(20000) });
} catch (error) {
  refused = [error.statusCode, error.message];
}

console.log(
  JSON.stringify({
    whole: whole.text,
    streamed: pieces.join(''),
    num_pieces: pieces.length,
    reasons: [whole.finishReason, await stream.finishReason],
    tokens: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    objects: [object, await growing.object, output],
    cities,
    kinds: loop.steps.flatMap((step) => step.content.map((part) => part.type)),
    streamed_kinds: (await streamed.steps).flatMap((step) => step.content.map((part) => part.type)),
    answers: [loop.text, await streamed.text],
    refused,
    warnings: [...(whole.warnings ?? []), ...(loop.warnings ?? [])],
  }),
);
