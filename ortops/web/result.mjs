// How good a model is: the share that is right, which classes it confuses, and the images that it gets wrong.
import { element, find, percent } from "./common.mjs";

const MOST_CLASSES = 12; // in the table
const MOST_IMAGES = 24;

/** Draws a small image `{data, width, height}`. */
export function drawPreview(canvas, { data, width, height }) {
  [canvas.width, canvas.height] = [width, height];
  canvas.getContext("2d").putImageData(new ImageData(data, width, height), 0, 0);
  return canvas;
}

const isRight = ({ labels, guesses }, row) => labels[row] === guesses[row];

/** Returns how many rows of a judgement `{labels, guesses, ids}` are right. */
export const countRight = (judgement) => judgement.labels.filter((_, row) => isRight(judgement, row)).length;

/** Returns the classes for the table, in order: all, or those with the most mistakes. */
function classesOf({ labels, guesses }) {
  const mistakes = new Map();
  labels.forEach((label, row) => {
    for (const each of [label, guesses[row]]) mistakes.set(each, (mistakes.get(each) ?? 0) + (label !== guesses[row]));
  });
  const byMistakes = [...mistakes.keys()].sort((a, b) => mistakes.get(b) - mistakes.get(a) || a - b);
  return byMistakes.slice(0, MOST_CLASSES).sort((a, b) => a - b);
}

/** Makes the table of classes: rows are what an image is, and columns what it is taken for. */
function tableOf(judgement, nameOf) {
  const classes = classesOf(judgement);
  const counts = new Map(); // "label guess" → how many
  judgement.labels.forEach((label, row) => {
    const key = `${label} ${judgement.guesses[row]}`;
    counts.set(key, (counts.get(key) ?? 0) + 1);
  });
  const most = Math.max(...counts.values());
  const cellOf = (label, guess) => {
    const count = counts.get(`${label} ${guess}`) ?? 0;
    const kind = count === 0 ? "none" : label === guess ? "right" : "wrong";
    const cell = element("td", { textContent: count, className: kind });
    cell.style.setProperty("--share", `${Math.round(20 + (50 * count) / most)}%`);
    return cell;
  };
  const head = (text, scope) => element("th", { scope, textContent: text });
  return element("table", { className: classes.some((each) => nameOf(each).length > 3) ? "long" : "" },
    element("thead", {}, element("tr", {}, element("td", {}), ...classes.map((each) => head(nameOf(each), "col")))),
    element("tbody", {}, ...classes.map((label) =>
      element("tr", {}, head(nameOf(label), "row"), ...classes.map((guess) => cellOf(label, guess))))));
}

/** Returns the images that are wrong, or a sentence. */
async function mistakesOf(judgement, { what, nameOf, previewsOf }) {
  const { labels, guesses, ids } = judgement;
  const wrong = labels.map((_, row) => row).filter((row) => !isRight(judgement, row));
  if (wrong.length === 0) return [element("p", { textContent: `None of the ${what}.` })];
  const visible = wrong.slice(0, MOST_IMAGES);
  const previews = await previewsOf(visible.map((row) => ids[row]));
  const figures = visible.map((row, at) => {
    const [is, guess] = [nameOf(labels[row]), nameOf(guesses[row])];
    const canvas = element("canvas", { role: "img", ariaLabel: `An image of ${is}` });
    if (previews[at]) drawPreview(canvas, previews[at]); // else it was removed
    return element("figure", { role: "listitem" }, canvas,
      element("figcaption", {}, element("b", { textContent: is }), " taken for ", element("b", { textContent: guess })));
  });
  const more = wrong.length - visible.length;
  return [element("div", { className: "mistakes", role: "list" }, ...figures), more ? `and ${more} more` : ""];
}

/**
 * Shows a judgement, or what there will be if it is null.
 *
 * @param judgement `{labels, guesses, ids}`: one of each for a row; ids only of images.
 * @param page `what` the rows are, such as "images set aside"; `nameOf(class)`; and, for rows with ids,
 *   `previewsOf(ids)`.
 */
export async function showResult(judgement, page) {
  if (judgement === null) {
    find("verdict").textContent = "After the training: how much is classified right, what is confused, and the trained model.";
    find("judgement").replaceChildren();
    return;
  }
  const [rows, right] = [judgement.labels.length, countRight(judgement)];
  find("verdict").replaceChildren(element("strong", { textContent: percent(right / rows) }),
    ` are right: ${right} of ${rows} ${page.what}.`);
  const all = new Set([...judgement.labels, ...judgement.guesses]).size;
  const rest = all > MOST_CLASSES ? ` These are the ${MOST_CLASSES} of ${all} classes with the most mistakes.` : "";
  const mistakes = judgement.ids.length ? [element("h3", { textContent: "Still wrong" }), ...(await mistakesOf(judgement, page))] : [];
  find("judgement").replaceChildren(
    element("h3", { textContent: "Which classes are confused" }),
    element("p", { className: "hint", textContent: `Rows: the true class. Columns: the class that the model says.${rest}` }),
    element("div", { className: "scroller", tabIndex: 0, role: "region", ariaLabel: "Table of classes" },
      tableOf(judgement, page.nameOf)),
    ...mistakes,
  );
}
