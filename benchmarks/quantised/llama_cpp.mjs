// llama.cpp as another side of a benchmark, by the npm package node-llama-cpp: answers a line of JSON for each line.
//
//     {"model": "x.gguf", "threads": 2}  ->  {"version": "v0.5.0", "system": "..."}
//     {"ids": [1, 2], "tokens": 8}       ->  {"ids": [...], "seconds": 0.5}
//
// Greedy, one sequence, no end of text; the time is that of the prompt and of the answer. Nothing else is on stdout.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import path from "node:path";
import process from "node:process";
import { pathToFileURL } from "node:url";

const require = createRequire(path.join(process.cwd(), "package.json"));
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(require.resolve("node-llama-cpp")));

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");
const next = async () => {
  const { value, done } = await lines.next();
  return done ? null : JSON.parse(value);
};

const settings = await next();
const llama = await getLlama({
  gpu: false,
  build: "never",
  maxThreads: settings.threads,
  logLevel: LlamaLogLevel.error,
  progressLogs: false,
});
const model = await llama.loadModel({ modelPath: settings.model });
const context = await model.createContext({ contextSize: 2048, threads: { ideal: settings.threads, min: settings.threads } });
const sequence = context.getSequence();
say({ version: llama.llamaCppRelease.release, system: llama.systemInfo });

for (let work = await next(); work !== null; work = await next()) {
  await sequence.clearHistory();
  const ids = [];
  const began = performance.now();
  // The answer goes on past the end of its text, as ours does with ignore_eos.
  for await (const id of sequence.evaluate(work.ids, { temperature: 0, yieldEogToken: true })) {
    ids.push(id);
    if (ids.length === work.tokens) break;
  }
  say({ ids, seconds: (performance.now() - began) / 1000 });
}
await llama.dispose();
