// On a phone, a table with a cell of more than eight lines is read from top to bottom: each cell of a row below the one
// before, with the head of its column. And what is open on a desk is folded: the long tables of the page of models.
document.addEventListener("DOMContentLoaded", () => {
  if (!matchMedia("(max-width: 44.9375em)").matches) return;
  for (const table of document.querySelectorAll("article table")) {
    const cells = [...table.querySelectorAll("td")];
    if (!cells.some((cell) => cell.offsetHeight > 180)) continue;
    table.dataset.stacked = "";
    for (const cell of cells) cell.dataset.head = table.rows[0].cells[cell.cellIndex].textContent;
  }
  for (const fold of document.querySelectorAll("article details[open]")) fold.open = false;
});
