// The exported models in onnxruntime-web, on one thread: the student's graphs, and the teacher's step iterated.
// Shapes: B digits, 64 numbers each.

const CLASSES = 10;

// The bytes of a file that is part of the page: base64 of gzip.
async function unpacked(name) {
  const text = atob(document.getElementById(`file-${name}`).textContent);
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// Sessions for the teacher's step and for each number of the student's steps.
async function loadModels(settings) {
  // A page opened from disk may load neither modules nor files, but what it made itself.
  const code = new Blob([await unpacked("wasm-module")], { type: "text/javascript" });
  ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(code) };
  ort.env.wasm.wasmBinary = await unpacked("wasm");
  ort.env.wasm.numThreads = 1;
  const open = async (name) => ort.InferenceSession.create(await unpacked(name));
  const students = new Map();
  for (const steps of settings.steps) students.set(steps, await open(`student-${steps}`));
  return { step: await open("teacher-step"), students };
}

// Counts 0..16 of B digits as the models' input (B, 1, 8, 8).
function asInput(counts, settings) {
  const { paper, full } = settings;
  const pixels = Float32Array.from(counts, (count) => paper + (count / 16) * (full - paper));
  return new ort.Tensor("float32", pixels, [counts.length / 64, 1, 8, 8]);
}

// The answers for each digit of the batch: probabilities of the classes, and the residual.
function answers(found) {
  const logits = Array.from(found.output.data);
  return Array.from(found.residual.data, (residual, i) => ({
    probabilities: softmax(logits.slice(i * CLASSES, (i + 1) * CLASSES)),
    residual,
  }));
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const weights = logits.map((value) => Math.exp(value - largest));
  const sum = weights.reduce((a, b) => a + b);
  return weights.map((weight) => weight / sum);
}

function bestClass(probabilities) {
  return probabilities.indexOf(Math.max(...probabilities));
}

// The teacher: z_0 = 0, z_{k+1} = f(z_k). Evaluating f at z_k is what tells the residual of z_k, so the answer after k
// evaluations is known after k + 1 of them; `ms` says when that was. Each of the student's graphs has one more, too.
async function iterated(models, context, settings) {
  const rows = [];
  let state = new ort.Tensor("float32", new Float32Array(context.size), context.dims);
  const began = performance.now();
  for (let k = 0; k <= settings.limit; k++) {
    const found = await models.step.run({ state, context });
    if (k) rows.push({ steps: k, ms: performance.now() - began, answers: answers(found) });
    if (found.residual.data.every((residual) => residual <= settings.tolerance)) break;
    state = found.next_state;
  }
  return rows;
}

// The student: one run of the graph with this many steps, from the input to the answer and its residual.
async function stepped(models, x, settings) {
  const rows = [];
  let context = null;
  for (const steps of settings.steps) {
    const began = performance.now();
    const found = await models.students.get(steps).run({ x });
    const ms = performance.now() - began;
    rows.push({ steps, ms, answers: answers(found) });
    context ??= found.context; // what the teacher sees of the input
  }
  return { rows, context };
}

// Both on the same digits. `seconds` is how long to repeat it for, in turns so that both meet the same machine: a
// browser's clock is too coarse for one run. `ms` are then averages over `rounds`.
async function compared(models, counts, settings, seconds = 0) {
  const x = asInput(counts, settings);
  const { rows: student, context } = await stepped(models, x, settings);
  const teacher = await iterated(models, context, settings);
  const sums = [...teacher, ...student].map(() => 0);
  const began = performance.now();
  let rounds = 0;
  while (performance.now() - began < 1000 * seconds) {
    const again = [
      ...(await iterated(models, context, settings)),
      ...(await stepped(models, x, settings)).rows,
    ];
    again.forEach((row, i) => (sums[i] += row.ms));
    rounds += 1;
  }
  if (rounds) [...teacher, ...student].forEach((row, i) => (row.ms = sums[i] / rounds));
  return { teacher, student, rounds };
}

// The first row from which on all answers are `label`; undefined if the last is not.
function settledAt(rows, label) {
  let first;
  for (const row of rows) {
    if (bestClass(row.answers[0].probabilities) !== label) first = undefined;
    else first ??= row;
  }
  return first;
}
