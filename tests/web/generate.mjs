// Continues tokens with transformers.js: node generate.mjs <package> <folder> <dtype> <tokens> <count>

import { dirname, basename } from "node:path";
import { pathToFileURL } from "node:url";

const [, , packageFile, folder, dtype, prompt, count] = process.argv;
const { AutoModelForCausalLM, AutoTokenizer, Tensor, env } = await import(pathToFileURL(packageFile));
env.allowRemoteModels = false;
env.localModelPath = dirname(folder);
const model = await AutoModelForCausalLM.from_pretrained(basename(folder), { dtype });
const tokenizer = await AutoTokenizer.from_pretrained(basename(folder));
const tokens = prompt.split(",").map(BigInt);
const made = (values) => new Tensor("int64", BigInt64Array.from(values), [1, values.length]);
const found = await model.generate({
    input_ids: made(tokens),
    attention_mask: made(tokens.map(() => 1n)),
    max_new_tokens: Number(count),
    do_sample: false,
});
const after = found.tolist()[0].slice(tokens.length).map(Number);
console.log(JSON.stringify([after, tokenizer.decode(after, { skip_special_tokens: true })]));
