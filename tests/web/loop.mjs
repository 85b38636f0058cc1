// What every runtime does with a session.

const rowsOf = ({ data, dims }, from, to) => {
  const size = data.length / dims[0];
  return data.subarray(from * size, to * size);
};

export function batch(arrays, from, to) {
  return Object.fromEntries(Object.entries(arrays).map(([n, array]) => [n, rowsOf(array, from, to)]));
}

/** Goes through the data in their order, and returns the losses and the time of a step. */
export async function train(session, arrays, epochs, rows) {
  const total = Object.values(arrays)[0].dims[0];
  const losses = [];
  const times = [];
  for (let epoch = 0; epoch < epochs; epoch += 1) {
    for (let from = 0; from < total; from += rows) {
      const begin = performance.now();
      const { loss } = await session.step(batch(arrays, from, Math.min(from + rows, total)));
      times.push(performance.now() - begin);
      losses.push(loss);
    }
  }
  times.sort((a, b) => a - b);
  return { losses, milliseconds: times[Math.floor(times.length / 2)] };
}

/** Returns the loss and the accuracy. */
export async function evaluate(session, arrays) {
  const found = await session.evaluate(batch(arrays, 0, Object.values(arrays)[0].dims[0]));
  const [rows, classes] = found.logits.dims;
  let right = 0;
  for (let row = 0; row < rows; row += 1) {
    const scores = [...found.logits.data.subarray(row * classes, (row + 1) * classes)];
    right += scores.indexOf(Math.max(...scores)) === Number(arrays.labels.data[row]);
  }
  return { loss: found.loss, accuracy: right / rows };
}
