"use strict";
// The page reads the same without this script. The script adds two things: tables are sorted by a click on a header,
// and the text of a code block is copied by a button.

const SIZES = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };
const NUMBER = /^([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*([KMGT]iB)?/;
const words = new Intl.Collator("en", { numeric: true });

// The number that a cell begins with, in bytes where a size follows. An interval is sorted by its value, which is first.
function number(text) {
  const found = NUMBER.exec(text);
  return found ? Number(found[1]) * (SIZES[found[2]] ?? 1) : NaN;
}

// The rows as they stand alone: each with the cells that the page shows once for several rows.
function wholeRows(body) {
  let above = [];
  let held = null;
  let left = 0;
  for (const row of body.rows) {
    if (left > 0) {
      row.prepend(held.cloneNode(true));
      left -= 1;
    } else {
      held = row.cells[0];
      left = held.rowSpan - 1;
      held.rowSpan = 1;
    }
    const cells = [...row.cells];
    cells.forEach((cell, place) => { if (cell.textContent === "") cell.innerHTML = above[place]?.innerHTML ?? ""; });
    above = cells;
  }
  return [...body.rows];
}

// Orders rows by the cells of a column. What has no value, or none that is a number, comes last in both directions.
function ordered(rows, place, direction) {
  const text = new Map(rows.map((row) => [row, row.cells[place].textContent.trim()]));
  const given = [...text.values()].filter((value) => value !== "\u2013");
  const right = rows[0].cells[place].style.textAlign === "right";
  const numeric = right || given.every((value) => !Number.isNaN(number(value)));
  const key = (row) => (numeric ? number(text.get(row)) : text.get(row));
  const missing = (row) => (numeric ? Number.isNaN(key(row)) : text.get(row) === "\u2013");
  const compare = numeric ? (a, b) => a - b : words.compare;
  const [present, absent] = [rows.filter((row) => !missing(row)), rows.filter(missing)];
  return [...present.sort((a, b) => direction * compare(key(a), key(b))), ...absent];
}

function makeSortable(table) {
  const asWritten = table.tBodies[0]?.cloneNode(true);
  if (!asWritten || asWritten.rows.length < 2) return;
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column; a third click restores the order of the page";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[header.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      const body = asWritten.cloneNode(true);
      if (order) {
        header.setAttribute("aria-sort", order);
        body.append(...ordered(wholeRows(body), place, order === "ascending" ? 1 : -1));
      }
      table.tBodies[0].replaceWith(body);
    });
  });
}

function makeCopyable(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const code = block.querySelector("pre");
    try {
      await navigator.clipboard.writeText(code.textContent.trimEnd());
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.append(button);
}

document.querySelectorAll("table").forEach(makeSortable);
document.querySelectorAll(".code").forEach(makeCopyable);
