// The exported models in onnxruntime-web, on one thread: the student's graphs, and the teacher's step iterated.
// Shapes: B digits, 64 numbers each.

const CLASSES = 10;
const MEASURED_SECONDS = 0.4;
const LEAST_ROUNDS = 7;

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

// What a run gives and its milliseconds: repeated until a clock with this tick can tell, or once for a tick of 0.
async function timed(run, tick) {
  const began = performance.now();
  let [times, passed] = [0, 0];
  let found;
  do {
    found = await run();
    times += 1;
    passed = performance.now() - began;
  } while (passed < 10 * tick);
  return { found, ms: passed / times };
}

// The teacher: z_0 = 0, z_{k+1} = f(z_k). A row for each z_k, from z_0 on, with the milliseconds of the run that
// evaluated f there. That run is also what tells the residual of z_k and reads out its answer.
async function iterated(models, context, settings, tick) {
  const rows = [];
  let state = new ort.Tensor("float32", new Float32Array(context.size), context.dims);
  for (let steps = 0; steps <= settings.limit; steps++) {
    const { found, ms } = await timed(() => models.step.run({ state, context }), tick);
    rows.push({ steps, ms, answers: answers(found) });
    if (found.residual.data.every((residual) => residual <= settings.tolerance)) break;
    state = found.next_state;
  }
  return rows;
}

// The student: a row for each graph, with the milliseconds from the input to the answer and its residual.
async function stepped(models, x, settings, tick) {
  const rows = [];
  let context = null;
  for (const steps of settings.steps) {
    if (tick) await pause(0); // other programs get their turn now, not while the clock runs
    const { found, ms } = await timed(() => models.students.get(steps).run({ x }), tick);
    rows.push({ steps, ms, answers: answers(found) });
    context ??= found.context; // what the teacher sees of the input
  }
  return { rows, context };
}

async function oneRound(models, counts, settings, tick) {
  const x = asInput(counts, settings);
  const { rows: student, context } = await stepped(models, x, settings, tick);
  return { student, teacher: await iterated(models, context, settings, tick) };
}

// Rows from step 1 on; `ms` is now the time to the answer. The teacher's run at z_k comes after all those before it: its
// answer after k steps takes k + 1 evaluations of f, as that of the student's graph does.
function withWholeTimes({ teacher, student, ...rest }) {
  let passed = 0;
  const summed = teacher.map((row) => ({ ...row, ms: (passed += row.ms) }));
  return { teacher: summed.slice(1), student, ...rest };
}

// Both on the same digits, each once.
async function compared(models, counts, settings) {
  return withWholeTimes(await oneRound(models, counts, settings, 0));
}

// The same in many rounds, for the milliseconds: for each run the least of them, since whatever else the machine does
// can only add to it. Between rounds the page may react; null if `wanted()` is no longer true.
async function measured(models, counts, settings, wanted) {
  const tick = clockTick();
  const rounds = [];
  const began = performance.now();
  while (rounds.length < LEAST_ROUNDS || performance.now() - began < 1000 * MEASURED_SECONDS) {
    rounds.push(await oneRound(models, counts, settings, tick));
    await pause(0);
    if (!wanted()) return null;
  }
  const fastest = (who) =>
    rounds[0][who].map((row, i) => ({ ...row, ms: Math.min(...rounds.map((round) => round[who][i].ms)) }));
  return withWholeTimes({ teacher: fastest("teacher"), student: fastest("student"), rounds: rounds.length });
}

// The smallest change of the browser's clock, in milliseconds: from some millionths to one.
function clockTick() {
  let smallest = Infinity;
  for (let i = 0; i < 5; i++) {
    const before = performance.now();
    let now = before;
    while (now === before) now = performance.now();
    smallest = Math.min(smallest, now - before);
  }
  return smallest;
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// The first row from which on all answers are `label`; undefined if the last is not.
function settledAt(rows, label) {
  let first;
  for (const row of rows) {
    if (bestClass(row.answers[0].probabilities) !== label) first = undefined;
    else first ??= row;
  }
  return first;
}
