// Typesets every ```math block, once its page is there.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.math")) {
    katex.render(block.textContent, block, { displayMode: true, throwOnError: true });
  }
});
