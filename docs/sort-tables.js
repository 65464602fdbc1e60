// A click on a table's head sorts its rows by that column: numbers by size, the rest as text; a second click turns round.
document.addEventListener("click", (event) => {
  const head = event.target.closest("article th");
  if (!head) return;
  const column = head.cellIndex;
  const down = head.getAttribute("aria-sort") !== "descending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = head.closest("table").tBodies[0];
  const text = (row) => (row.cells[column] ? row.cells[column].textContent.trim() : "");
  const order = (a, b) => {
    const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
    if (!isNaN(x) && !isNaN(y)) return down ? y - x : x - y;
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
    return down ? text(b).localeCompare(text(a)) : text(a).localeCompare(text(b));
  };
  body.append(...[...body.rows].sort(order));
});
