// Long tables get a field that filters their rows, and headers that sort them.
document.querySelectorAll(".md-typeset table").forEach((table) => {
  const body = table.tBodies[0];
  if (!body || body.rows.length < 30) return;
  table.dataset.sortable = ""; // a class would take away the style of tables

  const field = document.createElement("input");
  field.className = "table-filter";
  field.placeholder = `Filter ${body.rows.length} rows`;
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  const anchor = table.closest(".md-typeset__scrollwrap") || table;
  anchor.before(field);

  const value = (row, column) => row.cells[column].textContent.trim();
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    header.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) =>
        value(a, column).localeCompare(value(b, column), "en", { numeric: true }));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
});
